"""Flatten what goes in, and give every gradient that comes back its place.

At the call: `split` sorts the leaves of the inputs into *operands* (arrays, traced) and
statics (everything else, left alone); `Layout.join` puts them together again. When a rule runs:
`Outputs.upstreams` makes its arguments from the cotangents, and `Layout.gradients` reads what
it returned.
"""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_structure, tree_unflatten

from . import _errors
from ._compat import varying

_OPERAND = object()  # stands for an operand among the statics of a `Layout`
_LEAF = tree_structure(0)
_ARRAYS = (jax.Array, float, complex)
_NUMPY = (np.ndarray, np.generic)
_VALUES = (int, str, bytes)


class Spec(NamedTuple):
    """The type of an operand."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[Any] = frozenset()  # of a shard_map, along which it varies

    @property
    def differentiable(self) -> bool:
        return is_kind(self.dtype, jnp.inexact)


@functools.cache
def is_kind(dtype: Any, kind: Any) -> bool:
    """Tell whether a dtype is of a kind, such as `jnp.floating`; asked at every call."""
    return jnp.issubdtype(dtype, kind)


def spec(leaf: Any) -> Spec:
    """Return the type of an array, a tracer or a Python number."""
    try:
        return Spec(leaf.shape, leaf.dtype, varying(leaf))
    except AttributeError:
        return Spec(np.shape(leaf), jnp.result_type(leaf))


def is_operand(leaf: Any) -> bool:
    """Tell whether an input leaf is traced: arrays, NumPy scalars, `float`, `complex`."""
    if isinstance(leaf, _ARRAYS):
        return True
    return isinstance(leaf, _NUMPY) and (leaf.dtype == bool or is_kind(leaf.dtype, jnp.number))


def sum_of_nothing(values: Sequence[Any], dtype: Any) -> Any:
    """Return a zero that depends on all values, by none of their elements.

    To subtract it makes something depend on the values for JAX, and compiles to nothing.
    """
    total = np.zeros((), dtype)
    for value in values:
        none = lax.slice_in_dim(value if value.ndim else lax.reshape(value, (1,)), 0, 0)
        if is_kind(value.dtype, jnp.complexfloating) and not is_kind(dtype, jnp.complexfloating):
            none = lax.real(none)
        none = lax.convert_element_type(none, dtype)
        total = lax.add(total, lax.reduce(none, np.zeros((), dtype), lax.add, range(none.ndim)))
    return total


class Layout:
    """Where the leaves of a tuple of values are, and which of them are operands."""

    __slots__ = ("_names", "_statics", "treedef")

    def __init__(self, treedef: Any, statics: list[Any], names: Sequence[str]) -> None:
        self.treedef = treedef
        self._statics = statics
        self._names = names

    @property
    def statics(self) -> list[Any]:
        """The leaves that are no operands."""
        return [s for s in self._statics if s is not _OPERAND]

    def without_statics(self) -> "Layout":
        """Return the same places without the values that are in them."""
        return Layout(
            self.treedef, [s if s is _OPERAND else None for s in self._statics], self._names
        )

    def same_as(self, other: "Layout") -> bool:
        """Tell whether the other layout has the same structure and the same statics."""
        return self.treedef == other.treedef and all(
            a is b or (type(a) is type(b) and isinstance(a, _VALUES) and a == b)
            for a, b in zip(self._statics, other._statics, strict=True)
        )

    def accepts(self, result: Any) -> bool:
        """Tell whether `result` has the structure of the values."""
        values = self.treedef.children()
        return _match(values[0] if len(values) == 1 else self.treedef, result, [])

    def join(self, operands: Sequence[Any]) -> Any:
        """Rebuild the values around new operands."""
        rest = iter(operands)
        return tree_unflatten(
            self.treedef, [next(rest) if s is _OPERAND else s for s in self._statics]
        )

    def path(self, operand: int) -> str:
        """Name an operand as the user would write it, such as `params['w'][0]`."""
        position = [i for i, s in enumerate(self._statics) if s is _OPERAND][operand]
        return self.leaf_paths()[position]

    def leaf_paths(self) -> list[str]:
        """Name every leaf as the user would write it."""
        numbered = tree_unflatten(self.treedef, range(len(self._statics)))
        paths = []
        for keys, _ in tree_flatten_with_path(numbered)[0]:
            paths.append(self._names[keys[0].idx] + jax.tree_util.keystr(keys[1:]))
        return paths

    def gradients(self, result: Any, specs: Sequence[Spec], where: _errors.Where) -> list[Any]:
        """Give each operand its gradient, of its own shape and dtype, or None.

        Accepted are the structure of the values (a single value needs no tuple; lists and
        tuples are interchangeable; None for any subtree), one entry per leaf, and one entry
        per differentiable leaf.
        """
        given = iter(self._per_leaf(result, specs, where))
        operands = iter(enumerate(specs))
        gradients = []
        for static in self._statics:
            gradient = next(given)
            if static is _OPERAND:
                index, wanted = next(operands)
                if gradient is None or not wanted.differentiable:
                    gradients.append(None)
                else:
                    gradients.append(self._checked(gradient, wanted, index, where))
        return gradients

    def _per_leaf(self, result: Any, specs: Sequence[Spec], where: _errors.Where) -> list[Any]:
        values = self.treedef.children()
        if len(values) == 1:
            if values[0] == _LEAF and not isinstance(result, (list, tuple, dict)):
                return [result]  # by far the most frequent: one array in, one gradient out
            for treedef in (values[0], self.treedef):
                found: list[Any] = []
                if _match(treedef, result, found):
                    return found
        else:
            found = []
            if _match(self.treedef, result, found):
                return found

        differentiable = iter([s.differentiable for s in specs])
        wanted = [s is _OPERAND and next(differentiable) for s in self._statics]
        flat = list(result) if isinstance(result, (list, tuple)) else [result]
        nested = [isinstance(g, (list, tuple, dict)) for g in flat]
        if len(flat) == len(wanted) and not any(
            n and (w or _has_gradient(g)) for n, w, g in zip(nested, wanted, flat, strict=True)
        ):
            return flat
        if len(flat) == sum(wanted) and not any(nested):
            rest = iter(flat)
            return [next(rest) if w else None for w in wanted]
        raise _errors.wrong_structure(where, result, self, wanted)

    def _checked(self, gradient: Any, wanted: Spec, index: int, where: _errors.Where) -> Any:
        if isinstance(gradient, (jax.Array, np.ndarray, np.generic)):
            shape, dtype = gradient.shape, gradient.dtype
            if dtype == wanted.dtype and shape == wanted.shape:
                return gradient
            same_kind = any(
                is_kind(dtype, kind) and is_kind(wanted.dtype, kind)
                for kind in (jnp.floating, jnp.complexfloating)
            )
        elif isinstance(gradient, (int, float, complex)) and not isinstance(gradient, bool):
            # Python numbers are weakly typed: they take the kind that they are added to.
            shape, dtype = (), type(gradient)
            same_kind = not isinstance(gradient, complex) or jnp.issubdtype(
                wanted.dtype, jnp.complexfloating
            )
        else:
            raise _errors.wrong_kind(where, gradient, wanted, self.path(index))
        if not same_kind:
            raise _errors.wrong_kind(where, gradient, wanted, self.path(index))
        if shape != wanted.shape:
            raise _errors.wrong_shape(where, Spec(shape, dtype), wanted, self.path(index))
        return jnp.asarray(gradient, wanted.dtype)


def _has_gradient(value: Any) -> bool:
    """Tell whether a container that stands for no gradient has one in it: a wrong place."""
    return any(
        isinstance(leaf, (jax.Array, np.ndarray)) and is_kind(leaf.dtype, jnp.inexact)
        for leaf in jax.tree_util.tree_leaves(value)
    )


def _match(treedef: Any, got: Any, found: list[Any]) -> bool:
    """Append to `found` what `got` has for each leaf of `treedef`; False if it does not fit."""
    if got is None:
        found += [None] * treedef.num_leaves
        return True
    if treedef == _LEAF:
        found.append(got)
        return not isinstance(got, (list, tuple, dict))
    if treedef.num_leaves == 0:
        return not jax.tree_util.tree_leaves(got)
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


def split(values: Any, names: Sequence[str]) -> tuple[list[Any], Layout]:
    """Separate the operands among the leaves of `values` from the statics."""
    leaves, treedef = tree_flatten(values)
    operands = []
    for i, leaf in enumerate(leaves):
        if is_operand(leaf):
            operands.append(leaf)
            leaves[i] = _OPERAND
    return operands, Layout(treedef, leaves, names)


class Outputs:
    """The structure of what `f` returned, and how to call a rule for it."""

    __slots__ = ("_mirrored", "_plain", "_specs", "count", "differentiable", "traced", "treedef")

    def __init__(
        self, leaves: Sequence[Any], treedef: Any, mirrored: bool, traced: bool = True
    ) -> None:
        self.treedef = treedef
        self.traced = traced  # whether any of them was a tracer when `f` returned it
        self.count = len(leaves)
        self._mirrored = mirrored
        self._specs = [spec(leaf) for leaf in leaves]
        # Positions of the outputs that have a derivative: only these have cotangents.
        self.differentiable = [i for i, s in enumerate(self._specs) if s.differentiable]
        # Nothing has to be done to the cotangents of real outputs.
        self._plain = all(is_kind(s.dtype, jnp.floating) for s in self._specs)

    def upstreams(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return the positional arguments of `grad_fn` for the cotangents."""
        if not self._plain:
            given = iter(cotangents)
            cotangents = [
                self._conjugated(next(given), s) if s.differentiable else _zero(s)
                for s in self._specs
            ]
        if self._mirrored:
            return cotangents
        return (tree_unflatten(self.treedef, cotangents),)

    def _conjugated(self, cotangent: Any, wanted: Spec) -> Any:
        return conjugate(cotangent, wanted) if self._mirrored else cotangent


def conjugate(value: Any, wanted: Spec) -> Any:
    """Go between TensorFlow's convention for complex gradients and JAX's."""
    return jnp.conj(value) if is_kind(wanted.dtype, jnp.complexfloating) else value


def _zero(wanted: Spec) -> Any:
    """Return the upstream of an output that has no derivative: zeros of its own dtype."""
    if is_kind(wanted.dtype, jax.dtypes.extended):
        return None  # a PRNG key has no zero
    return jnp.zeros(wanted.shape, wanted.dtype)
