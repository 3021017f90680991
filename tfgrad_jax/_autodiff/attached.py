"""Run the forward pass of a function, and attach its rule to what it returns.

`ran` returns the leaves of the value, and the rule. `attached` makes the rule their derivative, at
the level at which it is called. `tangents_of` has those of the leaves, in forward mode.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from .._jax.compat import is_ref, tangent_type, zeros
from .._jax.types import (
    Leaf,
    OperandIndex,
    Tangents,
    is_differentiable,
    is_kind,
    is_traced,
)
from .._messages import gradient_errors
from .._messages.runs import annotate
from .._messages.source import Source
from .function import Forward, Function
from .primitives import attach, depend, push
from .rule import Rule, replaced


def arrays(operands: Sequence[Leaf]) -> list[Leaf]:
    """Return Python numbers that are differentiated as (weakly typed) arrays."""
    return [o if isinstance(o, jax.Array) or is_ref(o) else jnp.asarray(o) for o in operands]


def ran(
    function: Function, operands: Sequence[Leaf], perturbed: Sequence[bool]
) -> tuple[list[Leaf], Rule]:
    """Run the forward pass: return the leaves, and the rule."""
    forward = explained(function, operands, _positions(operands, perturbed))
    return with_rule(forward, function.source, operands, perturbed)


def explained(
    function: Function, operands: Sequence[Leaf], positions: Sequence[OperandIndex]
) -> Forward:
    """Run the forward pass, and name the function if JAX cannot differentiate its operations."""
    try:
        return function.forward(operands, positions)
    except Exception as error:
        annotate(error, function.source)
        raise


def _positions(operands: Sequence[Leaf], perturbed: Sequence[bool]) -> list[int]:
    return [i for i, o in enumerate(operands) if perturbed[i] and is_differentiable(o.dtype)]


def with_rule(
    forward: Forward, source: Source, operands: Sequence[Leaf], perturbed: Sequence[bool]
) -> tuple[list[Leaf], Rule]:
    """Return the leaves of a forward pass, and the rule."""
    leaves, outputs, run, residuals, gives = forward
    has_tangents = [is_differentiable(o.dtype) for o in operands]
    refs = list(map(is_ref, operands))
    positions = _positions(operands, perturbed)
    are_numbers = (y.dtype == bool or is_kind(y.dtype, jnp.integer) for y in leaves)
    if positions and not outputs and any(are_numbers):  # and no keys
        gradient_errors.warn_of_no_output(source, sorted({str(y.dtype) for y in leaves}))
    differentiable = [i for i, has in enumerate(has_tangents) if has and not refs[i]]
    return leaves, Rule(
        residuals,
        run,
        tuple(outputs),
        tuple(i for i in positions if i in gives),
        tuple(differentiable),
        len(operands),
        source,
        pure=not any(refs),
        own=_places_of_y(residuals, [leaves[i] for i in outputs], operands),
    )


def attached(leaves: list[Leaf], rule: Rule, operands: Sequence[Leaf]) -> tuple[list[Leaf], Rule]:
    """Return the leaves with the rule as their derivative, and the rule.

    If an operand is mapped, so are the leaves, as in `_value`: JAX requires that the two agree.
    """
    # Not only if an operand is traced: what `y` reads from a place that no walk reaches is none.
    if not is_traced((*operands, *rule.residuals, *leaves)):
        return leaves, rule
    xs, outputs = [operands[i] for i in rule.differentiable], rule.outputs
    ys = attach(*rule.pull(), xs, [leaves[i] for i in outputs])
    leaves = replaced(leaves, outputs, ys)
    if rule.own:
        kept = replaced(rule.residuals, rule.own, ys * len(rule.own))
        rule = dataclasses.replace(rule, residuals=kept)
    traced = [o for o in operands if isinstance(o, Tracer) and not is_ref(o)]
    others = [o for o in traced if not is_differentiable(o.dtype)]
    for i, leaf in enumerate(leaves):
        ignored = others if i in outputs else traced
        if ignored:
            (leaves[i],) = depend([leaf], ignored)
    return leaves, rule


def _places_of_y(
    residuals: Sequence[Leaf], ys: Sequence[Leaf], operands: Sequence[Leaf]
) -> tuple[int, ...]:
    """Return which residuals are the only output of the function.

    A rule that reads `y` means `h(x)`, whose derivative is the declared one. So `dy * 2 * y` has a
    second derivative, even if `y` was rounded, or comes out of a callback or a kernel. Not if `y`
    is an operand: `return x, lambda dy: dy * x` means `x`. Nor with several outputs: a rule that
    ignores the upstream of one would declare that this one has no derivative.
    """
    if len(ys) != 1 or any(ys[0] is o for o in operands):
        return ()
    return tuple(k for k, r in enumerate(residuals) if r is ys[0])


def tangents_of(leaves: Sequence[Leaf], rule: Rule, tangents: Tangents) -> list[Leaf]:
    """Return the tangents of the leaves for the tangents of the operands."""
    pull, residuals = rule.pull()
    nonzero = [
        x for x, i in enumerate(rule.differentiable) if type(tangents[i]) is not SymbolicZero
    ]
    dxs = [tangents[rule.differentiable[x]] for x in nonzero]
    ys = [leaves[i] for i in rule.outputs]
    none = (zeros(tangent_type(y)) for y in ys)
    dys = push(pull.only(nonzero), residuals, ys, dxs) if dxs else none
    tangent_of = dict(zip(rule.outputs, dys, strict=True))
    return [
        tangent_of[i] if i in tangent_of else np.zeros(y.shape, jax.dtypes.float0)
        for i, y in enumerate(leaves)
    ]
