"""Trace a function that holds tracers where they cannot be replaced: `Hoisted` evaluates a jaxpr.

`body_of` runs at each call that is traced, and chooses between the two bodies.
`f` is traced at the call; the tracers among the constants of its jaxpr are the captured values.
What its rule takes from `f` is returned by the jaxpr too. A rule that cannot be looked into is
traced with it, except inside its own trace: it may call its own function there, and so on without
end. JAX needs the rule of such a call only once that is differentiated, and it is traced then.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jax.tree_util import tree_flatten

from tfgrad_jax import _errors
from tfgrad_jax._compat import behind, is_behind, primal_of
from tfgrad_jax._frontend.grad_fn import (
    Call,
    NeedsValuesError,
    Variables,
    accepts_variables,
    may_return_rule_with_variables,
)
from tfgrad_jax._frontend.structure import Outputs, spec
from tfgrad_jax._source import code_of

from .body import Body, Rebuilt, Result
from .cells import Skeleton, dissect, reach, snapshot, tracers_in
from .residuals import Given, Run, rule_of
from .traced import Traced

_state = threading.local()


@contextlib.contextmanager
def _tracing_a_rule(call: Call) -> Iterator[None]:
    before = _rules_being_traced()
    _state.codes = (*before, code_of(call.f))
    try:
        yield
    finally:
        _state.codes = before


def _rules_being_traced() -> tuple[Any, ...]:
    return getattr(_state, "codes", ())


def hoist(call: Call) -> tuple["Hoisted", list[Any]]:
    """Return the traced call, and the tracers that it closes over."""
    hoisted = Hoisted(call, code_of(call.f) in _rules_being_traced())
    captured, hoisted.captured = hoisted.captured, []
    return hoisted, captured


class Hoisted(Body):
    """A body that evaluates a jaxpr of `f`. Refers to no tracer, unless its rule is late."""

    outputs: Outputs

    def __init__(self, call: Call, wait: bool) -> None:
        self._variables: Variables | None = None
        self._listed: list[Any] = []  # the variables that JAX is tracing
        if call.declared:
            self._variables, self._listed = Variables.of(call.variables)
        self._skeleton: Skeleton | None = None  # of the rule
        self._run: Run | None = None  # of a rule that was traced
        self._late: Call | None = None  # of a rule that will be traced
        self._asks = False
        held = [call.f, call.bound_to, call.constants, call.rest, call.primal]
        reachable = tracers_in(held)
        self._behind = behind(reachable)
        traced, residuals = self._trace(call, wait, first=True)
        used = traced.used(self.outputs.count)
        # What `lax.stop_gradient` got may be what is behind a tracer.
        stopped = [v for v in traced.stopped() if all(v is not t for t in reachable)]
        unseen = [t for t in reachable if id(t) not in used and spec(t).differentiable]
        self.stops_unknown = bool(stopped) and any(primal_of(t) is not None for t in reachable)
        self.hides_variable = self._asks and any(is_behind(v, t) for t in unseen for v in stopped)
        tracers = traced.captured()
        if self._asks:
            self._listed = [tracers[key] for key in used if spec(tracers[key]).differentiable]
            if self._listed:
                self._variables = Variables.listed([spec(v) for v in self._listed])
            if self._skeleton is None and not wait:
                traced, residuals = self._trace(call, False, first=False)
        primal = (
            Traced(lambda *ops: self._value_of(call, ops), call.operands, self._behind)
            if call.primal
            else None
        )
        tracers = (primal.captured() if primal else {}) | traced.captured()
        tracers |= {id(v): v for v in self._listed}
        order = {key: i for i, key in enumerate(tracers)}
        self.captured = list(tracers.values())
        super().__init__(call, self.captured, [order[id(v)] for v in self._listed])
        self._used = {order[key]: eqn for key, eqn in used.items()}
        self._place(residuals, order)
        traced.release(order)
        if primal is not None:
            primal.release(order)
        self._traced, self._values = traced, primal
        self._listed, self._behind = [], {}
        self._order = order if self._late is not None else {}

    def _value_of(self, call: Call, operands: Sequence[Any]) -> list[Any]:
        leaves, self._value_treedef = tree_flatten(call.value(operands))
        return leaves

    def _trace(self, call: Call, wait: bool, first: bool) -> tuple[Traced, list[int]]:
        """Trace `f` and what its rule takes; return that and the ids of the residuals."""
        ids: list[int] = []

        def f_then_residuals(*operands: Any) -> Any:
            leaves, self.outputs, grad_fn = call.apply(operands)
            found = dissect([grad_fn])
            self._asks = first and call.variables is None and accepts_variables(grad_fn)
            if found is not None:
                self._skeleton, residuals = found
            elif wait:
                self._late, residuals = call, tracers_in([grad_fn])
            elif self._asks:
                residuals = tracers_in([grad_fn])
            else:
                given = None
                if self._variables is not None:
                    given = Given(self._variables, self._listed)
                with _tracing_a_rule(call):
                    self._run, residuals = rule_of(
                        call.contract, grad_fn, leaves, self.outputs, given, True
                    )
            ids[:] = map(id, residuals)
            return leaves, residuals

        return Traced(f_then_residuals, call.operands, self._behind), ids

    def _place(self, residuals: Sequence[int], order: dict[int, int]) -> None:
        """Find where the rule gets its variables from: `v is w` holds for a residual `w`."""
        places = {key: i for i, key in enumerate(residuals)}
        self._count = len(residuals)
        self._extra: list[int] = []  # captured values that are further residuals
        self._given: list[int] = []  # the places of the variables among the residuals
        for v in self._listed if self._run is None else ():
            if id(v) not in places:
                places[id(v)] = self._count + len(self._extra)
                self._extra.append(order[id(v)])
            self._given.append(places[id(v)])

    def value(self, captured: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        if self._values is not None:
            return self._values.evaluate(captured, inputs), self._value_treedef
        leaves = self._traced.evaluate(captured, inputs)
        return leaves[: self.outputs.count], self.outputs.treedef

    def forward(self, captured: Sequence[Any], inputs: Sequence[Any], traced: bool) -> Result:
        if self._late is not None:
            return self._forward_now(self._late, captured, inputs, traced)
        results, outputs = self._traced.evaluate(captured, inputs), self.outputs
        leaves, residuals = results[: outputs.count], results[outputs.count :]
        residuals += [captured[i] for i in self._extra]
        run = self._run or self._rebuilt_rule
        return Result(leaves, outputs, run, residuals, self._positions)

    def _forward_now(
        self, late: Call, captured: Sequence[Any], inputs: Sequence[Any], traced: bool
    ) -> Result:
        now = Hoisted(late.replaced(operands=inputs), wait=False)
        places = [self._order.get(id(c)) for c in now.captured]
        values = [
            c if p is None else captured[p] for c, p in zip(now.captured, places, strict=True)
        ]
        result = now.forward(values, inputs, traced)
        positions = [None if p is None else places[p] for p in result.positions]
        return result._replace(positions=positions)

    def _rebuilt_rule(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        assert self._skeleton is not None
        (grad_fn,) = self._skeleton(residuals[: self._count])
        variables, values = self._variables, None
        if variables is not None:
            values = variables.value([residuals[i] for i in self._given])
        return self.contract.gradients(grad_fn, self.outputs, cotangents, variables, values)

    def used(self, captured: Sequence[Any], inputs: Sequence[Any]) -> dict[int, Any]:
        return self._used


def body_of(call: Call) -> tuple[Body, list[Any]]:
    """Return how the call runs on other values, and the tracers that it closes over."""
    declared = []
    if call.declared:
        variables, declared = Variables.of(call.variables)
        if not (declared or variables.has_values()):
            raise _errors.no_array_among_variables(call.contract.source, variables.constants[0])
    held = [call.f, call.bound_to, call.constants, call.rest, call.primal]
    found = True if declared else reach(held)
    if found is False:
        return Rebuilt(call.replaced(f=snapshot(call.f)), None, []), []

    def visible() -> tuple[Skeleton, list[Any]] | None:
        return None if found is None else dissect([*held, *declared])

    asks = call.variables is None and may_return_rule_with_variables(code_of(call.f))
    seen = None if asks else visible()
    if seen is not None:
        return Rebuilt(call, *seen), seen[1]
    try:
        hoisted, captured = hoist(call)
    except NeedsValuesError:
        seen = visible() if asks else None
        if seen is None and found is None:
            return Rebuilt(call, None, []), []
        if seen is None:
            raise
    else:
        seen = visible() if asks and hoisted.stops_unknown else None
        if seen is None and hoisted.hides_variable:
            raise _errors.stopped_variable(call.contract.source)
        if seen is None:
            return hoisted, captured
    return Rebuilt(call, *seen), seen[1]
