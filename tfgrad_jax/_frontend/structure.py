"""Flatten what goes in, and give every gradient that comes back its place.

At the call: `split` sorts the leaves of the inputs into *operands* (what JAX is tracing) and
constants (everything else, left alone); `Layout.join` puts them together again. When a rule has
run, `Layout.gradients` reads what it returned.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_structure, tree_unflatten

from tfgrad_jax import _errors
from tfgrad_jax._compat import is_ref, tangent_dtype
from tfgrad_jax._source import Where
from tfgrad_jax._types import NUMPY, Spec, is_array, is_kind, spec

_LEAF = tree_structure(0)


class Layout:
    """Where the leaves of a tuple of values are, and which of them are operands.

    `specs` has, for each leaf, the type of an array, or None for anything else; a rule gives
    gradients for the arrays. `operands` has the positions of those that JAX is tracing.
    """

    __slots__ = ("_names", "_numbers", "_settings", "operands", "specs", "treedef")

    def __init__(
        self,
        treedef: Any,
        specs: Sequence[Spec | None],
        operands: Sequence[int],
        names: Sequence[str],
        numbers: Sequence[int] = (),
        settings: Sequence[int] = (),
    ) -> None:
        self.treedef = treedef
        self.specs = specs
        self.operands = operands
        self._names = names
        self._numbers = numbers  # positions of Python numbers that have derivatives elsewhere
        self._settings = settings  # positions of what is neither an array nor a number

    def accepts(self, result: Any) -> bool:
        """Return whether `result` has the structure of the values."""
        values = self.treedef.children()
        return _match(values[0] if len(values) == 1 else self.treedef, result, [])

    def join(self, constants: Sequence[Any], operands: Sequence[Any]) -> Any:
        """Rebuild the values: the constants, with new operands in their places."""
        leaves = list(constants)
        for i, value in zip(self.operands, operands, strict=True):
            leaves[i] = value
        return tree_unflatten(self.treedef, leaves)

    def _inputs(self) -> int:
        """Return how many of the values have arrays among their leaves."""
        leaves = iter(self.specs)
        counts = [value.num_leaves for value in self.treedef.children()]
        return sum(sum(next(leaves) is not None for _ in range(n)) > 0 for n in counts)

    def leaf_paths(self) -> list[str]:
        """Name every leaf as the user would write it, such as `params['w'][0]`."""
        numbered = tree_unflatten(self.treedef, range(len(self.specs)))
        paths = []
        for keys, _ in tree_flatten_with_path(numbered)[0]:
            paths.append(self._names[keys[0].idx] + jax.tree_util.keystr(keys[1:]))
        return paths

    def gradients(self, result: Any, where: Where) -> list[Any]:
        """Give each operand its gradient, of its own shape and dtype, or None.

        Accepted are the structure of the values (a single value needs no tuple; lists and
        tuples are interchangeable; None for any subtree), one entry per leaf, and one entry
        per differentiable leaf. Those of arrays that are no operands are checked all the same.
        """
        given = self._per_leaf(result, where)
        for i, wanted in enumerate(self.specs):
            if wanted is None or given[i] is None or not wanted.differentiable:
                given[i] = None
            else:
                given[i] = self._checked(given[i], wanted, i, where)
        return [given[i] for i in self.operands]

    def _per_leaf(self, result: Any, where: Where) -> list[Any]:
        values = self.treedef.children()
        found: list[Any] = []
        if len(values) == 1:
            if values[0] == _LEAF and not isinstance(result, (list, tuple, dict)):
                return [result]  # by far the most frequent: one array in, one gradient out
            for treedef in (values[0], self.treedef):
                found = []
                if _match(treedef, result, found) and self._keeps(found):
                    return found
        elif result is None and self._inputs() > 1:
            raise _errors.bare_none(where, self._names)
        elif _match(self.treedef, result, found) and self._keeps(found):
            return found

        # A number that is not differentiated now may have been, or will be.
        wanted = [s is not None and s.differentiable for s in self.specs]
        counted = [w or i in self._numbers for i, w in enumerate(wanted)]
        flat = list(result) if isinstance(result, (list, tuple)) else [result]
        nested = [isinstance(g, (list, tuple, dict)) for g in flat]
        if len(flat) == len(wanted) and not any(
            n and (w or _has_gradient(g)) for n, w, g in zip(nested, wanted, flat, strict=True)
        ):
            misplaced = [i for i in self._settings if _has_gradient(flat[i])]
            if misplaced and any(w and g is None for w, g in zip(wanted, flat, strict=True)):
                raise _errors.gradient_of_no_array(where, self.leaf_paths()[misplaced[0]])
            return flat
        for chosen in (wanted, counted):
            if len(flat) == sum(chosen) and not any(nested):
                rest = iter(flat)
                return [next(rest) if c else None for c in chosen]
        raise _errors.wrong_structure(where, result, self, wanted)

    def _keeps(self, found: Sequence[Any]) -> bool:
        """Return whether no gradient is in the place of what has none, such as a callable.

        With a pytree among the inputs, it may be meant for an array in another form.
        """
        return all(
            s is not None or i in self._numbers or not _has_gradient(g)
            for i, (s, g) in enumerate(zip(self.specs, found, strict=True))
        )

    def _checked(self, gradient: Any, wanted: Spec, leaf: int, where: Where) -> Any:
        dtype_wanted = tangent_dtype(wanted.dtype)
        if isinstance(gradient, (jax.Array, *NUMPY)):
            shape, dtype = gradient.shape, gradient.dtype
            if dtype == dtype_wanted and shape == wanted.shape:
                return gradient
            same_kind = any(
                is_kind(dtype, kind) and is_kind(dtype_wanted, kind)
                for kind in (jnp.floating, jnp.complexfloating)
            ) or (is_kind(dtype_wanted, jax.dtypes.extended) and is_kind(dtype, jnp.floating))
        elif isinstance(gradient, (int, float, complex)) and not isinstance(gradient, bool):
            # Python numbers are weakly typed: they take the kind that they are added to.
            shape, dtype = (), type(gradient)
            same_kind = not isinstance(gradient, complex) or is_kind(
                dtype_wanted, jnp.complexfloating
            )
        else:
            raise _errors.wrong_kind(where, gradient, wanted, self.leaf_paths()[leaf])
        if not same_kind:
            raise _errors.wrong_kind(where, gradient, wanted, self.leaf_paths()[leaf])
        if shape != wanted.shape:
            raise _errors.wrong_shape(where, Spec(shape, dtype), wanted, self.leaf_paths()[leaf])
        if is_kind(dtype_wanted, jax.dtypes.extended):
            return lax.convert_element_type(jnp.asarray(gradient), dtype_wanted)
        return jnp.asarray(gradient, dtype_wanted)


def _has_gradient(value: Any) -> bool:
    """Return whether a container that stands for no gradient has one in it: a wrong place."""
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


def split(values: Any, names: Sequence[str]) -> tuple[list[Any], list[Any], Layout]:
    """Separate the leaves of `values`: return operands, constants and where both belong.

    The constants have None in the places of the operands.
    """
    leaves, treedef = tree_flatten(values)
    specs, positions, operands, numbers, settings = [], [], [], [], []
    for i, leaf in enumerate(leaves):
        specs.append(spec(leaf) if is_array(leaf) else None)
        if isinstance(leaf, Tracer) or is_ref(leaf):
            positions.append(i)
            operands.append(leaf)
            leaves[i] = None
        elif isinstance(leaf, (float, complex)):
            numbers.append(i)
        elif specs[i] is None and not isinstance(leaf, int):
            settings.append(i)
    return operands, leaves, Layout(treedef, specs, positions, names, numbers, settings)


def conjugate(value: Any, wanted: Spec) -> Any:
    """Go between TensorFlow's convention for complex gradients and JAX's."""
    return jnp.conj(value) if is_kind(wanted.dtype, jnp.complexfloating) else value


class Outputs:
    """The structure of what `f` returned, and how to call a rule for it."""

    __slots__ = ("_convention", "_plain", "_specs", "count", "differentiable", "treedef")

    def __init__(self, leaves: Sequence[Any], treedef: Any, convention: str) -> None:
        self.treedef = treedef
        self.count = len(leaves)
        self._convention = convention
        self._specs = [spec(leaf) for leaf in leaves]
        # Positions of the outputs that have a derivative: only these have cotangents.
        self.differentiable = [i for i, s in enumerate(self._specs) if s.differentiable]
        # Nothing has to be done to the cotangents of real outputs.
        self._plain = all(is_kind(s.dtype, jnp.floating) for s in self._specs)

    def upstreams(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return the positional arguments of `grad_fn` for the cotangents."""
        mirrored = self._convention == "tf"
        if not self._plain:
            given = iter(cotangents)
            cotangents = [self._upstream(given, s, mirrored) for s in self._specs]
        if mirrored:
            return cotangents
        return (tree_unflatten(self.treedef, cotangents),)

    def _upstream(self, given: Any, wanted: Spec, mirrored: bool) -> Any:
        if wanted.differentiable:
            return conjugate(next(given), wanted) if mirrored else next(given)
        if not mirrored:
            return np.zeros(wanted.shape, jax.dtypes.float0)
        if is_kind(wanted.dtype, jax.dtypes.extended):
            return None  # a PRNG key has no zero
        return jnp.zeros(wanted.shape, wanted.dtype)
