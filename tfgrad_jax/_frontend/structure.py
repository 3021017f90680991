"""Flatten the inputs, and `y`.

At the call, `split` takes the *operands* out of the inputs, the leaves that JAX is tracing, and
leaves the constants: all else, as it is. `Layout.join` puts them together again, with new operands.
`returned.py` reads the gradients that a rule returns for the leaves.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import (
    DictKey,
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
    Path,
    PyTree,
    Spec,
    is_array,
    is_kind,
    spec,
)

_FLOATS = (float, complex)  # JAX may differentiate them in another call

# Places in which a rule need not return anything. What it returns for NONE, which the caller left
# None, and for OMITTED, a default, is ignored; what is STATIC, such as a string, has no gradient.
STATIC, NONE, OMITTED = 1, 2, 4


class Place(NamedTuple):
    """A place in the structure of the inputs for which a rule may return a gradient."""

    name: str  # as the user would write it, such as `params['w'][0]`
    path: Path
    leaf: LeafIndex | None  # None for NONE and OMITTED
    kind: int = 0


class Layout:
    """Where the leaves of a tuple of values are, and which of them are operands.

    `specs` has, for each leaf, the type of an array, or None for anything else; a rule gives
    gradients for the arrays. `operands` has the positions of those that JAX is tracing.
    """

    __slots__ = (
        "differentiable",
        "holes",
        "names",
        "numbers",
        "omitted",
        "operands",
        "specs",
        "template",
        "treedef",
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
        # By position among all parameters: the name of a default that is left out, and its kinds.
        self.omitted: dict[int, tuple[str, PyTree]] = {}

    def accept_omitted(self, names: Sequence[str], omitted: Mapping[int, PyTree]) -> None:
        """Accept gradients for omitted defaults too, and ignore them.

        The keys of `omitted` are the positions of the defaults among all parameters.
        """
        for position, default in omitted.items():
            leaves, treedef = tree_flatten(default, is_leaf=_is_none)
            counted = Layout(treedef, leaves, ()).counted()
            # No values: a default may be a tracer. Negative, where leaves have their positions.
            kinds = [
                -(OMITTED | (NONE if leaf is None else 0 if counts else STATIC))
                for leaf, counts in zip(leaves, counted, strict=True)
            ]
            marks = tree_unflatten(treedef, kinds) if kinds else -(OMITTED | NONE)
            self.omitted[position] = names[position], marks

    def join(self, constants: Sequence[PyTree], operands: Sequence[Leaf]) -> PyTree:
        """Rebuild the values: the constants, with new operands in their places."""
        leaves = list(constants)
        for i, value in zip(self.holes, operands, strict=True):
            leaves[i] = value
        return tree_unflatten(self.template, leaves)

    def places(self) -> list[Place]:
        """Return all leaves, what is None among the values, and the omitted defaults."""
        values = list(tree_unflatten(self.treedef, range(len(self.specs))))
        names, counted = list(self.names), self.counted()
        for position, (name, marks) in self.omitted.items():
            values.insert(position, marks)
            names.insert(position, name)
        places = []
        for path, leaf in tree_flatten_with_path(tuple(values), is_leaf=_is_none)[0]:
            name = names[path[0].idx] + jax.tree_util.keystr(path[1:])
            if leaf is None or leaf < 0:
                places.append(Place(name, path, None, NONE if leaf is None else -leaf))
            else:
                places.append(Place(name, path, leaf, 0 if counted[leaf] else STATIC))
        return places

    def leaf_paths(self) -> list[str]:
        """Name every leaf as the user would write it, such as `params['w'][0]`."""
        return [place.name for place in self.places() if place.leaf is not None]

    def counted(self) -> list[bool]:
        """Return for which leaves the short flat list has an entry (a gradient or None).

        These are the differentiable arrays and the Python floats. JAX may trace a float in another
        call, under `jit` for instance, and the rule should return the same list for both.
        """
        return [has or n for has, n in zip(self.differentiable, self.numbers, strict=True)]


def _is_none(value: PyTree) -> bool:
    return value is None


def are_in_a_dict(places: Sequence[Place]) -> bool:
    """Return whether a list for these places would not tell the keys of a dict apart.

    Who wrote {"scale": ..., "bias": ...} may list its gradients in that order, and JAX has sorted
    the keys before we see them: each would be the other's.
    """
    paths = [place.path for place in places if not place.kind & (STATIC | OMITTED)]
    parted = (next(a for a, b in zip(*two, strict=False) if a != b) for two in pairwise(paths))
    return any(isinstance(key, DictKey) for key in parted)


def split(values: PyTree, names: Sequence[str]) -> tuple[list[Leaf], list[Leaf], Layout]:
    """Separate `values` into operands and constants; return both, and their layout.

    The constants have None in the places of the operands. A container without an operand is one of
    them: it stays the same object, so a list that `f` appends to is the caller's own.
    """
    leaves, treedef = tree_flatten(values)
    layout = Layout(treedef, leaves, names)
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


def conjugate(value: Leaf, expected: Spec) -> Leaf:
    """Convert a complex gradient from TensorFlow's convention to JAX's, or back."""
    return jnp.conj(value) if is_kind(expected.dtype, jnp.complexfloating) else value


def _as_written(value: PyTree, numbered: PyTree) -> list[LeafIndex]:
    """Return the numbers of the leaves in the order in which the keys of dicts were written.

    `numbered` has the structure of `value`. Other pytrees than lists and tuples are not looked at.
    """
    if isinstance(value, dict):
        parts = [(value[key], numbered[key]) for key in value]
    elif isinstance(value, (list, tuple)):
        parts = list(zip(value, numbered, strict=True))
    else:
        return tree_leaves(numbered)
    return [leaf for part in parts for leaf in _as_written(*part)]


class Outputs(Inert):
    """The structure of what `f` returned, and how to call a rule for it."""

    __slots__ = (
        "_convention",
        "_plain",
        "_specs",
        "_types",
        "_written",
        "count",
        "differentiable",
        "treedef",
    )

    def __init__(
        self, y: PyTree, leaves: Sequence[Leaf], treedef: PyTreeDef, convention: str
    ) -> None:
        self.treedef = treedef
        self.count = len(leaves)
        self._convention = convention
        self._specs = [spec(leaf) for leaf in leaves]
        self._types = list(map(jax.typeof, leaves))
        # Positions of the outputs that have a derivative: only these have cotangents.
        self.differentiable = [i for i, s in enumerate(self._specs) if s.differentiable]
        # All leaves in the order in which `f` wrote the keys of dicts.
        numbered = tree_unflatten(treedef, range(self.count))
        self._written = [0] if isinstance(y, jax.Array) else _as_written(y, numbered)
        # If all outputs are real, the cotangents are the upstreams.
        self._plain = all(is_kind(s.dtype, jnp.floating) for s in self._specs)

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
            several = zip(self._specs, self._types, strict=True)
            cotangents = [self._upstream(given, s, t, mirrored) for s, t in several]
        if mirrored:
            return cotangents
        return (tree_unflatten(self.treedef, cotangents),)

    def swappable(self) -> tuple[list[str], list[str]] | None:
        """Return which upstreams would be others in the order in which `f` wrote the keys.

        First what they are, then what they would be. JAX flattens a dict by its sorted keys. None
        if there are none, or if their shapes tell them apart.
        """
        moved = [(i, w) for i, w in enumerate(self._written) if i != w]
        shapes = [s.shape for s in self._specs]
        if not moved or self._convention != "tf" or any(shapes[i] != shapes[w] for i, w in moved):
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
