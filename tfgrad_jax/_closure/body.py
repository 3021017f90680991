"""A call as a function of the tracers that it closes over and of its operands.

`body_of` runs at each call that is traced. A function is made anew around other values for what it
captured (`cells.py`). One that holds a tracer where it cannot be replaced is traced first: what it
captured is in a list then (`hoisted`).

A `Body` answers `value`, where nothing is differentiated, and `result`, where something is: which
gradient a captured value has is decided here. It is that of `variables=`, that of `f`'s own
operations (`variables="autodiff"`), none because the function is written inside a rule, or none,
and then it is an error to differentiate it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_unflatten

from tfgrad_jax import _errors
from tfgrad_jax._compat import is_ref, is_staging, plainly
from tfgrad_jax._frontend.grad_fn import (
    Call,
    NeedsValuesError,
    TracedRule,
    Variables,
    accepts_variables,
    is_written_in_rule,
    run_traced,
)
from tfgrad_jax._frontend.structure import Outputs, is_differentiable, spec

from .cells import Skeleton, dissect, reach, snapshot
from .residuals import Run, is_traced, rule_of, traced_rule
from .traced import dependence_on, traced

_HELD = ("f", "bound_to", "constants", "rest", "primal")  # of a call: what may hold tracers


class HiddenTracerError(Exception):
    """The function holds a tracer where it was not looked for: it must be traced."""


class Result(NamedTuple):
    """What a differentiated call is."""

    leaves: list[Any]
    outputs: Outputs
    run: Run  # gradients of the inputs, then of the variables
    residuals: list[Any]
    positions: Sequence[int]  # of the variables among the captured values
    used: dict[int, Any] | None = None  # the captured values that `y` depends on, where known


class Body:
    """A call made anew around its captured values: tracers, each once. Refers to none of them."""

    def __init__(self, call: Call, skeleton: Skeleton | None, captured: Sequence[Any]) -> None:
        place = {id(c): i for i, c in enumerate(captured)}
        self._variables: Variables | None = None
        self._positions: list[int] = []  # of the declared variables among the captured values
        if call.declared:
            self._variables, listed = Variables.of(call.variables)
            self._positions = [place[id(v)] for v in listed]
        self.contract = call.contract
        self.count = len(captured)
        self.has_primal = call.primal is not None
        self._declared, self._autodiff = call.declared, call.autodiff
        # Whether there are captured values that may have no gradient.
        self.may_refuse = not is_written_in_rule(call.contract.source) and any(
            is_differentiable(spec(c).dtype) and (is_ref(c) or not call.autodiff)
            for i, c in enumerate(captured)
            if i not in self._positions
        )
        self._skeleton = skeleton
        # It ends up inside jaxprs, which outlive the tracers.
        self._call = call.replaced(operands=(), variables=None)
        if skeleton is not None:
            self._call = self._call.replaced(**dict.fromkeys(_HELD))

    def _on(self, captured: Sequence[Any]) -> Call:
        if self._skeleton is None:
            return self._call
        held = self._skeleton(captured)[: len(_HELD)]  # the rest are declared variables
        return self._call.replaced(**dict(zip(_HELD, held, strict=True)))

    def value(self, captured: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the leaves of `y` and their structure."""
        leaves, treedef = tree_flatten(self._on(captured).value(inputs))
        return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves], treedef

    def forward(self, captured: Sequence[Any], inputs: Sequence[Any], moving: bool) -> Result:
        """Return the result for the declared gradient."""
        leaves, outputs, grad_fn = self._on(captured).apply(inputs)
        if not moving and is_traced(leaves):
            if not is_staging():
                raise HiddenTracerError
            moving = True  # what a `jit` stages of constants is traced too
        used = None
        if isinstance(grad_fn, TracedRule):
            place = {id(c): i for i, c in enumerate(captured)}
            positions = [place[id(v)] for v in grad_fn.variables]
            gradients, parts = run_traced, [grad_fn.run]
        else:
            positions, variables = self._positions, self._variables
            if variables is None and captured and not self._autodiff and accepts_variables(grad_fn):
                used = self.used(captured, inputs)
                positions = [i for i in used if spec(captured[i]).differentiable]
            listed = [captured[i] for i in positions]
            if variables is None and listed:
                variables = Variables.listed(listed)
            gradients, parts = self.contract.rule(outputs, variables), [grad_fn, *listed]
        ys = [leaves[i] for i in outputs.differentiable]
        run, residuals = rule_of(gradients, parts, ys, moving)
        return Result(leaves, outputs, run, residuals, positions, used)

    def used(self, captured: Sequence[Any], inputs: Sequence[Any]) -> dict[int, Any]:
        """Return which captured values `y` depends on, in the order of use, with the equations."""

        def value(captured: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            with plainly():
                return self._on(captured).apply(inputs)[0]

        return dependence_on(value, captured, inputs)

    def settle(self, captured: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Find out beforehand whether `y` depends on a captured value without a gradient."""
        missing = {i for i in range(self.count) if i not in self._positions}
        self.may_refuse = bool(missing & self.used(captured, inputs).keys())

    def result(
        self, captured: Sequence[Any], inputs: Sequence[Any], perturbed: Sequence[bool]
    ) -> Result:
        """Return the result; refuse to differentiate a captured value that has no gradient."""
        if self._autodiff and self.count:
            result = self._ordinary(captured, inputs)
        else:
            result = self.forward(captured, inputs, is_traced([*captured, *inputs]))
        if self.may_refuse:
            used = self.check(captured, inputs, result, perturbed)
            result = result._replace(used=used)
        return result

    def check(
        self,
        captured: Sequence[Any],
        inputs: Sequence[Any],
        result: Result,
        perturbed: Sequence[bool],
    ) -> dict[int, Any] | None:
        """Raise if `y` depends on a captured value without a gradient that is perturbed."""
        missing = [
            i
            for i, v in enumerate(captured)
            if perturbed[i] and i not in result.positions and is_differentiable(spec(v).dtype)
        ]
        if not missing:
            return result.used
        used = self.used(captured, inputs) if result.used is None else result.used
        source = self.contract.source
        uses = [
            (spec(captured[i]), source.first_use(eqn)) for i, eqn in used.items() if i in missing
        ]
        if uses:
            raise _errors.no_gradient_for_captured(source, uses, self._declared)
        return used

    def _ordinary(self, captured: Sequence[Any], inputs: Sequence[Any]) -> Result:
        """Differentiate `f` itself with respect to the captured values."""
        moving = {i: v for i, v in enumerate(captured) if spec(v).differentiable and not is_ref(v)}
        found: list[tuple[Outputs, Run]] = []

        def value(moving: dict[int, Any]) -> tuple[list[Any], Any]:
            mixed = [moving.get(i, v) for i, v in enumerate(captured)]
            result = self.forward(mixed, inputs, True)
            found.append((result.outputs, result.run))
            leaves = [result.leaves[i] for i in result.outputs.differentiable]
            return leaves, (result.leaves, result.residuals)

        _, pull_back, (leaves, residuals) = jax.vjp(value, moving, has_aux=True)
        outputs, run = found[-1]
        pulled, treedef = tree_flatten(pull_back)
        count = len(pulled)

        def both(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            gradients = run(residuals[count:], cotangents)
            ordinary = tree_unflatten(treedef, residuals[:count])(list(cotangents))[0]
            return [*gradients, *ordinary.values()]

        return Result(list(leaves), outputs, both, [*pulled, *residuals], list(moving))


def _held(call: Call) -> list[Any]:
    return [getattr(call, name) for name in _HELD]


def body_of(call: Call, look: bool = True) -> tuple[Body, list[Any]]:
    """Return how the call runs on other values, and the tracers that it closes over.

    Unless it is to `look` for them, the call is traced.
    """
    declared: list[Any] = []
    if call.declared:
        variables, declared = Variables.of(call.variables)
        if not (declared or variables.has_values()):
            raise _errors.no_array_among_variables(call.contract.source, variables.constants[0])
    reached = None if not look else bool(declared) or reach(_held(call))
    if reached is False:
        return Body(call.replaced(f=snapshot(call.f)), None, []), []
    found = dissect([*_held(call), *declared]) if reached else None
    if found is None:
        try:
            call = hoisted(call, declared)
        except NeedsValuesError:
            if look and reached is None:  # there is much, and maybe no tracer in it
                return Body(call, None, []), []
            raise
        found = dissect([*_held(call), *declared])
        assert found is not None
    return Body(call, *found), found[1]


def hoisted(call: Call, declared: Sequence[Any]) -> Call:
    """Return the call of a function that evaluates a jaxpr of `f`, and holds its tracers openly.

    What the rule takes from `f` is returned by the jaxpr too.
    """
    known: list[Any] = []

    def apply(*operands: Any) -> Any:
        leaves, outputs, grad_fn = call.apply(operands)
        found = dissect([grad_fn])
        if found is None:
            variables, listed = None, declared
            if call.declared:
                variables = Variables.of(call.variables)[0]
            elif call.variables is None and accepts_variables(grad_fn):
                listed = _listed(call)
                variables = Variables.listed(listed) if listed else None
            gradients, ys = call.contract.rule(outputs, variables), outputs.differentiable
            run = traced_rule(gradients, [grad_fn, *listed], [leaves[i] for i in ys])
            found = dissect([TracedRule(run, listed)])
            assert found is not None
        known[:] = outputs.treedef, found[0]
        return leaves, found[1]

    evaluated = traced(apply, *call.operands)
    treedef, skeleton = known

    def f(*operands: Any) -> tuple[Any, Any]:
        leaves, residuals = evaluated(*operands)
        return tree_unflatten(treedef, leaves), skeleton(residuals)[0]

    primal = None
    if call.primal is not None:
        primal = traced(lambda *operands: call.value(operands), *call.operands)
    return _of_operands(call, f, primal)


def _of_operands(call: Call, f: Callable[..., Any], primal: Callable[..., Any] | None) -> Call:
    return call.replaced(f=f, primal=primal, bound_to=(), constants=(), rest={}, direct=True)


def _listed(call: Call) -> list[Any]:
    """Return the tracers that `y` depends on, in the order of their first use."""
    value = traced(lambda *operands: call.apply(operands)[0], *call.operands)
    body, captured = body_of(_of_operands(call, lambda *operands: (value(*operands), len), None))
    used = body.used(captured, call.operands)
    return [captured[i] for i in used if spec(captured[i]).differentiable]
