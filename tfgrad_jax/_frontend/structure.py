"""Flatten the inputs, and `y`.

At the call, `split` takes the *operands* out of the inputs, the leaves that JAX is tracing, and
leaves the constants: all else, as it is. `Layout.join` puts them together again, with new operands.
`returned.py` reads the gradients that a rule returns for the leaves.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
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

from .._jax.compat import type_of, zeros
from .._jax.trace import is_operand
from .._jax.types import (
    Aval,
    Cotangents,
    Inert,
    Leaf,
    LeafIndex,
    PyTree,
    Values,
    is_array,
    is_differentiable,
    is_kind,
)


class Layout:
    """Where the leaves of a tuple of values are, and which of them are operands.

    It holds no values. By leaf, `types` has the type of an array, or None for anything else;
    `differentiable` says which arrays have gradients; and `counted` adds the Python floats: JAX may
    trace one in another call, as under `jit`, and a rule should return the same list for both.
    """

    def __init__(
        self, values: PyTree, names: Sequence[str], types: Sequence[Aval] | None = None
    ) -> None:
        """Of leaves that all are operands, `types` are those at the call."""
        # The user's own values say where their leaves are: a class of theirs may convert or look up
        # what it is made of, so that it cannot be made of anything else, such as positions.
        flat, self.treedef = tree_flatten_with_path(values)
        self._paths, leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
        self.names = names
        every = enumerate(leaves)
        self.operands = [i for i, v in every if types is not None or is_operand(v)]
        # The structure around the constants: among its leaves, the operands are at the holes.
        self.template = self.treedef
        self.holes = self.operands
        if types is None:
            types = [type_of(v) if is_array(v) else None for v in leaves]
        self.types = types
        self.differentiable = [t is not None and is_differentiable(t.dtype) for t in self.types]
        both = zip(self.differentiable, leaves, strict=True)
        self.counted = [has or issubclass(type(v), (float, complex)) for has, v in both]
        # Of all parameters, with the defaults that are left out; `given` are the leaves of others.
        self.full: Layout | None = None
        self.given: Sequence[LeafIndex] = range(len(leaves))

    @property
    def is_flat(self) -> bool:
        """Whether the values are a tuple of leaves."""
        return self.treedef.num_nodes == self.treedef.num_leaves + 1

    def join(self, constants: Sequence[PyTree], operands: Values) -> PyTree:
        """Rebuild the values: the constants, with new operands in their places."""
        leaves = list(constants)
        for i, value in zip(self.holes, operands, strict=True):
            leaves[i] = value
        return tree_unflatten(self.template, leaves)

    def leaf_paths(self) -> list[str]:
        """Name every leaf as the user would write it, such as `params['w'][0]`."""
        return [self.names[path[0].idx] + keystr(path[1:]) for path in self._paths]

    def operand_paths(self) -> list[str]:
        paths = self.leaf_paths()
        return [paths[i] for i in self.operands]

    def add_omitted(self, values: Sequence[PyTree], defaults: Mapping[int, PyTree]) -> None:
        """Note the defaults that are left out, by their positions among all parameters."""
        every = list(values)
        for i, default in defaults.items():
            every.insert(i, default)
        self.full = Layout((*every,), ())
        sizes = [child.num_leaves for child in self.full.treedef.children()]
        owners = [i for i, size in enumerate(sizes) for _ in range(size)]
        self.full.given = [leaf for leaf, i in enumerate(owners) if i not in defaults]

    def are_in_a_dict(self, leaves: Sequence[LeafIndex]) -> bool:
        """Return whether a list for these leaves would not tell the keys of a dict apart.

        Who wrote {"scale": ..., "bias": ...} may list its gradients in that order, and JAX has
        sorted the keys before we see them: each would be the other's.
        """
        two = itertools.pairwise([self._paths[i] for i in leaves])
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


def conjugate(value: Leaf, expected: Aval) -> Leaf:
    """Convert a complex gradient from TensorFlow's convention to JAX's, or back."""
    return jnp.conj(value) if is_kind(expected.dtype, jnp.complexfloating) else value


def _as_written(y: PyTree) -> PyTree:
    """Return `y` with the keys of dicts in the order in which they were written.

    Of its own classes JAX knows the order, and of the user's: these are not looked at.
    """
    if type(y) in (dict, collections.defaultdict):
        return collections.OrderedDict((key, _as_written(part)) for key, part in y.items())
    return [*map(_as_written, y)] if type(y) in (list, tuple) else y


class Outputs(Inert):
    """The structure of what `f` returned, and how to call a rule for it."""

    def __init__(self, y: PyTree, leaves: Values, treedef: PyTreeDef, convention: str) -> None:
        self.treedef = treedef
        self.count = len(leaves)
        self._convention = convention
        self._types = list(map(jax.typeof, leaves))
        # Positions of the outputs that have a derivative: only these have cotangents.
        self.differentiable = [i for i, t in enumerate(self._types) if is_differentiable(t.dtype)]
        self.swapped = self._swapped(y) if self.count > 1 and convention == "tf" else None

    def only(self, leaves: Values) -> Leaf | None:
        """Return the only one of these outputs that has a derivative; None if there are several."""
        return leaves[self.differentiable[0]] if len(self.differentiable) == 1 else None

    def cotangents(self, leaves: Values) -> list[Aval]:
        """Return the types of the cotangents of these outputs."""
        return [jax.typeof(leaves[i]).to_ct_aval() for i in self.differentiable]

    def upstreams(self, cotangents: Cotangents) -> Sequence[PyTree]:
        """Return the positional arguments of `grad_fn` for the cotangents."""
        is_tf, given, dys = self._convention == "tf", iter(cotangents), list[Any]()
        for t in self._types:
            if is_differentiable(t.dtype):
                dys.append(conjugate(next(given), t) if is_tf else next(given))
            elif is_tf:
                dys.append(None if is_kind(t.dtype, jax.dtypes.extended) else zeros(t))  # of a key
            else:
                dys.append(np.zeros(t.shape, jax.dtypes.float0))
        return dys if is_tf else (tree_unflatten(self.treedef, dys),)

    def _swapped(self, y: PyTree) -> tuple[list[str], list[str]] | None:
        """Return which upstreams would be others in the order in which `f` wrote the keys.

        First what they are, then what they would be. JAX flattens a dict by its sorted keys.
        """
        paths, written = (
            [path for path, _ in tree_flatten_with_path(tree)[0]] for tree in (y, _as_written(y))
        )
        moved = [(a, b) for a, b in zip(paths, written, strict=True) if a != b]
        if not moved:
            return None
        are, would_be = ([f"y{keystr(p)}" for p in each] for each in zip(*moved, strict=True))
        return are, would_be
