"""The types of arrays and of wrappers, and the errors that JAX raises if a tracer has no value.

Modules of all groups import this one; it imports `compat` alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.errors import (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
)
from jax.extend.core import JaxprEqn
from jax.tree_util import KeyPath

from .compat import NUMPY, Sharding, explicit_sharding, is_ref, tangent_dtype, varying

# JAX raises one of these if code needs the value of a tracer, as `if x > 0` does.
NEEDS_VALUES = (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
)

_OF_PYTHON = (*NUMPY, int, float, complex)


class Inert:
    """Marks a class whose objects hold no arrays: nothing is looked for in them."""

    __slots__ = ()


class Copied:
    """Marks a class whose objects are copied by their attributes, whatever it says of pickling."""

    __slots__ = ()
    _declaration: Any  # what the user has declared


class Spec(NamedTuple):
    """The type of an array, as JAX sees it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[Any] = frozenset()  # of a `shard_map`: the value varies along these
    sharding: Sharding | None = None  # over an explicit mesh

    @property
    def differentiable(self) -> bool:
        return is_differentiable(self.dtype)


@functools.cache
def is_differentiable(dtype: Any) -> bool:
    """Return whether values of a dtype have derivatives. Cached: runs at every call."""
    return tangent_dtype(dtype) != jax.dtypes.float0


@functools.cache
def is_kind(dtype: Any, kind: Any) -> bool:
    """Return whether a dtype is of a kind, such as `jnp.floating`. Cached: runs at every call."""
    return jnp.issubdtype(dtype, kind)


def spec(leaf: Any) -> Spec:
    """Return the type of an array, a tracer or a Python number, as JAX sees it."""
    if isinstance(leaf, _OF_PYTHON):  # without x64, float64 becomes float32
        return Spec(np.shape(leaf), jnp.result_type(leaf))
    if not isinstance(leaf, Tracer):  # concrete: not differentiated
        return Spec(leaf.shape, leaf.dtype)
    return Spec(leaf.shape, leaf.dtype, varying(leaf), explicit_sharding(leaf))


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array: of JAX or NumPy, a NumPy scalar, a tracer."""
    if isinstance(leaf, jax.Array) or is_ref(leaf):
        return True
    return isinstance(leaf, NUMPY) and (leaf.dtype == bool or is_kind(leaf.dtype, jnp.number))


@functools.cache
def is_concrete(kind: type) -> bool:
    """Return whether a type is one of arrays that are no tracers. Cached: runs at every call."""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def is_traced(values: Any) -> bool:
    """Return whether JAX is tracing any of the values."""
    return any(isinstance(v, Tracer) for v in values)


# Names for what a type checker cannot know: it takes a tracer for a `jax.Array`, and an aval has no
# declared shape. They tell the reader what a value is, and an index into what.
Leaf: TypeAlias = Any  # of a pytree: an array, a tracer, a Ref, a number, or any other object
PyTree: TypeAlias = Any
Aval: TypeAlias = Any  # JAX's type of an array or of its tangents: shape, dtype, sharding
Dtype: TypeAlias = Any
Eqn: TypeAlias = JaxprEqn
Path: TypeAlias = KeyPath
AnyFunction: TypeAlias = Callable[..., Any]
Cotangents: TypeAlias = Sequence[Leaf]  # one for each output that has one
Tangents: TypeAlias = Sequence[Leaf]
OperandIndex: TypeAlias = int  # into the operands of a call
LeafIndex: TypeAlias = int  # into the leaves of inputs or outputs
Dim: TypeAlias = int | None  # which axis of a value `vmap` maps; None: it is not mapped
