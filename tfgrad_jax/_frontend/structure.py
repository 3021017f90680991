"""Flatten the inputs, and `y`.

At the call, `split` takes the *operands* out of the inputs, the leaves that JAX is tracing, and
leaves the constants: all else, as it is. `Layout.join` puts them together again, with new operands.
`returned.py` reads the gradients that a rule returns for the leaves.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import (
    PyTreeDef,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from tfgrad_jax._jax.compat import cotangent_type, zeros
from tfgrad_jax._jax.trace import is_operand
from tfgrad_jax._jax.types import (
    Aval,
    Cotangents,
    Inert,
    Leaf,
    LeafIndex,
    PyTree,
    Spec,
    is_array,
    is_kind,
    spec,
)

_FLOATS = (float, complex)  # JAX may differentiate them in another call


class Layout:
    """Where the leaves of a tuple of values are, and which of them are operands.

    `specs` has, for each leaf, the type of an array, or None for anything else; a rule gives
    gradients for the arrays. `operands` has the positions of those that JAX is tracing.
    """

    __slots__ = (
        "differentiable",
        "full",
        "holes",
        "names",
        "numbers",
        "operands",
        "specs",
        "template",
        "treedef",
        "written",
    )

    def __init__(self, treedef: PyTreeDef, leaves: Sequence[Leaf], names: Sequence[str]) -> None:
        self.treedef = treedef
        self.names = names
        self.operands: Sequence[LeafIndex] = [i for i, v in enumerate(leaves) if is_operand(v)]
        # The structure around the constants: among its leaves, the operands are at the holes.
        self.template, self.holes = treedef, self.operands
        self.specs = [spec(leaf) if is_array(leaf) else None for leaf in leaves]
        # By leaf: whether it has a gradient.
        self.differentiable = [s is not None and s.differentiable for s in self.specs]
        # And whether it is a Python number.
        self.numbers = [issubclass(type(leaf), _FLOATS) for leaf in leaves]
        # All leaves in the order in which the keys of dicts were written, if it is another one.
        self.written: Sequence[LeafIndex] | None = None
        # The layout of the values together with omitted defaults, and which of its leaves are ours.
        self.full: tuple[Layout, Sequence[LeafIndex]] | None = None

    def accept_omitted(self, values: Sequence[PyTree], omitted: Mapping[int, PyTree]) -> None:
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
            self.full = full, tree_leaves(ours)

    def join(self, constants: Sequence[PyTree], operands: Sequence[Leaf]) -> PyTree:
        """Rebuild the values: the constants, with new operands in their places."""
        leaves = list(constants)
        for i, value in zip(self.holes, operands, strict=True):
            leaves[i] = value
        return tree_unflatten(self.template, leaves)

    def rebuilt(self, values: PyTree, constants: Sequence[PyTree]) -> list[PyTree]:
        """Return the containers that `join` has made around these constants and some operands."""
        if _is_flat(self.template):
            return []
        nodes: list[PyTree] = []
        ends = set(map(id, constants))

        def is_end(node: PyTree) -> bool:  # JAX asks it for each node
            nodes.append(node)
            return id(node) in ends

        leaves = tree_leaves(values, is_leaf=is_end)
        ends.update(map(id, (values, *leaves)))
        return [node for node in nodes if id(node) not in ends]

    def leaf_paths(self) -> list[str]:
        """Name every leaf as the user would write it, such as `params['w'][0]`."""
        numbered = tree_unflatten(self.treedef, range(len(self.specs)))
        paths = []
        for keys, _ in tree_flatten_with_path(numbered)[0]:
            paths.append(self.names[keys[0].idx] + jax.tree_util.keystr(keys[1:]))
        return paths

    def shape(self, leaf: LeafIndex) -> tuple[int, ...] | None:
        """Return the shape of a gradient of a leaf; None if it never has one."""
        expected = self.specs[leaf]
        if expected is not None:
            return expected.shape
        return () if self.numbers[leaf] else None

    def counted(self) -> list[bool]:
        """Return for which leaves the short flat list has an entry (a gradient or None).

        These are the differentiable arrays and the Python floats. JAX may trace a float in another
        call, under `jit` for instance, and the rule should return the same list for both.
        """
        return [has or n for has, n in zip(self.differentiable, self.numbers, strict=True)]


def split(values: PyTree, names: Sequence[str]) -> tuple[list[Leaf], list[Leaf], Layout]:
    """Separate `values` into operands and constants; return both, and their layout.

    The constants have None in the places of the operands. A container without an operand is one of
    them: it stays the same object, so a list that `f` appends to is the caller's own.
    """
    leaves, treedef = tree_flatten(values)
    layout = Layout(treedef, leaves, names)
    layout.written = order_of_keys(values, treedef)
    operands = [leaves[i] for i in layout.operands]
    if not _is_flat(treedef):
        is_constant = lambda node: not any(map(is_operand, tree_leaves(node)))  # noqa: E731
        leaves, layout.template = tree_flatten(values, is_leaf=is_constant)
        layout.holes = [i for i, leaf in enumerate(leaves) if is_operand(leaf)]
    for i in layout.holes:
        leaves[i] = None
    return operands, leaves, layout


def _is_flat(treedef: PyTreeDef) -> bool:
    """Return whether a structure is a tuple of leaves."""
    return treedef.num_nodes == treedef.num_leaves + 1


def order_of_keys(values: PyTree, treedef: PyTreeDef) -> Sequence[LeafIndex] | None:
    """Return all leaves in the order in which the keys of dicts were written; None if it is sorted.

    JAX flattens a dict by its sorted keys. Who wrote {"scale": ..., "bias": ...} may list gradients
    in that order, and each would be the other's. A dict that JAX has rebuilt, such as an argument
    under `jit` or `grad`, has sorted keys: there nothing tells. Dicts in other pytrees than lists
    and tuples are not looked at: to flatten a model twice at each call is slow.
    """
    if _are_keys_sorted(values):
        return None
    return list(_as_written(values, tree_unflatten(treedef, range(treedef.num_leaves))))


def _are_keys_sorted(value: PyTree) -> bool:
    if isinstance(value, dict):
        is_sorted = type(value) is collections.OrderedDict or list(value) == sorted(value)
        return is_sorted and all(map(_are_keys_sorted, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(_are_keys_sorted, value))


def _as_written(value: PyTree, numbered: PyTree) -> Iterator[LeafIndex]:
    """Yield the numbers of the leaves; `numbered` has the structure of `value`."""
    if isinstance(value, dict):
        for key in value:
            yield from _as_written(value[key], numbered[key])
    elif isinstance(value, (list, tuple)):
        for part, numbers in zip(value, numbered, strict=True):
            yield from _as_written(part, numbers)
    else:
        yield from tree_leaves(numbered)


def conjugate(value: Leaf, expected: Spec) -> Leaf:
    """Convert a complex gradient from TensorFlow's convention to JAX's, or back."""
    return jnp.conj(value) if is_kind(expected.dtype, jnp.complexfloating) else value


class Outputs(Inert):
    """The structure of what `f` returned, and how to call a rule for it."""

    __slots__ = (
        "_convention",
        "_plain",
        "_specs",
        "_types",
        "count",
        "differentiable",
        "treedef",
        "written",
    )

    def __init__(
        self, y: PyTree, leaves: Sequence[Leaf], treedef: PyTreeDef, convention: str
    ) -> None:
        self.treedef = treedef
        # All leaves in the order in which the keys of dicts were written, if it is another one.
        self.written = order_of_keys(y, treedef)
        self.count = len(leaves)
        self._convention = convention
        self._specs = [spec(leaf) for leaf in leaves]
        self._types = list(map(jax.typeof, leaves))
        # Positions of the outputs that have a derivative: only these have cotangents.
        self.differentiable = [i for i, s in enumerate(self._specs) if s.differentiable]
        # If all outputs are real, the cotangents are the upstreams.
        self._plain = all(is_kind(s.dtype, jnp.floating) for s in self._specs)

    def cotangents(self, leaves: Sequence[Leaf]) -> list[Aval]:
        """Return the types of the cotangents of these outputs."""
        return [cotangent_type(leaves[i]) for i in self.differentiable]

    def upstreams(self, cotangents: Cotangents) -> Sequence[PyTree]:
        """Return the positional arguments of `grad_fn` for the cotangents."""
        mirrored = self._convention == "tf"
        if not self._plain:
            given = iter(cotangents)
            several = zip(self._specs, self._types, strict=True)
            cotangents = [self._upstream(given, s, t, mirrored) for s, t in several]
        if mirrored:
            return cotangents
        return (tree_unflatten(self.treedef, cotangents),)

    def swappable(self) -> tuple[list[str], list[str]] | None:
        """Return which upstreams would be others, of the same types, in the order of the keys.

        That is, in the order in which `f` wrote the keys of a dict: first what they are, then what
        they would be. None if there are none.
        """
        if self.written is None or self._convention != "tf":
            return None
        moved = [(i, w) for i, w in enumerate(self.written) if i != w]
        if any(self._specs[i].shape != self._specs[w].shape for i, w in moved):
            return None
        numbered = tree_unflatten(self.treedef, range(self.count))
        paths = [f"y{jax.tree_util.keystr(k)}" for k, _ in tree_flatten_with_path(numbered)[0]]
        are, would_be = ([paths[k] for k in order] for order in zip(*moved, strict=True))
        return are, would_be

    def _upstream(self, given: Iterator[Leaf], expected: Spec, aval: Aval, mirrored: bool) -> Any:
        if expected.differentiable:
            return conjugate(next(given), expected) if mirrored else next(given)
        if not mirrored:
            return np.zeros(expected.shape, jax.dtypes.float0)
        if is_kind(expected.dtype, jax.dtypes.extended):
            return None  # a PRNG key has no zero
        return zeros(aval)
