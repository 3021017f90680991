"""Run a closure that branches on values: replace what it captured, and trace nothing.

`Seen` is tried where hoisting failed because `f` or its rule needs concrete values. It works
where the tracers are in plain sight, in the cells of `f`: rebuilt around the operands, `f`
sees the values that are known one level of differentiation down.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from . import _errors
from ._call import Call, Variables, accepts_variables
from ._derivatives import differentiable
from ._rules import Rebuild, Rule, Static
from ._structure import spec


@jax.tree_util.register_static
class Seen:
    """A call as a function of the tracers in the cells of its function, and of its inputs."""

    has_refused = True  # it may: which captured values have a gradient is known once `f` has run

    def __init__(
        self, call: Call, rebuild: Rebuild, captured: Sequence[Any], forward_mode: bool
    ) -> None:
        self._call = call
        self._rebuild = rebuild
        self._count = len(captured)
        self._ids = [id(c) for c in captured]
        self.forward_mode = forward_mode
        self.source = call.contract.source
        self.treedef: Any = None  # of `y`, once `f` has run

    def primal(self, operands: Sequence[Any]) -> list[Any]:
        leaves, outputs, _ = self._rebuilt(operands).apply(operands[self._count :])
        self.treedef = outputs.treedef
        return leaves

    def forward(
        self, operands: Sequence[Any], perturbed: Sequence[bool] | None
    ) -> tuple[list[Any], Rule]:
        captured, inputs = operands[: self._count], operands[self._count :]
        leaves, outputs, grad_fn = self._rebuilt(operands).forward(inputs)
        self.treedef = outputs.treedef
        specs = [spec(o) for o in operands]
        variables, positions = self._variables(captured, grad_fn)
        refused = [i for i in range(self._count) if specs[i].differentiable and i not in positions]
        if perturbed is not None and any(perturbed[i] for i in refused):
            uses = [(specs[i], "") for i in refused if perturbed[i]]
            declared = self._call.variables is not None
            raise _errors.no_gradient_for_captured(self.source, uses, declared)

        def run(residuals: Any, cotangents: Sequence[Any]) -> list[Any]:
            contract = self._call.contract
            found = contract.gradients(
                grad_fn, outputs, cotangents, specs[self._count :], variables
            )
            count = len(inputs)
            gradients: list[Any] = [None] * self._count
            for position, g in zip(positions, found[count:], strict=True):
                if position is not None:
                    gradients[position] = g
            return [*gradients, *found[:count]]

        if any(isinstance(v, Tracer) for v in (*operands, *leaves)):
            leaves = differentiable(self, operands)  # the next level calls `f` again, on values
        return leaves, Rule(Static(run, specs, outputs), ())

    def _rebuilt(self, operands: Sequence[Any]) -> Call:
        return self._call.with_function(self._rebuild(operands[: self._count]))

    def _variables(
        self, captured: Sequence[Any], grad_fn: Any
    ) -> tuple[Variables | None, list[int | None]]:
        """Return the variables of the rule, and their positions among the captured values."""
        declared = self._call.variables
        if declared is not None:
            variables, leaves = Variables.of(declared)
            place = {key: i for i, key in enumerate(self._ids)}
            positions = [place.get(id(leaf)) for leaf in leaves]
            values = [
                leaf if i is None else captured[i]
                for leaf, i in zip(leaves, positions, strict=True)
            ]
            return variables._replace(value=variables.layout.join(values)[0]), positions
        if not accepts_variables(grad_fn):
            return None, []
        found = [i for i, c in enumerate(captured) if spec(c).differentiable]
        return (Variables.of([captured[i] for i in found])[0], list(found)) if found else (None, [])
