"""Read the gradients that a rule returned: which form they have, and whether they are right.

The accepted forms are `structured` and the two of `flat`; those that fit must agree. `gradients`
reads a result, checks each gradient against its leaf, and returns those of the operands.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef, all_leaves, tree_flatten, tree_leaves, tree_structure

from .._jax.compat import NUMPY, tangent_dtype
from .._jax.types import Aval, Leaf, LeafIndex, is_kind
from .._messages import gradient_errors
from .._messages.source import Source, Where
from .structure import Layout

Returned: TypeAlias = Any  # what a rule returned: a pytree of gradients, in one of the forms
Gradient: TypeAlias = Any  # an array, a number, or None for no gradient

_LEAF, _NONE = tree_structure(0), tree_structure(None)


class Reading(NamedTuple):
    """The gradients of all leaves, as a form reads them."""

    gradients: Sequence[Gradient]
    for_none: Sequence[Gradient] = ()  # what it has for inputs, and fields, that are None
    in_a_dict: bool = False  # of a flat list: whether only keys of a dict would name its entries


class PassedThrough(tuple[Leaf, ...]):
    """Upstreams that are the gradients of the arrays and floats among the inputs, in order."""


# --- the forms ----------------------------------------------------------------------------------


def structured(layout: Layout, result: Returned) -> Iterator[Reading]:
    """`f(p)` returns `{"w": dw, "b": db}`, and `f(x, p)` returns `(dx, {"w": dw, "b": db})`.

    `f(x, scale=1.0)`, called as `f(x)`, may return `(dx, dscale)`.
    """
    values, parts = layout.treedef.children(), _listed(result)
    tries = [(layout.treedef, result)]
    if len(values) == 1:
        tries.append((values[0], result))
    if layout.omitted and len(parts) == len(values) + len(layout.omitted):
        settings = [parts[i] for i, counts in layout.omitted.items() if counts and not any(counts)]
        if not any(map(_is_gradient, tree_leaves(settings))):
            given = [g for i, g in enumerate(parts) if i not in layout.omitted]
            tries.append((layout.treedef, given))
    for treedef, given in tries:
        found: list[Gradient] = []
        for_none: list[Gradient] = []
        if _match(treedef, given, found, for_none):
            yield Reading(found, for_none)


def flat(layout: Layout, result: Returned) -> Iterator[Reading]:
    """`f(x, mode, p)` returns `[dx, None, db, dw]`, or `[dx, db, dw]` for what counts alone."""
    yield from _listing(layout, range(len(layout.types)), result)
    yield from _listing(layout, layout.counting(full=False), result)
    if layout.omitted:
        yield from _listing(layout, layout.counting(full=True), result)


def _listing(
    layout: Layout, slots: Sequence[LeafIndex | None], result: Returned
) -> Iterator[Reading]:
    """Read a list with one entry for each of these leaves; None stands for one that is left out."""
    parts = _listed(result)
    if len(slots) == len(parts) and all(g is None or all_leaves([g]) for g in parts):
        given = dict(zip(slots, parts, strict=True))
        every = [given.get(i) for i in range(len(layout.types))]
        named = [i for i in slots if i is not None and layout.counted[i]]
        yield Reading(every, (), layout.are_in_a_dict(named))


def read(layout: Layout, result: Returned) -> list[Reading]:
    """Return the gradients of all leaves, as each form reads them that fits."""
    values = layout.treedef.children()
    if values == [_LEAF] and not isinstance(result, (list, tuple, dict)):  # the common case
        return [Reading([result])]
    found = list(structured(layout, result))
    fits = _in_place(layout, found)
    # Only a None may stand for several leaves by structure, and for one of them in a list.
    may_be_both = any(g is None for g in _listed(result)) and any(v != _LEAF for v in values)
    if fits and not may_be_both:
        return fits
    listed = [r for r in flat(layout, result) if not (fits and r.in_a_dict)]
    if fits:  # one for each array, and none for a float, is no form; but it may be what is meant
        arrays = [i for i, has in enumerate(layout.differentiable) if has]
        listed += _listing(layout, arrays, result)
    return _in_place(layout, [*found, *listed]) or [*found, *listed]


def _in_place(layout: Layout, readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings without a gradient for what never has one, such as a string."""
    both = zip(layout.types, layout.counted, strict=True)
    never = [t is None and not counts for t, counts in both]
    return [r for r in readings if not any(map(_is_gradient, _where(never, r.gradients)))]


def is_pair(layout: Layout, result: Returned) -> bool:
    """Return whether two values are `(grad_xs, grad_vars)`, and not the gradients of two inputs."""
    readings = read(layout, result)
    gives_none = all(g is None for r in readings for g in _where(layout.counted, r.gradients))
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
    if treedef.num_leaves == 0 and not tree_leaves(got):
        return True
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


def _listed(result: Returned) -> list[Gradient]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _where(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [v for holds, v in zip(mask, values, strict=True) if holds]


def _is_gradient(value: Returned) -> bool:
    return isinstance(value, (jax.Array, np.ndarray)) and is_kind(value.dtype, jnp.inexact)


# --- whether they are right ---------------------------------------------------------------------


def gradients(layout: Layout, result: Returned, where: Where) -> list[Gradient]:
    """Give each operand its gradient, of its own shape and dtype, or None.

    Gradients for arrays that are not operands are checked, too.
    """
    if isinstance(result, PassedThrough):
        dys = passed_through(layout, result, where.source)
        return [
            _cast_kind(dys[i], layout.types[i]) if layout.differentiable[i] else None
            for i in layout.operands
        ]
    readings = read(layout, result)
    if not readings:
        raise gradient_errors.wrong_structure(where, result, layout)
    reading, *others = readings
    firsts = _where(layout.counted, reading.gradients)
    is_unknown = any(
        a is not b
        for other in others
        for a, b in zip(firsts, _where(layout.counted, other.gradients), strict=True)
    )
    if is_unknown or reading.in_a_dict:
        raise gradient_errors.no_order(where, layout, is_unknown)
    _refuse_swapped(layout, reading, where)
    has = layout.differentiable
    given = [g if h else None for h, g in zip(has, reading.gradients, strict=True)]
    for i, gradient in enumerate(given):
        if gradient is not None:
            _check(layout, i, given, where)
    return [_cast(given[i], layout.types[i]) for i in layout.operands]


def passed_through(layout: Layout, given: Sequence[Leaf], source: Source) -> dict[LeafIndex, Leaf]:
    """Return which of these, outputs or upstreams, stands for which leaf; raise if they differ."""
    both = zip(layout.types, layout.counted, strict=True)
    inputs = [i for i, (t, counts) in enumerate(both) if t is not None or counts]
    types = [layout.types[i] for i in inputs]
    wanted = [() if t is None else t.shape for t in types]
    # A PRNG key has no upstream.
    came = [s if g is None else np.shape(g) for s, g in zip(wanted, given, strict=False)]
    if len(given) != len(inputs) or came != wanted:
        raise gradient_errors.pass_through_mismatch(source, types, given)
    return dict(zip(inputs, given, strict=True))


def _refuse_swapped(layout: Layout, reading: Reading, where: Where) -> None:
    """Raise if an array gets None, and what has no gradient gets one of the array's shape.

    A Python number may have a gradient, as another call may differentiate it; but it is a scalar.
    """
    given = reading.gradients
    every = zip(layout.types, layout.differentiable, given, strict=True)
    shapes = {t.shape for t, has, g in every if t is not None and has and g is None}
    for i, (has, counts, g) in enumerate(
        zip(layout.differentiable, layout.counted, given, strict=True)
    ):
        if not has and _is_gradient(g) and g.shape in shapes - ({()} if counts else set()):
            raise gradient_errors.misplaced(where, layout.leaf_paths()[i])
    # What is None has no shape of its own. But if it alone gets a gradient, this is for an array.
    if all(g is None for g in _where(layout.counted, given)):
        for_none = filter(_is_gradient, tree_leaves(reading.for_none))
        if any(g.shape in shapes for g in for_none):
            both = zip(layout.names, layout.treedef.children(), strict=True)
            raise gradient_errors.misplaced(where, *(n for n, child in both if child == _NONE))


def _check(layout: Layout, leaf: LeafIndex, given: Sequence[Gradient], where: Where) -> None:
    """Raise unless a gradient has the kind and the shape of its leaf."""
    gradient = given[leaf]
    expected: Any = layout.types[leaf]
    wanted = tangent_dtype(expected.dtype)
    if isinstance(gradient, (jax.Array, *NUMPY)):
        shape, dtype = gradient.shape, gradient.dtype
        if dtype == wanted and shape == expected.shape:
            return
        same_kind = any(
            is_kind(dtype, kind) and is_kind(wanted, kind)
            for kind in (jnp.floating, jnp.complexfloating)
        ) or (is_kind(wanted, jax.dtypes.extended) and is_kind(dtype, jnp.floating))
    else:
        # Python numbers are weakly typed: they adopt the dtype that they are added to.
        shape, kinds = (), (int, float, complex)
        kinds = kinds if is_kind(wanted, jnp.complexfloating) else kinds[:2]
        same_kind = isinstance(gradient, kinds) and not isinstance(gradient, bool)
    if not same_kind:
        raise gradient_errors.wrong_kind(where, gradient, expected, layout.leaf_paths()[leaf])
    if shape != expected.shape:
        every = zip(layout.leaf_paths(), layout.types, layout.differentiable, given, strict=True)
        others = [
            path
            for path, t, has, g in every
            if t is not None and has and t.shape == shape and getattr(g, "shape", None) != shape
        ]
        path = layout.leaf_paths()[leaf]
        raise gradient_errors.wrong_shape(where, shape, expected.shape, path, others)


def _cast_kind(dy: Leaf, expected: Aval) -> Gradient:
    """Give an upstream the dtype of a leaf; None if it has no derivative."""
    if not _is_gradient(dy):
        return None
    return _cast(dy if is_kind(expected.dtype, jnp.complexfloating) else jnp.real(dy), expected)


def _cast(gradient: Gradient, expected: Any) -> Gradient:
    if gradient is None:
        return None
    dtype = tangent_dtype(expected.dtype)
    if isinstance(gradient, NUMPY):  # a copy: the rule may write to it again, and JAX may share it
        return jnp.array(gradient, dtype)
    if getattr(gradient, "dtype", None) == dtype:  # the common case
        return gradient
    return lax.convert_element_type(gradient, dtype)
