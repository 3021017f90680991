"""Read the gradients that a rule returned: which form they have, and whether they are right.

The accepted forms are `structured` and `flat`; those that fit must agree. `gradients` reads a
result, checks each gradient against its leaf, and returns those of the operands.
"""

import collections
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef, all_leaves, tree_flatten, tree_leaves, tree_structure

from tfgrad_jax._jax.compat import NUMPY, Sharding, explicit_sharding, tangent_dtype
from tfgrad_jax._jax.types import LeafIndex, is_kind
from tfgrad_jax._messages import gradient_errors
from tfgrad_jax._messages.source import Source, Where
from tfgrad_jax._messages.tracebacks import is_written_here

from .structure import NONE, OMITTED, STATIC, Layout, Place, are_in_a_dict

Returned: TypeAlias = Any  # what a rule returned: a pytree of gradients, in one of the forms
Gradient: TypeAlias = Any  # an array, a number, or None for no gradient

_LEAF, _NONE = tree_structure(0), tree_structure(None)


class Reading(NamedTuple):
    """The gradients of all leaves, as a form reads them."""

    gradients: Sequence[Gradient]
    for_none: Sequence[Gradient] = ()  # what it has for inputs, and fields, that are None
    in_a_dict: bool = False  # of a flat list: whether only keys of a dict would name its entries


# --- the forms ----------------------------------------------------------------------------------


def structured(layout: Layout, result: Returned) -> Iterator[Reading]:
    """`f(p)` returns `{"w": dw, "b": db}`, and `f(x, p)` returns `(dx, {"w": dw, "b": db})`.

    `f(x, scale=1.0)`, called as `f(x)`, may return `(dx, dscale)`.
    """
    values, parts, omitted = layout.treedef.children(), _listed(result), layout.omitted
    if len(values) == 1:
        yield from _matched(layout, values[0], result)
    yield from _matched(layout, layout.treedef, result)
    if not omitted or len(parts) != len(values) + len(omitted):
        return
    marks = {i: tree_leaves(tree) for i, (_, tree) in omitted.items()}
    never = [parts[i] for i in omitted if all(-mark & STATIC for mark in marks[i])]
    if not any(map(_has_gradient, never)):
        given = [g for i, g in enumerate(parts) if i not in omitted]
        yield from _matched(layout, layout.treedef, given)


def flat(layout: Layout, result: Returned) -> Iterator[Reading]:
    """`f(x, mode, p)` returns `[dx, None, db, dw]` or `[dx, db, dw]`.

    There may be nothing for what has no gradient: strings, None, defaults that are left out.
    """
    parts = _listed(result)
    if len(parts) < sum(layout.counted()):  # before names are made, which takes long for a model
        return
    places = layout.places()
    present = functools.reduce(operator.or_, (p.kind for p in places), 0)
    for kinds in range(present + 1):
        listed = [p for p in places if not p.kind & ~kinds]
        if kinds & ~present or len(listed) != len(parts) or not all(map(_may_have, listed, parts)):
            continue
        given = {p.leaf: g for p, g in zip(listed, parts, strict=True)}
        gradients = [given.get(i) for i in range(len(layout.specs))]
        for_none = _where([p.kind == NONE for p in listed], parts)
        yield Reading(gradients, for_none, are_in_a_dict(listed))


def _may_have(place: Place, given: Returned) -> bool:
    """Return whether an entry of a flat list may be the one for a place."""
    if place.leaf is None:
        return not place.kind & STATIC or not _has_gradient(given)
    is_one = given is None or all_leaves([given])
    return is_one or (bool(place.kind) and not _has_gradient(given))


def read(layout: Layout, result: Returned) -> list[Reading]:
    """Return the gradients of all leaves, as each form reads them that fits."""
    values = layout.treedef.children()
    if values == [_LEAF] and not isinstance(result, (list, tuple, dict)):  # the common case
        return [Reading([result])]
    found = list(structured(layout, result))
    # Only a None may stand for several leaves by structure, and for one of them in a list.
    may_be_both = any(g is None for g in _listed(result)) and any(v != _LEAF for v in values)
    if found and not may_be_both:
        return found
    listed = [r for r in flat(layout, result) if not (found and r.in_a_dict)]
    return [*found, *([r for r in listed if _in_place(layout, r.gradients)] or listed)]


def is_pair(layout: Layout, result: Returned) -> bool:
    """Return whether two values are `(grad_xs, grad_vars)`, and not the gradients of two inputs."""
    readings = read(layout, result)
    if not readings:
        return True
    return isinstance(result[0], (list, tuple)) and bool(_only_for_none(layout, readings[0]))


def _matched(layout: Layout, treedef: PyTreeDef, result: Returned) -> Iterator[Reading]:
    """Read a result that has a structure.

    It does not, if a gradient is in the place of a leaf that has none, such as a callable. Then it
    may have another form, in which this gradient belongs to an array.
    """
    found: list[Gradient] = []
    for_none: list[Gradient] = []
    if _match(treedef, result, found, for_none) and _in_place(layout, found):
        yield Reading(found, for_none)


def _in_place(layout: Layout, given: Sequence[Gradient]) -> bool:
    """Return whether what never has a gradient, such as a string, has none."""
    never = [s is None and not n for s, n in zip(layout.specs, layout.numbers, strict=True)]
    return not any(map(_has_gradient, _where(never, given)))


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


def _has_gradient(value: Any) -> bool:
    """Return whether the entry for a leaf without a gradient holds one, which is misplaced."""
    return any(
        isinstance(leaf, (jax.Array, np.ndarray)) and is_kind(leaf.dtype, jnp.inexact)
        for leaf in tree_leaves(value)
    )


# --- whether they are right ---------------------------------------------------------------------


def gradients(layout: Layout, result: Returned, where: Where) -> list[Gradient]:
    """Give each operand its gradient, of its own shape and dtype, or None.

    Gradients for arrays that are not operands are checked, too.
    """
    readings = read(layout, result)
    if not readings:
        places = [place for place in layout.places() if not place.kind & OMITTED]
        needless = [place.name for place in places if place.kind]
        may_be_list = not are_in_a_dict(places)
        raise gradient_errors.wrong_structure(where, result, layout, needless, may_be_list)
    reading, *others = readings
    pairs = (zip(layout.counted(), reading.gradients, r.gradients, strict=True) for r in others)
    is_unknown = any(counts and a is not b for three in pairs for counts, a, b in three)
    # `grad_pass_through` does list gradients in the order of the leaves.
    in_a_dict = reading.in_a_dict and not is_written_here(Source.of(where.grad_fn).code)
    if is_unknown or in_a_dict:
        raise gradient_errors.no_order(where, gradient_errors.written_out(layout))
    has = layout.differentiable
    _check_places(layout, result, reading, where)
    given = [g if h else None for h, g in zip(has, reading.gradients, strict=True)]
    for i, gradient in enumerate(given):
        if gradient is not None:
            _check(layout, i, given, where)
    return [_cast(given[i], layout.specs[i]) for i in layout.operands]


def _check_places(layout: Layout, result: Returned, reading: Reading, where: Where) -> None:
    """Raise if an array gets None, and what has no gradient gets one that may be the array's."""
    has, given = layout.differentiable, reading.gradients
    every = zip(layout.specs, has, given, strict=True)
    shapes = {s.shape for s, h, g in every if s is not None and h and g is None}
    if not shapes:
        return
    # This may be a flat list for the arrays alone. Then an entry that we have read as the
    # gradient of a number may be meant for an array.
    is_doubtful = (
        isinstance(result, (list, tuple))
        and len(result) == sum(has)
        and all_leaves(result, is_leaf=lambda g: g is None)
    )
    for i, (is_number, gradient) in enumerate(zip(layout.numbers, given, strict=True)):
        if has[i] or not _has_gradient(gradient):
            continue
        # A number may have a gradient: another call may differentiate it. But it is a scalar.
        if is_doubtful or not is_number or getattr(gradient, "shape", ()) in shapes - {()}:
            raise gradient_errors.misplaced(where, layout.leaf_paths()[i])
    # What is None has no shape of its own. But if it alone gets a gradient, this is for an array.
    if any(g.shape in shapes for g in _only_for_none(layout, reading)):
        nones = "`, `".join(place.name for place in layout.places() if place.kind == NONE)
        raise gradient_errors.misplaced(where, nones)


def _only_for_none(layout: Layout, reading: Reading) -> list[Gradient]:
    """Return the gradients for what is None, if nothing else has one."""
    if any(g is not None for g in _where(layout.counted(), reading.gradients)):
        return []
    return [g for g in tree_leaves(reading.for_none) if _has_gradient(g)]


def _check(layout: Layout, leaf: LeafIndex, given: Sequence[Gradient], where: Where) -> None:
    """Raise unless a gradient has the kind and the shape of its leaf."""
    gradient = given[leaf]
    expected: Any = layout.specs[leaf]
    dtype_expected = tangent_dtype(expected.dtype)
    if isinstance(gradient, (jax.Array, *NUMPY)):
        shape, dtype = gradient.shape, gradient.dtype
        if dtype == dtype_expected and shape == expected.shape and expected.sharding is None:
            return
        same_kind = any(
            is_kind(dtype, kind) and is_kind(dtype_expected, kind)
            for kind in (jnp.floating, jnp.complexfloating)
        ) or (is_kind(dtype_expected, jax.dtypes.extended) and is_kind(dtype, jnp.floating))
    else:
        # Python numbers are weakly typed: they adopt the dtype that they are added to.
        shape, kinds = (), (int, float, complex)
        kinds = kinds if is_kind(dtype_expected, jnp.complexfloating) else kinds[:2]
        same_kind = isinstance(gradient, kinds) and not isinstance(gradient, bool)
    path = layout.leaf_paths()[leaf] if not same_kind or shape != expected.shape else ""
    if not same_kind:
        raise gradient_errors.wrong_kind(where, gradient, expected, path)
    if shape != expected.shape:
        others = [
            p
            for p, s, g in zip(layout.leaf_paths(), layout.specs, given, strict=True)
            if s is not None
            and (g is None or getattr(g, "shape", s.shape) != s.shape)
            and s.shape == shape
        ]
        raise gradient_errors.wrong_shape(where, shape, expected.shape, path, others)
    if expected.sharding is not None:
        expected = expected._replace(sharding=expected.sharding.of_cotangents())
        if _axes(explicit_sharding(gradient)) != _axes(expected.sharding):
            path = layout.leaf_paths()[leaf]
            raise gradient_errors.wrong_sharding(where, gradient, expected, path)


def _axes(sharding: Sharding | None) -> tuple[Any, ...]:
    """Return what two shardings differ in; one that names no axis is as good as none."""
    partitions, *sets = sharding or Sharding(())
    return (partitions if any(partitions) else (), *sets)


def _cast(gradient: Gradient, expected: Any) -> Gradient:
    if gradient is None:
        return None
    dtype = tangent_dtype(expected.dtype)
    if isinstance(gradient, NUMPY):  # a copy: the rule may write to it again, and JAX may share it
        return jnp.array(gradient, dtype)
    if getattr(gradient, "dtype", None) == dtype:  # the common case
        return gradient
    return lax.convert_element_type(gradient, dtype)
