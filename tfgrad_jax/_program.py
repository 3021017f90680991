"""A call as a function of its captured values and its operands, with a rule.

If JAX does not differentiate a call, it runs `Program.value`. If it does, it runs `forward`, which
returns the value, and the rule as a function of residuals (`_autodiff/custom.py` says when). Both
run copies of the user's functions that hold the current values.

This module also decides where the gradient of a captured value comes from: from `variables=`, or
from `f`'s own operations (`variables="autodiff"`). In a function that is written inside a rule it
is zero. Otherwise differentiating the value raises.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import register_static, tree_flatten, tree_unflatten

from . import _errors
from ._autodiff.custom import Forward, differentiated
from ._body import Body
from ._closure.skeleton import Skeleton
from ._closure.traced import converted, unconverted
from ._compat import cotangent_type, is_ref
from ._frontend.grad_fn import (
    Call,
    Contract,
    Variables,
    accepts_variables,
)
from ._frontend.structure import Outputs
from ._source import Source
from ._types import Spec, is_differentiable, is_traced, spec


@register_static
class Program:
    """A call as a function of its captured values and its operands. It holds none of these."""

    def __init__(
        self,
        name: str,
        contract: Contract,
        call: Call,
        skeleton: Skeleton,  # copies the surroundings, then the declared variables
        variables: Variables | None = None,  # declared
        captured: Sequence[Any] = (),
        listed: Sequence[Any] = (),  # captured values whose gradients the rule always returns
        uses: Sequence[tuple[Any, Any]] | None = None,  # how `y` uses what is captured, if known
    ) -> None:
        # By position: two captured values may later be the same object.
        place = {id(c): i for i, c in enumerate(captured)}
        if not all(id(v) in place for v in listed):
            raise _errors.leaked_variable(contract.source)
        self._listed = [place[id(v)] for v in listed]
        self._count, self._variables, self._autodiff = len(captured), variables, call.autodiff
        self.source, self._contract, self._name = contract.source, contract, name
        self.has_primal = call.surroundings.primal is not None
        self._body = Body(contract, skeleton, self._count, self.has_primal)
        if uses is not None:
            self._body.note_uses(captured, uses)
        # Captured values without a gradient, unless the rule takes undeclared `variables`.
        self._without_gradient: set[int] = set()
        if not contract.in_rule:
            differentiable = {i for i, c in enumerate(captured) if is_differentiable(c.dtype)}
            refs = {i for i, c in enumerate(captured) if is_ref(c)}
            self._without_gradient = differentiable & (
                refs if call.autodiff else {*range(self._count)}
            )
            self._without_gradient -= {*self._listed}
        self._is_undeclared = bool(captured) and variables is None and not call.autodiff
        # The rule lists the captured values that are being differentiated, or raises for one.
        self.needs_perturbed = self._is_undeclared or bool(self._without_gradient)
        self._refs = [i for i, c in enumerate(captured) if is_ref(c)]

    def __call__(self, captured: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Return `y`, whose derivative is the declared one."""
        leaves = differentiated(self, self._name, [*captured, *inputs])
        return tree_unflatten(self._body.treedef, leaves)

    def names(self) -> list[str]:
        """Return the names of the operands, for JAX's own errors."""
        return self._body.names()

    def value(self, operands: Sequence[Any]) -> list[Any]:
        """Return the leaves of `y`, in a call that JAX does not differentiate."""
        return self._body.value(operands)

    def forward(self, operands: Sequence[Any], perturbed: Sequence[int]) -> Forward:
        """Return the leaves of `y` and the rule, in a call that JAX differentiates."""
        captured, inputs = operands[: self._count], operands[self._count :]
        if self._autodiff and captured:
            return self._with_ordinary(captured, inputs, perturbed)
        return self._with_rule(captured, inputs, perturbed, is_traced(operands))

    def _with_rule(
        self, captured: Sequence[Any], inputs: Sequence[Any], perturbed: Sequence[int], traced: bool
    ) -> Forward:
        """Return the value with the gradient that the rule declares.

        `f` runs once, as a copy that holds the current values. The rule that it returns may run
        later, at other values or under another trace. So it becomes a function of its residuals
        (the tracers that it holds); beside these it refers to no operand, only to their types.
        """
        operands = [*captured, *inputs]
        needs_uses = bool(self._without_gradient.intersection(perturbed))
        leaves, outputs, grad_fn, cells, unused = self._body.made(operands, needs_uses)
        if not traced and is_traced(leaves):
            self._body.look_for_tracers(operands)
            traced = True

        types = [jax.typeof(o) for o in operands]  # not the operands, which the rule may outlive
        user = self._user_rule(grad_fn, outputs, operands)
        self._refuse(perturbed, user.chooses, operands, types)
        listed = user.listed(perturbed)
        parts = [grad_fn, *(captured[i] for i in user.positions)]
        if traced:
            upstreams = [cotangent_type(leaves[i]) for i in outputs.differentiable]
            source, patient = Source.of(grad_fn), user.chooses
            rule = converted(user.run, parts, listed, upstreams, source, patient, cells, unused)
        else:
            rule = unconverted(user.run, parts, cells, unused)
        fixed: Sequence[int] | None = None  # the variables of a traced rule
        if self._contract.is_rule_traced:
            fixed = user.positions
        elif rule.is_traced:
            fixed = listed
        # It holds no residuals: it may outlive them.
        run = functools.partial(self._gradients, types, user, rule.run, fixed)
        return Forward(leaves, outputs.differentiable, run, rule.residuals)

    def _gradients(
        self,
        types: Sequence[Any],
        user: "_UserRule",
        rule: Callable[..., list[Any]],
        fixed: Sequence[int] | None,
        residuals: Sequence[Any],
        cotangents: Sequence[Any],
        perturbed: Sequence[int],
    ) -> list[Any]:
        """Run a rule; return the gradients of the perturbed operands, which have these `types`."""
        self._refuse(perturbed, user.chooses, types, types)
        listed = user.listed(perturbed)
        if fixed is not None and listed != fixed:
            if listed:
                raise _errors.fixed_variables(self.source)
            listed = fixed
        returned = rule(residuals, cotangents, listed)
        inputs = len(returned) - len(listed)
        gradients: dict[int, Any] = {self._count + k: g for k, g in enumerate(returned[:inputs])}
        for i, g in zip(listed, returned[inputs:], strict=True):
            if g is not None:
                known = gradients.get(i)
                gradients[i] = g if known is None else known + g
        return [gradients.get(i) for i in perturbed]

    def _user_rule(self, grad_fn: Any, outputs: Outputs, operands: Sequence[Any]) -> "_UserRule":
        """Return how to run the rule, and which captured values it gives gradients for."""
        contract, positions, specs = self._contract, self._listed, {}
        chooses = self._is_undeclared and (
            bool(self._listed) if contract.is_rule_traced else accepts_variables(grad_fn)
        )
        if chooses:
            if not contract.is_rule_traced:
                used = [i for i in self._body.uses(operands) if i not in self._refs]
                positions = [i for i in used if is_differentiable(operands[i].dtype)]
            specs = {i: spec(operands[i]) for i in positions}
        return _UserRule(contract, outputs, self._variables, positions, specs, chooses)

    def _with_ordinary(
        self, captured: Sequence[Any], inputs: Sequence[Any], perturbed: Sequence[int]
    ) -> Forward:
        """Return the value and the rule; captured values get the gradient of `f`'s own operations.

        `jax.vjp` differentiates `f` by these. What it keeps joins the residuals of the rule.
        """
        ordinary = {
            i: v for i, v in enumerate(captured) if spec(v).differentiable and not is_ref(v)
        }
        forwards: list[Forward] = []

        def value(ordinary: dict[int, Any]) -> tuple[list[Any], Any]:
            mixed = [ordinary.get(i, v) for i, v in enumerate(captured)]
            others = [i for i in perturbed if i not in ordinary]
            forwards.append(self._with_rule(mixed, inputs, others, traced=True))
            leaves, outputs, _, residuals = forwards[-1]
            forwards[-1] = forwards[-1]._replace(leaves=[], residuals=[])
            return [leaves[i] for i in outputs], (leaves, residuals)

        _, pull_back, (leaves, residuals) = jax.vjp(value, ordinary, has_aux=True)
        _, outputs, run, _ = forwards[-1]
        pulled, treedef = tree_flatten(pull_back)
        count, positions = len(pulled), list(ordinary)

        def both(
            residuals: Sequence[Any], cotangents: Sequence[Any], perturbed: Sequence[int]
        ) -> list[Any]:
            others = [i for i in perturbed if i not in positions]
            (gradients,) = tree_unflatten(treedef, residuals[:count])(list(cotangents))
            gradients = {
                **gradients,
                **dict(zip(others, run(residuals[count:], cotangents, others), strict=True)),
            }
            return [gradients.get(i) for i in perturbed]

        return Forward(list(leaves), outputs, both, [*pulled, *residuals])

    def _refuse(
        self, perturbed: Sequence[int], chooses: bool, operands: Sequence[Any], types: Sequence[Any]
    ) -> None:
        """Raise if a captured value that `y` depends on is differentiated and has no gradient."""
        missing = {
            i for i in perturbed if i in self._without_gradient and (i in self._refs or not chooses)
        }
        if not missing:
            return
        uses = {i: place for i, place in self._body.uses(operands).items() if i in missing}
        if uses:
            if all(i in self._refs for i in uses):
                raise _errors.captured_ref(self.source)
            uses = [(spec(types[i]), self.source.line(place)) for i, place in uses.items()]
            declared = self._variables is not None
            raise _errors.no_gradient_for_captured(self.source, uses, declared)


class _UserRule(NamedTuple):
    """How to run a rule with the variables that are being differentiated."""

    contract: Contract
    outputs: Outputs
    declared: Variables | None
    positions: list[int]  # of the captured values that it gives gradients for
    specs: dict[int, Spec]  # the types of these values, by position
    chooses: bool  # whether it lists only those that are being differentiated

    def listed(self, perturbed: Sequence[int]) -> list[int]:
        """Return the positions of the variables, if these operands are being differentiated."""
        return [i for i in self.positions if i in perturbed] if self.chooses else self.positions

    def run(
        self, parts: Sequence[Any], cotangents: Sequence[Any], listed: Sequence[int]
    ) -> list[Any]:
        """Return the gradients of the inputs, then those of the variables in the list."""
        grad_fn, *values = parts
        variables = self.declared
        if self.chooses:
            values = [values[self.positions.index(i)] for i in listed]
            if listed:
                variables = Variables.listed(values, [self.specs[i] for i in listed])
        return self.contract.gradients(grad_fn, self.outputs, cotangents, variables, values)
