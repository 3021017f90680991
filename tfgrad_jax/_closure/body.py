"""A call as a function of the tracers that it closes over and of its operands.

There are two bodies: `Rebuilt` (here) calls `f`, made anew around other values for what it
captured; `Hoisted` (`hoist.py`) evaluates a jaxpr of it. Both answer `value`, where nothing is
differentiated, and `result`, where something is: which gradient a captured value has is decided
here. It is that of `variables=`, that of `f`'s own operations (`variables="autodiff"`), none
because the function is written inside a rule, or none, and then it is an error to differentiate
it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_unflatten

from tfgrad_jax import _errors
from tfgrad_jax._compat import is_ref
from tfgrad_jax._frontend.grad_fn import Call, Variables, accepts_variables, is_written_in_rule
from tfgrad_jax._frontend.structure import Outputs, is_differentiable, spec

from .cells import Skeleton
from .residuals import Given, Run, is_traced, rule_of
from .traced import dependence_on


class HiddenTracerError(Exception):
    """The function holds a tracer where it was not looked for: it must be traced."""


class Result(NamedTuple):
    """What a differentiated call is."""

    leaves: list[Any]
    outputs: Outputs
    run: Run  # gradients of the inputs, then of the variables
    residuals: list[Any]
    positions: Sequence[int | None]  # of the variables among the captured values
    used: dict[int, Any] | None = None  # the captured values that `y` depends on, where known


class Body:
    """What the two bodies share. The captured values are tracers, each once."""

    def __init__(
        self, call: Call, captured: Sequence[Any], positions: Sequence[int | None]
    ) -> None:
        self.contract = call.contract
        self.count = len(captured)
        self._positions = positions  # of the declared variables among the captured values
        self.has_primal = call.primal is not None
        self._declared, self._autodiff = call.declared, call.autodiff
        # Whether there are captured values that may have no gradient.
        self.may_refuse = not is_written_in_rule(call.f) and any(
            is_differentiable(spec(c).dtype) and (is_ref(c) or not call.autodiff)
            for i, c in enumerate(captured)
            if i not in positions
        )

    def value(self, captured: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the leaves of `y` and their structure."""
        raise NotImplementedError

    def forward(self, captured: Sequence[Any], inputs: Sequence[Any], traced: bool) -> Result:
        """Return the result for the declared gradient."""
        raise NotImplementedError

    def used(self, captured: Sequence[Any], inputs: Sequence[Any]) -> dict[int, Any]:
        """Return which captured values `y` depends on, in the order of use, with the equations."""
        raise NotImplementedError

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


class Rebuilt(Body):
    """A body that calls `f`, made anew around the captured values."""

    def __init__(self, call: Call, skeleton: Skeleton | None, captured: Sequence[Any]) -> None:
        place = {id(c): i for i, c in enumerate(captured)}
        variables, positions = None, []
        if call.declared:
            variables, traced = Variables.of(call.variables)
            positions = [place[id(v)] for v in traced]
        super().__init__(call, captured, positions)
        self._variables = variables
        self._skeleton = skeleton
        # Refers to no tracer: it ends up inside jaxprs, which outlive these.
        self._call = call.replaced(operands=(), variables=None)
        if skeleton is not None:
            self._call = self._call.replaced(
                f=None, bound_to=(), constants=(), rest={}, primal=None
            )

    def _on(self, captured: Sequence[Any]) -> Call:
        if self._skeleton is None:
            return self._call
        names = ("f", "bound_to", "constants", "rest", "primal")
        held = self._skeleton(captured)[: len(names)]  # the rest are declared variables
        return self._call.replaced(**dict(zip(names, held, strict=True)))

    def value(self, captured: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        leaves, treedef = tree_flatten(self._on(captured).value(inputs))
        return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves], treedef

    def forward(self, captured: Sequence[Any], inputs: Sequence[Any], traced: bool) -> Result:
        leaves, outputs, grad_fn = self._on(captured).apply(inputs)
        if not traced and is_traced(leaves):
            raise HiddenTracerError
        positions, variables, used = self._positions, self._variables, None
        if variables is None and captured and not self._autodiff and accepts_variables(grad_fn):
            used = self.used(captured, inputs)
            positions = [i for i in used if spec(captured[i]).differentiable]
            if positions:
                variables = Variables.listed([spec(captured[i]) for i in positions])
        given = None
        if variables is not None:
            given = Given(variables, [captured[i] for i in positions])  # type: ignore[index]
        run, residuals = rule_of(self.contract, grad_fn, leaves, outputs, given, traced)
        return Result(leaves, outputs, run, residuals, positions, used)

    def used(self, captured: Sequence[Any], inputs: Sequence[Any]) -> dict[int, Any]:
        def value(captured: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            return self._on(captured).apply(inputs)[0]

        return dependence_on(value, captured, inputs)
