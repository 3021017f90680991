"""The types of arrays, the errors that JAX raises if a tracer has no value, and type aliases.

Modules of all groups import this one; it imports `compat` alone.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import JaxprEqn, primal_dtype_to_tangent_dtype

from .compat import NUMPY, is_ref, type_of

# JAX raises one of these if code needs the value of a tracer, as `if x > 0` does.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Inert:
    """Marks a class whose objects hold no arrays: nothing is looked for in them."""

    __slots__ = ()


class Copied:
    """Marks decorated functions, for folders that do not import their class."""

    __slots__ = ()
    _declaration: Any  # what the user has declared
    as_rule: Any  # returns this function as the rule of another one


# Names for what a type checker cannot know: it takes a tracer for a `jax.Array`, and an aval has no
# declared shape. They tell the reader what a value is, and an index into what.
Leaf: TypeAlias = Any  # of a pytree: an array, a tracer, a Ref, a number, or any other object
PyTree: TypeAlias = Any
Aval: TypeAlias = Any  # JAX's type of an array or of its tangents: shape, dtype, sharding
Dtype: TypeAlias = Any
Eqn: TypeAlias = JaxprEqn
AnyFunction: TypeAlias = Callable[..., Any]
Values: TypeAlias = Sequence[Leaf]
Cotangents: TypeAlias = Values  # one for each output that has one
Tangents: TypeAlias = Values
OperandIndex: TypeAlias = int  # into the operands of a call
Indices: TypeAlias = Sequence[OperandIndex]
LeafIndex: TypeAlias = int  # into the leaves of inputs or outputs
Dim: TypeAlias = int | None  # which axis of a value `vmap` maps; None: it is not mapped


@functools.cache
def is_differentiable(dtype: Dtype) -> bool:
    """Return whether values of a dtype have derivatives. Cached: runs at every call."""
    return primal_dtype_to_tangent_dtype(dtype) != jax.dtypes.float0


@functools.cache
def is_kind(dtype: Dtype, kind: Any) -> bool:
    """Return whether a dtype is of a kind, such as `jnp.floating`. Cached: runs at every call."""
    return jnp.issubdtype(dtype, kind)


@functools.lru_cache
def cotangent_type(aval: Aval) -> Aval:
    """Return the type of the gradients by values of a type. Cached: runs at every call."""
    return aval.to_ct_aval()


def has_gradient(leaf: Leaf) -> bool:
    """Return whether an array or a number has derivatives."""
    return is_differentiable(type_of(leaf).dtype)


def is_array(leaf: Leaf) -> bool:
    """Return whether a leaf is an array: of JAX or NumPy, a NumPy scalar, a tracer."""
    if isinstance(leaf, jax.Array) or is_ref(leaf):
        return True
    return isinstance(leaf, NUMPY) and (leaf.dtype == bool or is_kind(leaf.dtype, jnp.number))


def is_traced(values: Iterable[Leaf]) -> bool:
    """Return whether JAX is tracing any of the values."""
    return any(isinstance(v, Tracer) for v in values)
