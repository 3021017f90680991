"""`variables="autodiff"`: captured values get the gradient of `f`'s own operations."""

from collections.abc import Callable, Collection, Sequence

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from .._autodiff.attached import Forward
from .._autodiff.primitives import depend
from .._autodiff.rule import Run
from .._jax.types import Indices, Leaf, LeafIndex, OperandIndex, PyTree, Values


def with_ordinary_gradients(
    forward: Callable[[Values, Indices], Forward],
    ordinary: Indices,
    operands: Values,
    perturbed: Indices,
) -> Forward:
    """Return `y` and its rule: that of `forward`, and `jax.vjp` of it for the `ordinary` operands.

    What `jax.vjp` keeps joins the residuals of the rule.
    """
    by_vjp = set(ordinary)
    by_rule = [i for i in perturbed if i not in by_vjp]
    # Not as a static part of the result: JAX may keep its structure, and so what the rule holds.
    outputs: Sequence[LeafIndex] = ()
    gives: Collection[OperandIndex] = ()
    run: Run

    def value(differentiated: dict[OperandIndex, Leaf]) -> tuple[list[Leaf], PyTree]:
        nonlocal outputs, run, gives
        mixed = [differentiated.get(i, v) for i, v in enumerate(operands)]
        leaves, outputs, run, residuals, gives = forward(mixed, by_rule)
        return [leaves[i] for i in outputs], (leaves, residuals)

    _, pull_back, (leaves, residuals) = jax.vjp(
        value, {i: operands[i] for i in ordinary}, has_aux=True
    )
    of_vjp, treedef = tree_flatten(pull_back)
    # JAX may keep `y` itself, as the derivative of `tanh` does. There it has the derivative of the
    # operations of `f`; a rule that reads its `y` has the declared one.
    of_vjp = [depend([r], [])[0] if any(r is y for y in leaves) else r for r in of_vjp]
    count = len(of_vjp)

    def both(residuals: Values, cotangents: Values, wanted: Indices) -> list[Leaf | None]:
        by_rule = [i for i in wanted if i not in by_vjp]
        (gradients,) = tree_unflatten(treedef, residuals[:count])(list(cotangents))
        gradients |= zip(by_rule, run(residuals[count:], cotangents, by_rule), strict=True)
        return [gradients.get(i) for i in wanted]

    return Forward(list(leaves), outputs, both, [*of_vjp, *residuals], by_vjp.union(gives))
