"""What differs between versions of JAX, or takes a detour to ask, in one place.

What differs has the condition for its removal beside it. `is_idle` is asked at every call;
`is_reverse` and `below` when a program is differentiated; `tangent_dtype` and `varying` for every
operand and gradient.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as extend
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad


def _name(name: str) -> Any:
    # In `jax.core` before JAX 0.9. Remove when that is the oldest supported.
    found = getattr(extend, name, None)
    return getattr(jax.core, name, None) if found is None else found


_trace_state = _name("get_opaque_trace_state")
_to_tangent_dtype = _name("primal_dtype_to_tangent_dtype")
_current_trace, _set_trace = _name("find_top_trace"), _name("set_current_trace")
_unmapped_type = _name("unmapped_aval")
_now = _current_trace or _trace_state  # the trace that runs, or what stands for it


def _outside() -> Any:
    """Return the trace of no transformation: that of a new thread.

    The code that imports this may be transformed.
    """
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_now(())))
    thread.start()
    thread.join()
    return found[0]


_IDLE = _outside()


class _Local(threading.local):
    plain: Any = None  # a trace of what is never differentiated


_local = _Local()


def is_idle() -> bool:
    """Return whether no derivative can flow: no transformation is running, or one of `plainly`."""
    now = _now(())
    return now == _IDLE or now == _local.plain


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Run what is never differentiated, the value of a function that has a rule of its own.

    What runs at the level of the trace of now is part of it, and takes no rule. That is a property
    of the trace, not of the moment: a `jit`, a `scan` or a `vmap` inside has a trace of its own,
    and what JAX remembers of it is as it is elsewhere. It is speed alone: nested calls would be
    staged with their rules at every level.
    """
    before, _local.plain = _local.plain, _now(())
    try:
        yield
    finally:
        _local.plain = before


@functools.cache
def tangent_dtype(dtype: Any) -> Any:
    """Return the dtype of derivatives of values of a dtype: float0 where there are none."""
    return _to_tangent_dtype(dtype)


@functools.cache
def _linearizing() -> tuple[type, type]:
    """Return the types of the trace that linearizes, and of its tracers.

    They are seen from inside the rule of a function that is being linearized.
    """
    found: list[type] = []

    @jax.custom_jvp
    def probe(x: Any) -> Any:
        return x

    @probe.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        found.extend((type(_current_trace(())), type(tangents[0])))
        return primals[0], tangents[0]

    # In whatever way a future JAX linearizes; and traced, so that it is the same wherever it is
    # asked first.
    with contextlib.suppress(Exception):
        jax.eval_shape(lambda x: jax.linearize(probe, x)[0], jax.ShapeDtypeStruct((), np.float32))
    return (found[0], found[1]) if len(found) == 2 else (types.NoneType, types.NoneType)


def is_live(tracer: Any) -> bool:
    """Return whether the trace of a tracer is running now: nothing can be done with others."""
    trace = _current_trace(())
    while trace is not tracer._trace:
        if not hasattr(trace, "parent_trace"):
            return trace != _IDLE  # a shard_map does not tell what runs around it
        trace = trace.parent_trace
    return True


def tangent_type(value: Any) -> Any:
    """Return the type of the tangents of a value."""
    return jax.typeof(value).to_tangent_aval()


def cotangent_type(value: Any) -> Any:
    """Return the type of the cotangents of a value."""
    aval = jax.typeof(value)
    return aval.to_ct_aval() if hasattr(aval, "to_ct_aval") else aval


def batched_type(aval: Any, axis: Any) -> Any:
    """Return the type of values with one more axis in front, that of a `vmap`."""
    return _unmapped_type(axis.size, 0, aval, axis.explicit_mesh_axis)


def below(primals: Sequence[Any]) -> Any:
    """Return a context in which code runs at the level of the primals, inside a jvp rule.

    Where JAX linearizes, it runs the rule under a trace to which no primal belongs, and every
    operation would go through that. Where a name is missing, this does nothing: code is slower, and
    what it computes from values has none.
    """
    if _current_trace is not None and _set_trace is not None:
        now, (trace, tracer) = _current_trace(()), _linearizing()
        if type(now) is trace and not any(isinstance(p, tracer) for p in primals):
            return _set_trace(now.parent_trace)
    return contextlib.nullcontext()


def is_reverse(values: Sequence[Any]) -> bool:
    """Return whether values are differentiated now, and in reverse mode alone.

    JAX 0.8 does not tell: where names are missing, it is not known. JAX's new `custom_vjp` would
    stage what runs eagerly.
    """
    trace = _current_trace and _current_trace(())
    pair = getattr(trace, "to_primal_tangent_pair", None)
    if pair is None or not getattr(trace, "is_vjp", False):
        return False
    if getattr(jax.config, "jax_custom_vjp3", False):
        return False
    return any(pair(v)[0] is not v for v in values)


# Before JAX 0.12, the derivative of a scan takes what is below the custom_jvp of what it calls.
# Remove when that is the oldest supported.
KEEPS_CUSTOM_JVP = jax.__version_info__ >= (0, 12)


def can_transpose(primitive: Any) -> bool:
    """Return whether JAX can transpose an operation, which is linear then."""
    return primitive in ad.primitive_transposes


def is_staging() -> bool:
    """Return whether operations are being recorded, as under `jit` and `scan`, and not run."""
    return isinstance(jax.lax.iota(np.int32, 1), Tracer)


def is_ref(value: Any) -> bool:
    """Return whether a value is a mutable array."""
    return is_ref_type(value.aval) if isinstance(value, Tracer) else isinstance(value, _REF)


def is_ref_type(aval: Any) -> bool:
    """Return whether a type is that of mutable arrays: it has the type of their contents."""
    return hasattr(aval, "inner_aval")


_REF: Any = jax.Ref


def instantiate(value: Any) -> Any:
    """Return a tangent or cotangent as an array, zeros if it is a symbolic zero."""
    if isinstance(value, SymbolicZero):
        aval: Any = value.aval
        return ad.instantiate_zeros(ad.Zero(aval))
    return value


def varying(value: Any) -> frozenset[Any]:
    """Return the mesh axes of a `shard_map` along which a value differs between devices."""
    return axes_of(jax.typeof(value)) if isinstance(value, Tracer) else frozenset()


def axes_of(aval: Any) -> frozenset[Any]:
    """Return the mesh axes of a `shard_map` along which values of a type differ."""
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    # Remove when the oldest supported JAX has the other name.
    return frozenset(getattr(aval, "vma", ()))


def summed_over(gradient: Any, axes: frozenset[Any]) -> Any:
    """Sum a gradient over axes along which it varies and its input does not.

    Of an input that all devices share, each has computed its own part: JAX adds these up when it
    differentiates its own operations, and so does this.
    """
    return jax.lax.psum(gradient, tuple(axes)) if axes else gradient


def vary(value: Any, axes: frozenset[Any]) -> Any:
    """Return a value as one that varies along these axes."""
    if not axes:
        return value
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(value, tuple(axes), to="varying")
    return jax.lax.pvary(value, tuple(axes))  # pyrefly: ignore  # of JAX 0.8
