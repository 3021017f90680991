"""Attach a rule to what a function returns.

A `Function` is what JAX is made to differentiate: `_call/program.py` has those that users write.
`with_rule` returns the leaves of its value, and the rule. `attached` makes the rule their
derivative, at the level at which it is called. `tangents_of` has those of the leaves, in forward
mode.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_static

from .._jax.compat import is_ref, zeros
from .._jax.types import Indices, Inert, Leaf, LeafIndex, OperandIndex, Values, is_kind, is_traced
from .._messages import gradient_errors
from .._messages.source import Source
from .primitives import attach, push
from .rule import Rule, Run, replaced


class Forward(NamedTuple):
    """The value of a function at a point, and its rule there."""

    leaves: list[Leaf]
    outputs: Sequence[LeafIndex]  # the leaves that have cotangents
    run: Run
    residuals: list[Leaf]
    gives: Collection[OperandIndex]  # for which operands it may return a gradient


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Function(Inert):
    """A function of operands, with a rule. JAX compares it by identity: a pytree without leaves."""

    source: Source
    names: Callable[[], Sequence[str]]  # of the operands, for JAX's own errors
    # The leaves of the value, in a call that JAX does not differentiate.
    value: Callable[[Values], list[Leaf]]
    # The leaves of the value and the rule, for operands that are perturbed.
    forward: Callable[[Values, Indices], Forward]
    has_primal: bool  # whether `value` runs other code than `forward`
    needs_perturbed: bool = False  # whether its rule must know what is differentiated


def arrays(operands: Values) -> list[Leaf]:
    """Return Python numbers that are differentiated as (weakly typed) arrays."""
    return [o if isinstance(o, jax.Array) or is_ref(o) else jnp.asarray(o) for o in operands]


def with_rule(
    forward: Forward, source: Source, operands: Values, perturbed: Indices
) -> tuple[list[Leaf], Rule]:
    """Return the leaves of a forward pass, and the rule."""
    leaves, outputs, run, residuals, gives = forward
    are_numbers = (y.dtype == bool or is_kind(y.dtype, jnp.integer) for y in leaves)
    if perturbed and not outputs and any(are_numbers):  # and no keys
        gradient_errors.warn_of_no_output(source, sorted({str(y.dtype) for y in leaves}))
    return leaves, Rule(
        residuals,
        run,
        source,
        perturbed=tuple(i for i in perturbed if i in gives),
        outputs=tuple(outputs),
        n_operands=len(operands),
        own=_places_of_y(residuals, [leaves[i] for i in outputs], operands),
    )


def attached(leaves: list[Leaf], rule: Rule, operands: Values) -> tuple[list[Leaf], Rule]:
    """Return the leaves with the rule as their derivative, and the rule.

    If an operand is mapped, so are the leaves, as in `_value`: JAX requires that the two agree.
    """
    # Not only if an operand is traced: what `y` reads from a place that no walk reaches is none.
    if not is_traced((*operands, *rule.residuals, *leaves)):
        return leaves, rule
    xs = [i for i, o in enumerate(operands) if not is_ref(o)]
    alone, residuals = rule.apart()
    leaves = attach(alone.only(xs), residuals, [operands[i] for i in xs], leaves)
    if rule.own:
        rule = dataclasses.replace(rule, residuals=rule.reading(rule.residuals, leaves))
    return leaves, rule


def _places_of_y(residuals: Values, ys: Values, operands: Values) -> tuple[int, ...]:
    """Return which residuals are the only output of the function.

    A rule that reads `y` means `h(x)`, whose derivative is the declared one. So `dy * 2 * y` has a
    second derivative, even if `y` was rounded, or comes out of a callback or a kernel. Not if `y`
    is an operand: `return x, lambda dy: dy * x` means `x`. Nor with several outputs: a rule that
    ignores the upstream of one would declare that this one has no derivative.
    """
    if len(ys) != 1 or any(ys[0] is o for o in operands):
        return ()
    return tuple(k for k, r in enumerate(residuals) if r is ys[0])


def tangents_of(leaves: Values, rule: Rule, tangents: Values) -> list[Leaf]:
    """Return the tangents of the leaves for those of the operands, of which some are perturbed."""
    alone, residuals = rule.apart()
    ys = [leaves[i] for i in rule.outputs]
    dxs = [tangents[i] for i in rule.perturbed]
    types = [jax.typeof(y).to_tangent_aval() for y in ys]
    dys = push(alone, residuals, ys, dxs) if dxs else [*map(zeros, types)]
    every: list[Leaf] = [np.zeros(y.shape, jax.dtypes.float0) for y in leaves]
    return replaced(every, rule.outputs, dys)
