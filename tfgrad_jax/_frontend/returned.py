"""Read the gradients that a rule returned: which form they have, and whether they are right.

The accepted forms are `_by_structure` and the two of `_by_list`; those that fit must agree.
`gradients` reads a result, checks each gradient against its leaf, and returns those of the
operands.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef, all_leaves, tree_flatten, tree_leaves, tree_structure

from .._jax.compat import NUMPY, explicit_sharding, varying
from .._jax.types import Aval, Dtype, Leaf, cotangent_type, is_kind
from .._messages import gradient_errors
from .._messages.source import Source, Where
from .structure import Layout

Returned: TypeAlias = Any  # what a rule returned: a pytree of gradients, in one of the forms
Gradient: TypeAlias = Any  # an array, a number, or None for no gradient

_LEAF, _NONE = tree_structure(0), tree_structure(None)


class Reading(NamedTuple):
    """The gradients of all leaves, as a form reads them."""

    gradients: Sequence[Gradient]
    in_place: bool  # whether what never has a gradient, such as a string, gets none
    for_none: Sequence[Gradient] = ()  # what it has for inputs, and fields, that are None
    in_a_dict: bool = False  # of a flat list: whether only keys of a dict would name its entries


class PassedThrough(tuple[Leaf, ...]):
    """Upstreams that are the gradients of the arrays and floats among the inputs, in order."""


# --- the forms ----------------------------------------------------------------------------------


def read(layout: Layout, result: Returned) -> list[Reading]:
    """Return the gradients of all leaves, as each form reads them that fits."""
    if layout.treedef.children() == [_LEAF] and not isinstance(result, (list, tuple, dict)):
        return [Reading([result], True)]  # the common case
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    layouts = [layout] if layout.full is None else [layout, layout.full]
    found = [r for each in layouts for r in _by_structure(each, result)]
    fits = any(r.in_place for r in found)
    # Only a None may stand for several leaves by structure, and for one of them in a list.
    if not fits or (any(g is None for g in parts) and not layout.is_flat):
        found += [r for each in layouts for r in _by_list(each, parts, fits)]
    return [r for r in found if r.in_place] or found


def _by_structure(layout: Layout, result: Returned) -> Iterator[Reading]:
    """`f(p)` returns `{"w": dw, "b": db}`, and `f(x, p)` returns `(dx, {"w": dw, "b": db})`."""
    values = layout.treedef.children()
    for treedef in (layout.treedef, *(values if len(values) == 1 else ())):
        found: list[Gradient] = []
        for_none: list[Gradient] = []
        if _match(treedef, result, found, for_none):
            yield from _reading(layout, found, for_none)


def _by_list(layout: Layout, parts: Sequence[Gradient], in_doubt: bool) -> Iterator[Reading]:
    """`f(x, mode, p)` returns `[dx, None, db, dw]`, or `[dx, db, dw]` for what counts alone."""
    masks = [[True] * len(layout.types), layout.counted]
    if in_doubt:  # none for a float is no form, but it may be meant
        masks.append(layout.differentiable)
    for mask in masks:
        leaves = [*compress(range(len(mask)), mask)]
        if len(leaves) == len(parts) and all(g is None or all_leaves([g]) for g in parts):
            given = dict(zip(leaves, parts, strict=True))
            in_a_dict = layout.are_in_a_dict([i for i in leaves if layout.counted[i]])
            if not (in_doubt and in_a_dict):
                yield from _reading(layout, [*map(given.get, range(len(mask)))], (), in_a_dict)


def _reading(layout: Layout, every: Sequence[Gradient], *others: Any) -> Iterator[Reading]:
    each = zip(layout.types, layout.counted, every, strict=True)
    in_place = not any(t is None and not counts and _is_gradient(g) for t, counts, g in each)
    # What a full set has for omitted defaults is ignored, if it may be for them.
    if in_place or len(layout.given) == len(every):
        yield Reading([every[i] for i in layout.given], in_place, *others)


def is_pair(layout: Layout, result: Returned) -> bool:
    """Return whether two values are `(grad_xs, grad_vars)`, and not the gradients of two inputs."""
    readings = read(layout, result)
    gives_none = all(g is None for r in readings for g in compress(r.gradients, layout.counted))
    return not readings or (isinstance(result[0], (list, tuple)) and gives_none)


def _match(
    treedef: PyTreeDef, got: Returned, found: list[Gradient], for_none: list[Gradient]
) -> bool:
    """Append to `found` the part of `got` for each leaf of `treedef`; False if it does not fit.

    What the caller left None has no gradient: whatever `got` has for it goes to `for_none`.
    """
    if got is None:
        found += [None] * treedef.num_leaves
        return True
    if treedef == _NONE:
        for_none.append(got)
        return True
    if treedef == _LEAF:
        found.append(got)
        return not isinstance(got, (list, tuple, dict))
    kind, keys = treedef.node_data()
    children = treedef.children()
    if issubclass(kind, (tuple, list)):
        parts = got if isinstance(got, (tuple, list)) else None
    elif issubclass(kind, dict):
        keys = keys[1] if issubclass(kind, collections.defaultdict) else keys
        same = isinstance(got, Mapping) and set(got) == set(keys)
        parts = [got[k] for k in keys] if same else None
    else:
        parts, other = tree_flatten(got, is_leaf=lambda node: node is not got)
        data = other.node_data()
        parts = parts if data is not None and data[0] is kind else None
    if parts is None or len(parts) != len(children):
        return False
    return all(_match(c, p, found, for_none) for c, p in zip(children, parts, strict=True))


def _is_gradient(value: Returned) -> bool:
    return isinstance(value, (jax.Array, np.ndarray)) and is_kind(value.dtype, jnp.inexact)


# --- whether they are right ---------------------------------------------------------------------


def gradients(layout: Layout, result: Returned, where: Where) -> list[Gradient]:
    """Give each operand its gradient, of its own type, or None.

    Gradients for arrays that are not operands are checked, too.
    """
    if isinstance(result, PassedThrough):
        given = _passed_through(layout, result, where.source)
        return [given[i] for i in layout.operands]
    readings = read(layout, result)
    if not readings:
        raise gradient_errors.wrong_structure(where, result, layout)
    firsts, *others = ([*compress(r.gradients, layout.counted)] for r in readings)
    in_doubt = any(a is not b for o in others for a, b in zip(firsts, o, strict=True))
    if in_doubt or readings[0].in_a_dict:
        raise gradient_errors.no_order(where, layout)
    _refuse_swapped(layout, readings[0], where)
    both = zip(layout.differentiable, readings[0].gradients, strict=True)
    given = [g if has else None for has, g in both]
    found: list[Gradient] = [None] * len(given)
    some = ((i, g, cotangent_type(layout.types[i])) for i, g in enumerate(given) if g is not None)
    for i, gradient, expected in some:
        if not _fits(gradient, expected):
            raise gradient_errors.wrong_type(where, given, i, layout)
        found[i] = _cast(gradient, expected.dtype)
    return [found[i] for i in layout.operands]


def _passed_through(layout: Layout, dys: PassedThrough, source: Source) -> list[Gradient]:
    both = enumerate(zip(layout.types, layout.counted, strict=True))
    inputs = {i: t for i, (t, counts) in both if t is not None or counts}
    if [*map(np.shape, inputs.values())] != [*map(np.shape, dys)]:
        raise gradient_errors.pass_through_mismatch(source, [*inputs.values()], dys)
    found: list[Gradient] = [None] * len(layout.types)
    for i, dy in zip(inputs, dys, strict=True):
        if layout.differentiable[i] and _is_gradient(dy):
            is_complex = is_kind(layout.types[i].dtype, jnp.complexfloating)
            dtype = cotangent_type(layout.types[i]).dtype
            found[i] = _cast(dy if is_complex else jnp.real(dy), dtype)
    return found


def _refuse_swapped(layout: Layout, reading: Reading, where: Where) -> None:
    """Raise if an array gets None, and what has no gradient gets one of the array's shape.

    A Python number may have a gradient, as another call may differentiate it; but it is a scalar.
    """
    given, has, counted = reading.gradients, layout.differentiable, layout.counted
    spare: list[tuple[Gradient, int | None]] = [
        (g, i) for i, g in enumerate(given) if not has[i] and not (counted[i] and np.ndim(g) == 0)
    ]
    # What is None has no shape of its own. But if it alone gets a gradient, this is for an array.
    if all(g is None for g in compress(given, counted)):
        spare += [(g, None) for g in tree_leaves(reading.for_none)]
    shapes = {g.shape: i for g, i in spare if _is_gradient(g)}
    for i, g in enumerate(given):
        if has[i] and g is None and layout.types[i].shape in shapes:
            raise gradient_errors.misplaced(where, layout, i, shapes[layout.types[i].shape])


def _fits(gradient: Gradient, expected: Aval) -> bool:
    """Return whether a gradient may be one of this type; `_cast` changes its precision."""
    wanted = expected.dtype
    is_complex = is_kind(wanted, jnp.complexfloating)
    if not isinstance(gradient, (jax.Array, *NUMPY)):
        # Python numbers are weakly typed: they adopt the dtype that they are added to.
        kinds = (int, float, complex) if is_complex else (int, float)
        return isinstance(gradient, kinds) and type(gradient) is not bool and expected.shape == ()
    kind = jnp.complexfloating if is_complex else jnp.floating
    came: Aval = jax.typeof(gradient)
    return (
        (came.dtype == wanted or is_kind(came.dtype, kind))
        and came.shape == expected.shape
        and explicit_sharding(came) == explicit_sharding(expected)
        and varying(expected) <= varying(came)
    )


def _cast(gradient: Gradient, dtype: Dtype) -> Gradient:
    if isinstance(gradient, NUMPY):  # a copy: the rule may write to it again, and JAX may share it
        return jnp.array(gradient, dtype)
    if getattr(gradient, "dtype", None) == dtype:  # the common case
        return gradient
    return lax.convert_element_type(gradient, dtype)
