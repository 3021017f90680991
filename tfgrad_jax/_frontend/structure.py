"""Flatten the inputs, and `y`.

At the call, `split` takes the *operands* out of the inputs, the leaves that JAX is tracing, and
leaves the constants: all else, as it is. `Layout.join` puts them together again, with new operands.
`returned.py` reads the gradients that a rule returns for the leaves.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import (
    DictKey,
    PyTreeDef,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from .._jax.compat import cotangent_type, zeros
from .._jax.trace import is_operand
from .._jax.types import (
    Aval,
    Cotangents,
    Inert,
    Leaf,
    LeafIndex,
    Path,
    PyTree,
    is_array,
    is_differentiable,
    is_kind,
    type_of,
)

_FLOATS = (float, complex)  # JAX may differentiate them in another call


class Layout:
    """Where the leaves of a tuple of values are, and which of them are operands.

    It holds no values. By leaf, `types` has the type of an array, or None for anything else;
    `differentiable` says which arrays have gradients; and `counted` adds the Python floats: JAX may
    trace one in another call, as under `jit`, and a rule should return the same list for both.
    """

    __slots__ = (
        "_paths",
        "counted",
        "differentiable",
        "holes",
        "names",
        "omitted",
        "operands",
        "template",
        "treedef",
        "types",
    )

    def __init__(self, values: PyTree, names: Sequence[str]) -> None:
        leaves, self.treedef = tree_flatten(values)
        self.names = names
        self.operands: Sequence[LeafIndex] = [i for i, v in enumerate(leaves) if is_operand(v)]
        # The structure around the constants: among its leaves, the operands are at the holes.
        self.template = self.treedef
        self.holes: Sequence[LeafIndex] = self.operands
        self.types = [type_of(v) if is_array(v) else None for v in leaves]
        self.differentiable = [t is not None and is_differentiable(t.dtype) for t in self.types]
        both = zip(self.differentiable, leaves, strict=True)
        self.counted = [has or issubclass(type(v), _FLOATS) for has, v in both]
        # The user's own values say where their leaves are: a class of theirs may convert or look up
        # what it is made of, so that it cannot be made of anything else, such as positions.
        self._paths: list[Path] | None = None
        if not self.is_flat:
            self._paths = [path for path, _ in tree_flatten_with_path(values)[0]]
        # By position among all parameters: of a default that is left out, which leaves count.
        self.omitted: dict[int, list[bool]] = {}

    @property
    def is_flat(self) -> bool:
        """Whether the values are a tuple of leaves."""
        return self.treedef.num_nodes == self.treedef.num_leaves + 1

    def join(self, constants: Sequence[PyTree], operands: Sequence[Leaf]) -> PyTree:
        """Rebuild the values: the constants, with new operands in their places."""
        leaves = list(constants)
        for i, value in zip(self.holes, operands, strict=True):
            leaves[i] = value
        return tree_unflatten(self.template, leaves)

    def leaf_paths(self) -> list[str]:
        """Name every leaf as the user would write it, such as `params['w'][0]`."""
        if self._paths is None:
            return list(self.names)
        return [self.names[path[0].idx] + keystr(path[1:]) for path in self._paths]

    def counting(self, full: bool) -> list[LeafIndex | None]:
        """Return the positions of the leaves that count; if `full`, None for omitted ones."""
        leaves = iter(enumerate(self.counted))
        children = self.treedef.children()
        each: list[list[LeafIndex | None]]
        each = [[i for i, n in itertools.islice(leaves, c.num_leaves) if n] for c in children]
        for position, counted in self.omitted.items() if full else ():
            each.insert(position, [None] * sum(counted))
        return [*itertools.chain(*each)]

    def are_in_a_dict(self, leaves: Sequence[LeafIndex]) -> bool:
        """Return whether a list for these leaves would not tell the keys of a dict apart.

        Who wrote {"scale": ..., "bias": ...} may list its gradients in that order, and JAX has
        sorted the keys before we see them: each would be the other's.
        """
        two = itertools.pairwise([self._paths[i] for i in leaves] if self._paths else ())
        parted = (next(a for a, b in zip(*p, strict=False) if a != b) for p in two)
        return any(isinstance(key, DictKey) for key in parted)


def split(values: PyTree, names: Sequence[str]) -> tuple[list[Leaf], list[Leaf], Layout]:
    """Separate `values` into operands and constants; return both, and their layout.

    The constants have None in the places of the operands. A container without an operand is one of
    them: it stays the same object, so a list that `f` appends to is the caller's own.
    """
    layout, leaves = Layout(values, names), tree_leaves(values)
    operands = [leaves[i] for i in layout.operands]
    if not layout.is_flat:
        is_constant = lambda node: not any(map(is_operand, tree_leaves(node)))  # noqa: E731
        leaves, layout.template = tree_flatten(values, is_leaf=is_constant)
        layout.holes = [i for i, leaf in enumerate(leaves) if is_operand(leaf)]
    for i in layout.holes:
        leaves[i] = None
    return operands, leaves, layout


def counted_leaves(value: PyTree) -> list[bool]:
    """Return which leaves of a value count as inputs."""
    return Layout((value,), ()).counted


def conjugate(value: Leaf, expected: Aval) -> Leaf:
    """Convert a complex gradient from TensorFlow's convention to JAX's, or back."""
    return jnp.conj(value) if is_kind(expected.dtype, jnp.complexfloating) else value


def _as_written(value: PyTree, first: LeafIndex = 0) -> list[LeafIndex]:
    """Return the positions of the leaves in the order in which the keys of dicts were written.

    Other pytrees than dicts, lists and tuples are not looked at.
    """
    if not isinstance(value, (dict, list, tuple)):
        return list(range(first, first + len(tree_leaves(value))))
    orders: dict[Any, list[LeafIndex]] = {}
    for path, part in tree_flatten_with_path(value, is_leaf=lambda node: node is not value)[0]:
        if not path:  # of a class that JAX takes for a leaf
            return [first]
        orders[getattr(path[0], "key", path[0])] = order = _as_written(part, first)
        first += len(order)
    # Not of a dict that a class of the user's flattens in its own way.
    is_dict = isinstance(value, dict) and value.keys() == orders.keys()
    return [*itertools.chain(*(orders[k] for k in (value if is_dict else orders)))]


class Outputs(Inert):
    """The structure of what `f` returned, and how to call a rule for it."""

    __slots__ = ("_convention", "_plain", "_types", "count", "differentiable", "swapped", "treedef")

    def __init__(
        self, y: PyTree, leaves: Sequence[Leaf], treedef: PyTreeDef, convention: str
    ) -> None:
        self.treedef = treedef
        self.count = len(leaves)
        self._convention = convention
        self._types = list(map(jax.typeof, leaves))
        # Positions of the outputs that have a derivative: only these have cotangents.
        self.differentiable = [i for i, t in enumerate(self._types) if is_differentiable(t.dtype)]
        # If all outputs are real, the cotangents are the upstreams.
        self._plain = all(is_kind(t.dtype, jnp.floating) for t in self._types)
        self.swapped = self._swapped(y) if self.count > 1 and convention == "tf" else None

    def only(self, leaves: Sequence[Leaf]) -> Leaf | None:
        """Return the only one of these outputs that has a derivative; None if there are several."""
        return leaves[self.differentiable[0]] if len(self.differentiable) == 1 else None

    def cotangents(self, leaves: Sequence[Leaf]) -> list[Aval]:
        """Return the types of the cotangents of these outputs."""
        return [cotangent_type(leaves[i]) for i in self.differentiable]

    def upstreams(self, cotangents: Cotangents) -> Sequence[PyTree]:
        """Return the positional arguments of `grad_fn` for the cotangents."""
        mirrored = self._convention == "tf"
        if not self._plain:
            given = iter(cotangents)
            cotangents = [self._upstream(given, t, mirrored) for t in self._types]
        if mirrored:
            return cotangents
        return (tree_unflatten(self.treedef, cotangents),)

    def _swapped(self, y: PyTree) -> tuple[list[str], list[str]] | None:
        """Return which upstreams would be others in the order in which `f` wrote the keys.

        First what they are, then what they would be. JAX flattens a dict by its sorted keys. None
        if there are none, or if their shapes tell them apart.
        """
        moved = [(i, w) for i, w in enumerate(_as_written(y)) if i != w]
        shapes = [t.shape for t in self._types]
        if not moved or any(shapes[i] != shapes[w] for i, w in moved):
            return None
        paths = [f"y{keystr(path)}" for path, _ in tree_flatten_with_path(y)[0]]
        are, would_be = ([paths[k] for k in order] for order in zip(*moved, strict=True))
        return are, would_be

    def _upstream(self, given: Iterator[Leaf], expected: Aval, mirrored: bool) -> Any:
        if is_differentiable(expected.dtype):
            return conjugate(next(given), expected) if mirrored else next(given)
        if not mirrored:
            return np.zeros(expected.shape, jax.dtypes.float0)
        if is_kind(expected.dtype, jax.dtypes.extended):
            return None  # a PRNG key has no zero
        return zeros(expected)
