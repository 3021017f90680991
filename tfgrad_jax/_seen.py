"""Run a closure with other values for what it captured, and trace nothing.

`Seen` works where the tracers are in plain sight, in the cells of `f`: rebuilt around its operands,
`f` sees the values that are known one level of differentiation down. `on_values` makes one
before `f` is traced, because it costs no trace, and `branching` where that failed, because `f`
or its rule needs concrete values.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import tree_leaves, tree_unflatten

from . import _errors
from ._call import Call, Variables, accepts_variables
from ._compat import is_staging
from ._derivatives import differentiable
from ._direct import CapturedTracerError
from ._rules import Rule, Static, captures, lift
from ._structure import spec


def on_values(call: Call, forward_mode: bool) -> "Seen | None":
    """Return a call for concrete values, where all that `f` captures are declared variables.

    It raises `CapturedTracerError` if the values turn out to be traced.
    """
    if call.variables is None or call.autodiff or is_staging():
        return None
    seen = _see(call, forward_mode, concrete=True)
    if seen is None:
        return None
    declared = {id(v) for v in tree_leaves(call.variables) if isinstance(v, Tracer)}
    known = {id(c) for c in seen.captured}
    others = [c for c in seen.captured if id(c) not in declared and spec(c).differentiable]
    return None if others or not declared <= known else seen


def branching(call: Call, forward_mode: bool) -> "Seen | None":
    """Return a call of a function that branches on values, unless these cannot be seen."""
    if call.autodiff:
        return None
    seen = _see(call, forward_mode, concrete=False)
    return seen if seen is not None and seen.captured else None


def _see(call: Call, forward_mode: bool, concrete: bool) -> "Seen | None":
    f, *others = call.surroundings
    visible = lift(f)
    if visible is None or captures(others) is not False:
        return None
    return Seen(call, *visible, forward_mode, concrete)


@jax.tree_util.register_static
class Seen:
    """A call as a function of the tracers in the cells of its function, and of its inputs."""

    def __init__(
        self, call: Call, rebuild: Any, found: Sequence[Any], forward_mode: bool, concrete: bool
    ) -> None:
        unique = {id(c): c for c in found}
        self._ids = list(unique)
        self._places = [self._ids.index(id(c)) for c in found]
        self._count = len(unique)
        self._call = call
        self._rebuild = rebuild
        self._concrete = concrete
        # Which captured values have a gradient is known here, or else once `f` has run.
        self.has_refused = not concrete
        self.captured = list(unique.values())
        self.forward_mode = forward_mode
        self.source = call.contract.source
        self.treedef: Any = None  # of `y`, once `f` has run

    def primal(self, operands: Sequence[Any]) -> list[Any]:
        return self._apply(operands, in_forward_pass=False)[0]

    def run(self, operands: Sequence[Any]) -> Any:
        """Call it once; JAX may keep it for longer than its tracers may live."""
        try:
            leaves = differentiable(self)(self, *self.captured, *operands)
            return tree_unflatten(self.treedef, leaves)
        finally:
            del self.captured, self._call

    def forward(
        self, operands: Sequence[Any], perturbed: Sequence[bool] | None
    ) -> tuple[list[Any], Rule]:
        captured, inputs = operands[: self._count], operands[self._count :]
        leaves, outputs, grad_fn = self._apply(operands, in_forward_pass=True)
        specs = [spec(o) for o in operands]
        variables, positions = self._variables(captured, grad_fn)
        given = set(positions)
        refused = [i for i in range(self._count) if specs[i].differentiable and i not in given]
        if perturbed is not None and any(perturbed[i] for i in refused):
            uses = [(specs[i], "") for i in refused if perturbed[i]]
            declared = self._call.variables is not None
            raise _errors.no_gradient_for_captured(self.source, uses, declared)

        contract, total = self._call.contract, self._count

        def run(residuals: Any, cotangents: Sequence[Any]) -> list[Any]:
            found = contract.gradients(grad_fn, outputs, cotangents, specs[total:], variables)
            count = len(inputs)
            gradients: list[Any] = [None] * total
            for position, g in zip(positions, found[count:], strict=True):
                if position is not None and g is not None:
                    known = gradients[position]
                    gradients[position] = g if known is None else known + g
            return [*gradients, *found[:count]]

        if outputs.traced or any(isinstance(v, Tracer) for v in operands):
            leaves = differentiable(self)(self, *operands)  # the next level runs `f`, on values
        return leaves, Rule(Static(run, specs, outputs), ())

    def _apply(self, operands: Sequence[Any], in_forward_pass: bool) -> Any:
        if self._concrete and any(isinstance(o, Tracer) for o in operands):
            raise CapturedTracerError
        values = [operands[i] for i in self._places]
        f = self._rebuild(values)
        inputs = operands[self._count :]
        result = self._call.with_function(f).apply(inputs, in_forward_pass)
        outputs = result[1]
        if self._concrete and (outputs.traced or not self._rebuild.is_intact(f, values)):
            raise CapturedTracerError
        self.treedef = outputs.treedef
        return result

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
