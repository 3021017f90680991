"""Flatten the inputs, and assign every returned gradient to its leaf.

At the call, `split` sorts the leaves of the inputs into *operands* (those that JAX is tracing) and
constants (all others, which stay unchanged). `Layout.join` puts them together again, with new
operands. After a rule has run, `Layout.gradients` reads the gradients that it returned, in any of
the accepted formats.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import (
    all_leaves,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from tfgrad_jax._jax.compat import NUMPY, cotangent_type, explicit_sharding, tangent_dtype
from tfgrad_jax._jax.trace import is_operand
from tfgrad_jax._jax.types import Inert, Spec, is_array, is_kind, spec
from tfgrad_jax._messages import gradient_errors
from tfgrad_jax._messages.source import Where
from tfgrad_jax._messages.text import tree_of

_LEAF = tree_structure(0)
_FLOATS = (float, complex)  # JAX may differentiate them in another call


class Layout:
    """Where the leaves of a tuple of values are, and which of them are operands.

    `specs` has, for each leaf, the type of an array, or None for anything else; a rule gives
    gradients for the arrays. `operands` has the positions of those that JAX is tracing.
    """

    __slots__ = ("_classes", "_full", "differentiable", "names", "operands", "specs", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Any], names: Sequence[str]) -> None:
        self.treedef = treedef
        self.names = names
        self.operands: Sequence[int] = [i for i, leaf in enumerate(leaves) if is_operand(leaf)]
        self.specs = [spec(leaf) if is_array(leaf) else None for leaf in leaves]
        # By leaf: whether it has a gradient.
        self.differentiable = [s is not None and s.differentiable for s in self.specs]
        self._classes = [type(leaf) for leaf in leaves]
        # The layout of the values together with omitted defaults, and which of its leaves are ours.
        self._full: tuple[Layout, Sequence[int]] | None = None

    def accept_omitted(self, values: Sequence[Any], omitted: Mapping[int, Any]) -> None:
        """Accept gradients for omitted defaults too, and ignore them.

        The keys of `omitted` are the positions of the defaults among all parameters.
        """
        if omitted:
            every = list(values)
            for position, default in omitted.items():
                every.insert(position, default if tree_leaves(default) else 0.0)
            full = split(tuple(every), ())[2]
            numbered = tree_unflatten(full.treedef, range(len(full.specs)))
            ours = [v for i, v in enumerate(numbered) if i not in omitted]
            self._full = full, tree_leaves(ours)

    def join(self, constants: Sequence[Any], operands: Sequence[Any]) -> Any:
        """Rebuild the values: the constants, with new operands in their places."""
        leaves = list(constants)
        for i, value in zip(self.operands, operands, strict=True):
            leaves[i] = value
        return tree_unflatten(self.treedef, leaves)

    def leaf_paths(self) -> list[str]:
        """Name every leaf as the user would write it, such as `params['w'][0]`."""
        numbered = tree_unflatten(self.treedef, range(len(self.specs)))
        paths = []
        for keys, _ in tree_flatten_with_path(numbered)[0]:
            paths.append(self.names[keys[0].idx] + jax.tree_util.keystr(keys[1:]))
        return paths

    def counted(self) -> list[bool]:
        """Return for which leaves the short flat list has an entry (a gradient or None).

        These are the differentiable arrays and the Python floats. JAX may trace a float in another
        call, under `jit` for instance, and the rule should return the same list for both.
        """
        return [
            d or issubclass(c, _FLOATS)
            for d, c in zip(self.differentiable, self._classes, strict=True)
        ]

    def gradients(self, result: Any, where: Where) -> list[Any]:
        """Give each operand its gradient, of its own shape and dtype, or None.

        Accepted are the structure of the values (a single value needs no tuple; lists and
        tuples are interchangeable; None for any subtree), one entry per leaf, and one entry
        per differentiable leaf. Gradients for arrays that are not operands are checked, too.
        """
        given = self.read(result)
        if given is None:
            raise gradient_errors.wrong_structure(where, result, self)
        if where.of == "variable" and _has_keys(self.treedef):
            every, (value,) = self.treedef, self.treedef.children()
            if not any(_match(treedef, result, []) for treedef in (value, every)):  # a flat list
                raise gradient_errors.keys_without_names(where, tree_of(value))
        has = self.differentiable
        # This may be a flat list for the arrays alone. Then an entry that we have read as the
        # gradient of a number may be meant for an array.
        flat = (
            isinstance(result, (list, tuple))
            and len(result) == sum(has)
            and all_leaves(result, is_leaf=lambda g: g is None)
        )
        misplaced = [
            i
            for i, (h, c) in enumerate(zip(has, self._classes, strict=True))
            if not h and (flat or not issubclass(c, _FLOATS)) and _has_gradient(given[i])
        ]
        if misplaced and any(h and g is None for h, g in zip(has, given, strict=True)):
            raise gradient_errors.gradient_of_no_array(where, self.leaf_paths()[misplaced[0]])
        given = [g if h else None for h, g in zip(has, given, strict=True)]
        for i, gradient in enumerate(given):
            if gradient is not None:
                self._check(gradient, i, given, where)
        return [_cast(given[i], self.specs[i]) for i in self.operands]

    def read(self, result: Any) -> list[Any] | None:
        """Return the gradient for each leaf, or None if the result has no accepted format."""
        found = self._read(result)
        if found is None and self._full is not None:
            full, ours = self._full
            found = full._read(result)
            others = [i for i, counts in enumerate(full.counted()) if i not in ours and not counts]
            if found is None or any(_has_gradient(found[i]) for i in others):
                return None
            return [found[i] for i in ours]
        return found

    def _read(self, result: Any) -> list[Any] | None:
        values = self.treedef.children()
        if values == [_LEAF] and not isinstance(result, (list, tuple, dict)):
            return [result]  # the common case: one array in, one gradient out
        for treedef in (*values[: len(values) == 1], self.treedef):
            found: list[Any] = []
            if _match(treedef, result, found) and self._keeps(found):
                return found
        counted = self.counted()
        flat = list(result) if isinstance(result, (list, tuple)) else [result]
        nested = [g is not None and not all_leaves([g]) for g in flat]
        if len(flat) == len(counted) and not any(
            n and _has_gradient(g) for n, g in zip(nested, flat, strict=True)
        ):
            # A tree of None may stand for the inputs, beside a None for an omitted default.
            return [
                None if n and not tree_leaves(g) else g for n, g in zip(nested, flat, strict=True)
            ]
        if len(flat) == sum(counted) and not any(nested):
            rest = iter(flat)
            return [next(rest) if is_counted else None for is_counted in counted]
        return None

    def _keeps(self, found: Sequence[Any]) -> bool:
        """Return whether no gradient is in the place of a leaf without one, such as a callable.

        If there is one, the result may have another format, in which it belongs to an array.
        """
        return all(
            s is not None or issubclass(c, _FLOATS) or not _has_gradient(g)
            for s, c, g in zip(self.specs, self._classes, found, strict=True)
        )

    def _check(self, gradient: Any, leaf: int, given: Sequence[Any], where: Where) -> None:
        """Raise unless a gradient has the kind and the shape of its leaf."""
        expected: Any = self.specs[leaf]
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
        path = self.leaf_paths()[leaf] if not same_kind or shape != expected.shape else ""
        if not same_kind:
            raise gradient_errors.wrong_kind(where, gradient, expected, path)
        if shape != expected.shape:
            others = [
                p
                for p, s, g in zip(self.leaf_paths(), self.specs, given, strict=True)
                if s is not None and getattr(g, "shape", s.shape) != s.shape == shape
            ]
            idle = leaf not in self.operands
            raise gradient_errors.wrong_shape(where, shape, expected.shape, path, others, idle)
        if expected.sharding is not None and _axes(explicit_sharding(gradient)) != _axes(
            expected.sharding
        ):
            raise gradient_errors.wrong_sharding(where, gradient, expected, self.leaf_paths()[leaf])


def _axes(sharding: Any) -> tuple[Any, ...]:
    return tuple(sharding) if sharding and any(sharding) else ()


def _cast(gradient: Any, expected: Any) -> Any:
    if gradient is None:
        return None
    dtype = tangent_dtype(expected.dtype)
    if getattr(gradient, "dtype", None) == dtype:  # the common case
        return gradient
    return lax.convert_element_type(gradient, dtype)


def _has_gradient(value: Any) -> bool:
    """Return whether the entry for a leaf without a gradient holds one, which is misplaced."""
    return any(
        isinstance(leaf, (jax.Array, np.ndarray)) and is_kind(leaf.dtype, jnp.inexact)
        for leaf in tree_leaves(value)
    )


def _has_keys(treedef: Any) -> bool:
    """Return whether there is a dict with several keys, which a flat list would not name."""
    kind, _ = treedef.node_data() or (None, None)
    children = treedef.children()
    is_dict = kind is not None and issubclass(kind, dict) and len(children) > 1
    return is_dict or any(map(_has_keys, children))


def _match(treedef: Any, got: Any, found: list[Any]) -> bool:
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


def split(values: Any, names: Sequence[str]) -> tuple[list[Any], list[Any], Layout]:
    """Separate the leaves of `values`: return operands, constants, and the layout of both.

    The constants have None in the places of the operands.
    """
    leaves, treedef = tree_flatten(values)
    layout = Layout(treedef, leaves, names)
    operands = [leaves[i] for i in layout.operands]
    for i in layout.operands:
        leaves[i] = None
    return operands, leaves, layout


def conjugate(value: Any, expected: Spec) -> Any:
    """Convert a complex gradient from TensorFlow's convention to JAX's, or back."""
    return jnp.conj(value) if is_kind(expected.dtype, jnp.complexfloating) else value


class Outputs(Inert):
    """The structure of what `f` returned, and how to call a rule for it."""

    __slots__ = ("_convention", "_plain", "_specs", "count", "differentiable", "treedef")

    def __init__(self, leaves: Sequence[Any], treedef: Any, convention: str) -> None:
        self.treedef = treedef
        self.count = len(leaves)
        self._convention = convention
        self._specs = [spec(leaf) for leaf in leaves]
        # Positions of the outputs that have a derivative: only these have cotangents.
        self.differentiable = [i for i, s in enumerate(self._specs) if s.differentiable]
        # If all outputs are real, the cotangents are the upstreams.
        self._plain = all(is_kind(s.dtype, jnp.floating) for s in self._specs)

    def cotangents(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the types of the cotangents of these outputs."""
        return [cotangent_type(leaves[i]) for i in self.differentiable]

    def upstreams(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return the positional arguments of `grad_fn` for the cotangents."""
        mirrored = self._convention == "tf"
        if not self._plain:
            given = iter(cotangents)
            cotangents = [self._upstream(given, s, mirrored) for s in self._specs]
        if mirrored:
            return cotangents
        return (tree_unflatten(self.treedef, cotangents),)

    def _upstream(self, given: Any, expected: Spec, mirrored: bool) -> Any:
        if expected.differentiable:
            return conjugate(next(given), expected) if mirrored else next(given)
        if not mirrored:
            return np.zeros(expected.shape, jax.dtypes.float0)
        if is_kind(expected.dtype, jax.dtypes.extended):
            return None  # a PRNG key has no zero
        return jnp.zeros(expected.shape, expected.dtype)
