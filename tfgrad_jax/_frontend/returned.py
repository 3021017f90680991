"""Read the gradients that a rule returned: which form they have, and whether they are right.

`FORMS` lists the accepted forms; the first that fits wins. `gradients` reads a result, checks each
gradient against its leaf, and returns those of the operands.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef, all_leaves, tree_flatten, tree_leaves, tree_structure

from tfgrad_jax._jax.compat import NUMPY, Sharding, explicit_sharding, tangent_dtype
from tfgrad_jax._jax.types import LeafIndex, is_kind
from tfgrad_jax._messages import gradient_errors
from tfgrad_jax._messages.source import Where
from tfgrad_jax._messages.text import tree_of

from .structure import Layout

Returned: TypeAlias = Any  # what a rule returned: a pytree of gradients, in one of the forms
Gradient: TypeAlias = Any  # an array, a number, or None for no gradient

_LEAF = tree_structure(0)


class Reading(NamedTuple):
    """The gradients of all leaves, as a form reads them."""

    gradients: list[Gradient]
    listed: Sequence[LeafIndex] = ()  # of a flat list: the leaf of each entry, by order alone


# --- the forms ----------------------------------------------------------------------------------


def one_array(layout: Layout, result: Returned) -> Reading | None:
    """`f(x)` returns `dx`. The common case, so it comes first."""
    only = layout.treedef.children() == [_LEAF]
    return Reading([result]) if only and not isinstance(result, (list, tuple, dict)) else None


def structure_of_the_only_value(layout: Layout, result: Returned) -> Reading | None:
    """`f(p)` returns `{"w": dw, "b": db}`."""
    values = layout.treedef.children()
    return _as_structured(layout, values[0], result) if len(values) == 1 else None


def structure(layout: Layout, result: Returned) -> Reading | None:
    """`f(x, p)` returns `(dx, {"w": dw, "b": db})`."""
    return _as_structured(layout, layout.treedef, result)


def one_for_each_leaf(layout: Layout, result: Returned) -> Reading | None:
    """`f(x, mode, p)` returns `[dx, None, db, dw]`."""
    flat = _listed(result)
    nested = [g is not None and not all_leaves([g]) for g in flat]
    if len(flat) != len(layout.specs) or any(map(_has_gradient, _where(nested, flat))):
        return None
    # A tree of None may stand for the inputs, with a None for an omitted default.
    empty = [n and not tree_leaves(g) for n, g in zip(nested, flat, strict=True)]
    given = [None if e else g for e, g in zip(empty, flat, strict=True)]
    return Reading(given, listed=range(len(given)))


def one_for_each_gradient(layout: Layout, result: Returned) -> Reading | None:
    """`f(x, mode, p)` returns `[dx, db, dw]`: nothing for what never has a gradient."""
    flat, counted = _listed(result), layout.counted()
    if len(flat) != sum(counted) or not all(g is None or all_leaves([g]) for g in flat):
        return None
    rest, listed = iter(flat), [i for i, has in enumerate(counted) if has]
    return Reading([next(rest) if has else None for has in counted], listed)


def with_omitted_defaults(layout: Layout, result: Returned) -> Reading | None:
    """`f(x, scale=1.0)`, called as `f(x)`, returns `(dx, dscale)`, in any of the other forms."""
    if layout.full is None:
        return None
    full, ours = layout.full
    reading = read(full, result)
    others = [i for i, counts in enumerate(full.counted()) if i not in ours and not counts]
    if reading is None or any(_has_gradient(reading.gradients[i]) for i in others):
        return None
    listed = [ours.index(i) for i in reading.listed if i in ours]
    return Reading([reading.gradients[i] for i in ours], listed)


Form: TypeAlias = Callable[[Layout, Returned], Reading | None]  # None: another form may fit

# The first that fits wins. So a list is read by structure before it is read as flat: of `f(p, n)`,
# whose `p` is a dict of two arrays, `[None, g]` is None for `p` and `g` for `n`.
FORMS: tuple[Form, ...] = (
    one_array,
    structure_of_the_only_value,
    structure,
    one_for_each_leaf,
    one_for_each_gradient,
    with_omitted_defaults,
)


def read(layout: Layout, result: Returned) -> Reading | None:
    """Return the gradients of all leaves, or None if the result has no accepted form."""
    return next((r for form in FORMS if (r := form(layout, result)) is not None), None)


def _as_structured(layout: Layout, treedef: PyTreeDef, result: Returned) -> Reading | None:
    """Read a result that has a structure.

    It does not, if a gradient is in the place of a leaf that has none, such as a callable. Then it
    may have another form, in which this gradient belongs to an array.
    """
    found: list[Gradient] = []
    if not _match(treedef, result, found):
        return None
    never = [s is None and not n for s, n in zip(layout.specs, layout.numbers, strict=True)]
    return None if any(map(_has_gradient, _where(never, found))) else Reading(found)


def _match(treedef: PyTreeDef, got: Returned, found: list[Gradient]) -> bool:
    """Append to `found` the part of `got` for each leaf of `treedef`; False if it does not fit."""
    if got is None:
        found += [None] * treedef.num_leaves
        return True
    if treedef == _LEAF:
        found.append(got)
        return not isinstance(got, (list, tuple, dict))
    if treedef.num_leaves == 0:
        return not tree_leaves(got)
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
    return all(_match(c, p, found) for c, p in zip(children, parts, strict=True))


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


def _may_be_list(layout: Layout, where: Where) -> bool:
    """Return whether a flat list of gradients is accepted."""
    return where.of != "variable" or not _has_keys(layout.treedef)


def _has_keys(treedef: PyTreeDef) -> bool:
    """Return whether there is a dict with several keys, which a flat list would not name."""
    kind, _ = treedef.node_data() or (None, None)
    children = treedef.children()
    is_dict = kind is not None and issubclass(kind, dict) and len(children) > 1
    return is_dict or any(map(_has_keys, children))


# --- whether they are right ---------------------------------------------------------------------


def gradients(layout: Layout, result: Returned, where: Where) -> list[Gradient]:
    """Give each operand its gradient, of its own shape and dtype, or None.

    Gradients for arrays that are not operands are checked, too.
    """
    reading = read(layout, result)
    if reading is None:
        may_be_list = _may_be_list(layout, where)
        raise gradient_errors.wrong_structure(where, result, layout, may_be_list)
    if reading.listed and not _may_be_list(layout, where):
        raise gradient_errors.keys_without_names(where, tree_of(layout.treedef.children()[0]))
    has = layout.differentiable
    _check_order(layout, reading, where)
    _check_places(layout, result, reading.gradients, where)
    given = [g if h else None for h, g in zip(has, reading.gradients, strict=True)]
    for i, gradient in enumerate(given):
        if gradient is not None:
            _check(layout, i, given, where)
    return [_cast(given[i], layout.specs[i]) for i in layout.operands]


def _check_order(layout: Layout, reading: Reading, where: Where) -> None:
    """Warn if a flat list is as good in the order in which the keys of a dict were written.

    It is read by sorted keys, as in TensorFlow. If the shapes agree in both orders, a list in the
    other one trains to a wrong number.
    """
    if layout.written is None or not reading.listed:
        return
    listed, written = reading.listed, [i for i in layout.written if i in reading.listed]
    moved = [(i, w) for i, w in zip(listed, written, strict=True) if i != w]
    if all(reading.gradients[i] is None for i, _ in moved):
        return
    if all(layout.shape(i) == layout.shape(w) for i, w in moved):
        paths = layout.leaf_paths()
        read, other = ([paths[k] for k in order] for order in zip(*moved, strict=True))
        gradient_errors.warn_of_order(where, read, other)


def _check_places(
    layout: Layout, result: Returned, given: Sequence[Gradient], where: Where
) -> None:
    """Raise if an array gets None, and what has no gradient gets one that may be the array's."""
    has = layout.differentiable
    # This may be a flat list for the arrays alone. Then an entry that we have read as the
    # gradient of a number may be meant for an array.
    is_doubtful = (
        isinstance(result, (list, tuple))
        and len(result) == sum(has)
        and all_leaves(result, is_leaf=lambda g: g is None)
    )
    misplaced = [
        i
        for i, is_number in enumerate(layout.numbers)
        if not has[i] and (is_doubtful or not is_number) and _has_gradient(given[i])
    ]
    if misplaced and any(g is None for g in _where(has, given)):
        raise gradient_errors.gradient_of_no_array(where, layout.leaf_paths()[misplaced[0]])
    # A number may have a gradient: another call may differentiate it. But it is a scalar.
    for i in [i for i in layout.operands if has[i] and given[i] is None]:
        for k, is_number in enumerate(layout.numbers):
            shape = getattr(given[k], "shape", ()) if is_number and not has[k] else ()
            if shape and shape == layout.shape(i):
                paths = layout.leaf_paths()
                raise gradient_errors.swapped(where, shape, paths[k], paths[i])


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
        idle = leaf not in layout.operands
        raise gradient_errors.wrong_shape(where, shape, expected.shape, path, others, idle)
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
