"""What JAX does not document: each of its attributes that we read in one function.

And workarounds for its versions, each with the condition for its removal. `tests/test_compat.py`
has a test for each function, by its name, and finds any other module that reads such an attribute.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax

if jax.__version_info__ < (0, 10, 2):  # this module is imported before what an older one lacks
    raise ImportError(f"tfgrad_jax needs jax 0.10.2 or newer, found {jax.__version__}.")

import jax.extend.core as extend
import numpy as np
from jax.core import Tracer
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters import ad, partial_eval

_REF: Any = jax.Ref
# The tracers of a function that JAX linearizes or transposes.
LINEARIZED = partial_eval.JaxprTracer
FORWARD = ad.JVPTrace  # the traces of forward mode
# JAX's code that differentiates operations, and that which runs an operation under a trace.
DIFFERENTIATES, BINDS = inspect.getfile(ad.JVPTrace), inspect.getfile(extend.Primitive.bind)
# Whether the derivative of a scan keeps the custom_jvp of what the scan calls. Before JAX 0.12, the
# second derivative drops it and differentiates the function below.
KEEPS_CUSTOM_JVP = jax.__version_info__ >= (0, 12)
NUMPY = (np.ndarray, np.generic)


def zeros(aval: Any) -> Any:
    """Return zeros of a tangent or cotangent type, with its sharding and memory space."""
    made = ad.instantiate_zeros(ad.Zero(aval))
    # JAX ignores the memory space of the type.
    is_there = jax.typeof(made).memory_space == aval.memory_space
    return made if is_there else jax.device_put(made, aval.memory_space)


def batched_type(aval: Any, axis: Any) -> Any:
    """Return a type with one more axis in front, the axis that `vmap` maps."""
    return extend.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis)


def mapped_over(axis: Any) -> dict[str, Any]:
    """Return the options with which `jax.vmap` maps over an axis again."""
    return {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}


def broadcast(value: Any, axis: Any) -> Any:
    """Return a value with one more axis in front, the axis that `vmap` maps, laid out as it is."""
    new = jax.numpy.broadcast_to(value, (axis.size, *jax.numpy.shape(value)))
    if axis.explicit_mesh_axis is None:
        return new
    return jax.sharding.reshard(new, batched_type(jax.typeof(value), axis).sharding)


def can_transpose(primitive: Any) -> bool:
    """Return whether JAX can transpose an operation; if so, it is linear."""
    return primitive in ad.primitive_transposes


def can_differentiate(primitive: Any) -> bool:
    """Return whether JAX knows the derivative of an operation."""
    return primitive in ad.primitive_jvps


def is_ref(value: Any) -> bool:
    """Return whether a value is a mutable array."""
    if isinstance(value, Tracer):
        return is_ref_type(value.aval)
    return issubclass(type(value), _REF)  # `isinstance` calls the metaclass, which is slow


def is_ref_type(aval: Any) -> bool:
    """Return whether a type is one of mutable arrays: only these have an inner type."""
    return hasattr(aval, "inner_aval")


def type_of(value: Any) -> Any:
    """Return the type of an array or a number; of a Ref, that of the array in it."""
    aval: Any = jax.typeof(value)
    return getattr(aval, "inner_aval", aval)


def varying(aval: Any) -> frozenset[Any]:
    """Return the mesh axes of a `shard_map` along which values of a type differ between devices."""
    return frozenset(aval.manual_axis_type.varying)


def explicit_sharding(value: Any) -> Any:
    """Return the spec of an array, or of a type, over an explicit mesh; None if it names no axis.

    A spec that has `unreduced` or `reduced` axes cannot be unpacked, so its parts are asked for by
    their names.
    """
    aval: Any = jax.typeof(value) if isinstance(value, jax.Array) else value
    sharding: Any = getattr(aval, "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    if jax.sharding.AxisType.Explicit not in kinds:
        return None
    spec = sharding.spec
    return spec if any(spec.partitions) or spec.unreduced or spec.reduced else None


def weakly_typed(array: Any) -> Any:
    """Return an array with the type of a Python number, which adopts the dtype of others.

    JAX has no function for that.
    """
    types = {"new_dtype": array.dtype, "weak_type": True, "sharding": None}
    return convert_element_type_p.bind(array, **types)


def is_partial_sum(value: Any) -> bool:
    """Return whether devices hold parts of a sum, of the value or of its cotangents."""
    aval: Any = jax.typeof(value)
    # Over manual axes, those of a `shard_map`, a newer JAX keeps them in a type of their own.
    specs = getattr(aval.sharding, "spec", None), getattr(aval, "manual_axis_type", None)
    return any(getattr(s, kind, None) for s in specs for kind in ("unreduced", "reduced"))


# --- traces ---------------------------------------------------------------------------------------


def trace_of(tracer: Any) -> Any:
    """Return the trace of a tracer."""
    return tracer._trace


def parent_of(trace: Any) -> Any:
    """Return the trace one level down; None: JAX does not say, or there is none."""
    return getattr(trace, "parent_trace", None)


def tag_of(trace: Any) -> Any:
    """Return what the traces of one transformation share.

    Inside a `shard_map`, each transformation around it has another trace, with the same tag.
    """
    return getattr(trace, "tag", trace)


def opens(trace: Any) -> bool:
    """Return whether `primal` opens the tracers of a trace: it is one of a derivative."""
    return hasattr(trace, "to_primal_tangent_pair")


def primal(value: Any, derivative: Any) -> Any:
    """Return the value at the level below a derivative."""
    is_its = isinstance(value, Tracer) and tag_of(trace_of(value)) is tag_of(derivative)
    return derivative.to_primal_tangent_pair(value)[0] if is_its else value


def concrete(value: Any) -> Any:
    """Return the value that a tracer stands for, if there is one; else what is given."""
    found = value.to_concrete_value() if isinstance(value, Tracer) else None
    return value if found is None else found


def is_valid(tracer: Any) -> bool:
    """Return whether JAX has not ended the trace of a tracer. Not each trace says so."""
    return tracer._trace.is_valid()


@contextlib.contextmanager
def revived(derivative: Any) -> Iterator[None]:
    """Let tracers of a derivative that is over count as running.

    A rule that runs eagerly may read a weight of an object, `self.w`: a tracer that JAX refuses by
    then, although its value is there. This is the only private attribute that we write; if it is
    gone, such a rule raises JAX's error for a tracer that is over.
    """
    was, derivative._invalidated = derivative._invalidated, False
    try:
        yield
    finally:
        derivative._invalidated = was


def is_reverse(trace: Any) -> bool:
    """Return whether a trace is that of reverse mode.

    Not with JAX's new `custom_vjp`, which would stage code that now runs eagerly.
    """
    return getattr(trace, "is_vjp", False) and not getattr(jax.config, "jax_custom_vjp3", 0)
