"""`variables="autodiff"`: captured values get the gradient of `f`'s own operations."""

from typing import Any

import jax
from jax.tree_util import register_static, tree_flatten, tree_unflatten

from tfgrad_jax._autodiff.custom import Forward
from tfgrad_jax._closure.traced import Aside

from .program import Program
from .rule import Gradient, Leaf, OperandIndex, Origin, Values, Wanted


@register_static
class Ordinary(Program):
    """A call whose rule gives gradients for the inputs alone."""

    def forward(self, operands: Values, perturbed: Wanted) -> Forward:
        """Return `y` and the rule: the declared one for the inputs, `jax.vjp` for the others.

        What `jax.vjp` keeps joins the residuals of the rule.
        """
        ordinary = {
            i: operands[i] for i, o in enumerate(self.origins(False)) if o is Origin.AUTODIFF
        }
        by_rule = [i for i in perturbed if i not in ordinary]

        def value(ordinary: dict[OperandIndex, Any]) -> tuple[list[Leaf], Any]:
            mixed = [ordinary.get(i, v) for i, v in enumerate(operands)]
            leaves, outputs, run, residuals = Program.forward(self, mixed, by_rule)
            return [leaves[i] for i in outputs], (leaves, residuals, Aside((outputs, run)))

        _, pull_back, (leaves, residuals, aside) = jax.vjp(value, ordinary, has_aux=True)
        outputs, run = aside.take()
        pulled, treedef = tree_flatten(pull_back)
        count, positions = len(pulled), list(ordinary)

        def both(residuals: Values, cotangents: Values, wanted: Wanted) -> list[Gradient]:
            by_rule = [i for i in wanted if i not in positions]
            (gradients,) = tree_unflatten(treedef, residuals[:count])(list(cotangents))
            found = run(residuals[count:], cotangents, by_rule)
            gradients = {**gradients, **dict(zip(by_rule, found, strict=True))}
            return [gradients.get(i) for i in wanted]

        return Forward(list(leaves), outputs, both, [*pulled, *residuals])
