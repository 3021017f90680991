"""Differentiate what a function closes over: make captured tracers operands of its rule.

`hoist` runs when a decorated function may close over something that JAX is tracing. It
traces `f`, then the rule that `f` returned; the tracers among the constants of that jaxpr are
the captured values. The result is the program `Hoisted` for `_derivatives`: its operands
are the captured values followed by the inputs, and it refers to no tracer itself, because it
ends up inside jaxprs, which outlive these. Which gradient a captured value has is decided here:
that of `variables=`, that of `f`'s own operations (`variables="autodiff"`), or none, and then
`Hoisted._check` refuses to differentiate it.
"""

import functools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_unflatten

from . import _errors
from ._call import Call, Contract, Variables, accepts_variables, inside_rule
from ._derivatives import attach, depending
from ._rules import Rebuild, Rule, Static, lift, lifted_rule, traced_rule
from ._structure import Outputs, Spec, spec
from ._traced import Traced

# The calls that are being hoisted: a rule may call its own function, which then is among them.
_hoisting: ContextVar[tuple["_Hoisting", ...]] = ContextVar("hoisting", default=())


def hoist(call: Call, operands: Sequence[Any], forward_mode: bool) -> tuple["Hoisted", list[Any]]:
    """Trace a call; return it as a program, and the captured values it takes first."""
    this = _Hoisting(call, operands)
    for outer in _hoisting.get():
        if outer.same_as(this):
            # The rule of `outer` calls its own function. JAX needs the rule of the inner call
            # only once that is differentiated, and by then the rule of `outer` is known.
            return Hoisted(outer.linked(), forward_mode), outer.captured
    token = _hoisting.set((*_hoisting.get(), this))
    try:
        this.trace()
    finally:
        _hoisting.reset(token)
    return Hoisted(this.result, forward_mode), this.captured


class _Result:
    """What hoisting found out about a call. Refers to no tracer."""

    contract: Contract
    outputs: Outputs
    inputs: Sequence[Spec]
    captured: list[Spec]
    traced: Traced  # `f`, then what its rule takes from it
    rule: Static  # gradients of the inputs, then of the variables
    extra: list[int]  # the captured values that the rule takes as further residuals
    positions: list[int | None]  # of the variables among the captured values
    used: dict[int, Any]  # captured values that `y` depends on, each with its first equation
    ignored: list[list[int]]  # for each leaf of `y`, the operands that it does not depend on
    autodiff: bool
    declared: bool
    value: Traced | None = None  # `f` alone, where the rule calls its own function


class _Hoisting:
    """A call on its way to a `_Result`."""

    def __init__(self, call: Call, operands: Sequence[Any]) -> None:
        self._call = call
        self._operands = operands
        self.captured: list[Any] = []
        self._given = 0  # how many of them a call of `f` from its own rule was given
        self.result = _Result()
        self.result.contract = call.contract
        self.result.inputs = [spec(o) for o in operands]
        self.result.autodiff = call.autodiff
        self.result.declared = call.variables is not None and not call.autodiff

    def same_as(self, other: "_Hoisting") -> bool:
        """Tell whether the other call would trace the very same thing."""
        return self.result.inputs == other.result.inputs and self._call.same_as(other._call)

    def trace(self) -> None:
        """Trace `f` and then its rule; find what they capture and where its gradients are."""
        self._trace()
        # Calls that the rule made of its own function must have been given all captured values.
        while self.result.value is not None and self._given != len(self.captured):
            self._given = len(self.captured)
            self._trace()

    def linked(self) -> _Result:
        """Return the result for a call of `f` from its own rule, which needs its value only."""
        result = self.result
        if result.value is None:

            def f(*operands: Any) -> Any:
                return self._call.apply(operands)[0]

            value = Traced(f, self._operands)
            captured = value.captured()
            self.captured = list(captured.values())
            self._given = len(captured)
            value.release(captured)
            result.ignored = [[] for _ in range(result.outputs.count)]  # until it is known
            result.value = value
        return result

    def _trace(self) -> None:
        call, result = self._call, self.result
        variables, listed = None, []
        if result.declared:
            variables, listed = Variables.of(call.variables)
        answered = call.variables is not None
        asks = False  # the rule wants the variables, which are known once `f` has been traced
        # Of a lifted rule; only ids, because no tracer may outlive the trace that made it.
        lifted: tuple[Rebuild, list[int]] | None = None

        def f_then_residuals(*operands: Any) -> Any:
            nonlocal asks, lifted
            leaves, result.outputs, grad_fn = call.apply(operands, in_forward_pass=True)
            found = lift(grad_fn)
            lifted = found and (found[0], [id(r) for r in found[1]])
            asks = not answered and accepts_variables(grad_fn)
            if found is not None:
                return leaves, found[1]
            if asks:
                return leaves, []
            rule = traced_rule(
                call.contract, grad_fn, leaves, result.outputs, result.inputs, variables
            )
            result.rule = rule.static
            return leaves, rule.residuals

        traced, dependence = Traced(f_then_residuals, self._operands), None
        if asks:
            captured = traced.captured()
            dependence = traced.dependence(result.outputs.count)
            found = [captured[key] for key in dependence.used]
            found = [c for c in found if spec(c).differentiable]
            if found:
                variables, listed = Variables.of(found)
            if lifted is None:
                answered, dependence = True, None
                traced = Traced(f_then_residuals, self._operands)

        dependence = dependence or traced.dependence(result.outputs.count)
        order = {id(c): c for c in self.captured} | traced.captured()
        order |= {id(v): v for v in listed if isinstance(v, Tracer)}
        index = {key: position for position, key in enumerate(order)}
        self.captured = list(order.values())
        result.captured = [spec(c) for c in self.captured]
        result.positions = [index.get(id(v)) for v in listed]
        result.used = {index[key]: eqn for key, eqn in dependence.used.items()}
        result.ignored = dependence.ignored(order, len(result.inputs))
        result.extra = []
        if lifted is not None:
            result.rule = self._lifted_rule(*lifted, variables, listed, index)
        traced.release(order)
        result.traced = traced

    def _lifted_rule(
        self,
        rebuild: Rebuild,
        residuals: Sequence[int],
        variables: Variables | None,
        listed: Sequence[Any],
        index: Mapping[int, int],
    ) -> Static:
        """Return the rule that is given its variables as residuals.

        A variable that the rule also closes over is the same residual: `v is w` holds in it.
        """
        result = self.result
        places = {key: place for place, key in enumerate(residuals)}
        filled: list[Any] = []  # the place of each variable among the residuals, or its value
        for v in listed:
            if isinstance(v, Tracer) and id(v) not in places:
                places[id(v)] = len(residuals) + len(result.extra)
                result.extra.append(index[id(v)])
            filled.append((places.get(id(v)), None if isinstance(v, Tracer) else v))

        def given(residuals: Sequence[Any]) -> Variables | None:
            if variables_layout is None:
                return None
            values = [v if place is None else residuals[place] for place, v in filled]
            return Variables(variables_layout.join(values)[0], variables_layout, specs)

        variables_layout = None if variables is None else variables.layout
        specs = [] if variables is None else variables.specs
        rule = lifted_rule(result.contract, rebuild, (), result.outputs, result.inputs, given)
        return rule.static


@jax.tree_util.register_static
class Hoisted:
    """A hoisted call as a function of its captured values and its inputs."""

    def __init__(self, result: _Result, forward_mode: bool) -> None:
        self._result = result
        self._constant = inside_rule.get()
        self.forward_mode = forward_mode
        self.has_refused = bool(self._refused())
        self.source = result.contract.source
        self.treedef = result.outputs.treedef

    def _refused(self) -> list[int]:
        """Return the captured values that have no gradient and would need one."""
        result = self._result
        if self._constant or result.autodiff:
            return []
        return [
            i
            for i in result.used
            if i not in result.positions and result.captured[i].differentiable
        ]

    def _split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        count = len(operands) - len(self._result.inputs)
        return operands[:count], operands[count:]

    def primal(self, operands: Sequence[Any]) -> list[Any]:
        traced = self._result.value or self._result.traced
        return self._depending(traced.evaluate(*self._split(operands)), operands)

    def _depending(self, leaves: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the outputs, first among `leaves`, as values that depend on all operands."""
        return [
            depending(leaf, [operands[i] for i in ignored])
            for leaf, ignored in zip(leaves, self._result.ignored, strict=False)
        ]

    def forward(
        self, operands: Sequence[Any], perturbed: Sequence[bool] | None
    ) -> tuple[list[Any], Rule]:
        result = self._result
        if perturbed is not None:
            self._check(perturbed)
        captured, inputs = self._split(operands)
        pull_back: list[Any] = []
        if result.autodiff:
            results, pull_back, treedef = self._ordinary(captured, inputs)
        else:
            results, treedef = result.traced.evaluate(captured, inputs), None
        leaves, residuals = results[: result.outputs.count], results[result.outputs.count :]
        residuals += [captured[i] for i in result.extra]
        run = functools.partial(self._run, treedef, len(pull_back))
        specs = [*result.captured, *result.inputs]
        refuse = self._check if self.has_refused else None
        static = Static(run, specs, result.outputs, refuse)
        rule = Rule(static, [*pull_back, *residuals])
        if any(isinstance(o, Tracer) for o in operands):
            leaves = attach(self._depending(leaves, operands), operands, rule)
        return leaves, rule

    def _run(
        self, treedef: Any, split: int, residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Return the gradients of the captured values, then of the inputs."""
        result = self._result
        gradients = result.rule.run(residuals[split:], cotangents)
        count = len(result.inputs)
        captured: list[Any] = [None] * len(result.captured)
        for position, g in zip(result.positions, gradients[count:], strict=True):
            if position is not None and g is not None:
                known = captured[position]
                captured[position] = g if known is None else known + g
        if treedef is not None:
            ordinary = tree_unflatten(treedef, residuals[:split])(list(cotangents))[0]
            for position, g in ordinary.items():
                captured[position] = g
        return [*captured, *gradients[:count]]

    def _ordinary(
        self, captured: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[list[Any], list[Any], Any]:
        """Evaluate, and differentiate `f` itself with respect to the captured values."""
        result = self._result
        moving = {
            i: v for i, v in enumerate(captured) if i in result.used and spec(v).differentiable
        }

        def value(moving: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
            mixed = [moving.get(i, v) for i, v in enumerate(captured)]
            results = result.traced.evaluate(mixed, inputs)
            return [results[i] for i in result.outputs.differentiable], results

        _, pull_back, results = jax.vjp(value, moving, has_aux=True)
        leaves, treedef = tree_flatten(pull_back)
        return results, leaves, treedef

    def _check(self, perturbed: Sequence[bool]) -> None:
        """Refuse to differentiate a captured value that has no gradient."""
        result = self._result
        missing = [i for i in self._refused() if perturbed[i]]
        if missing:
            uses = [_errors.first_use(result.used[i], self.source) for i in missing]
            specs = [result.captured[i] for i in missing]
            raise _errors.no_gradient_for_captured(
                self.source, list(zip(specs, uses, strict=True)), result.declared
            )
