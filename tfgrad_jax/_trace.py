"""Which of JAX's traces is running: what a call may leave out, and at which level it runs.

`is_idle` runs at every call, `is_live` for every tracer that a function holds, `is_reverse` and
`below` when a function is differentiated. Every answer is a property of the trace, never of what
was called before.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ._compat import core_name, is_ref

_trace_state = core_name("get_opaque_trace_state")
_current_trace, _set_trace = core_name("find_top_trace"), core_name("set_current_trace")


def _outside() -> Any:
    """Return the trace of no transformation: a new thread has it.

    The code that imports this module may itself be transformed.
    """
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_current_trace(())))
    thread.start()
    thread.join()
    return seen[0]


_IDLE = _outside()


def _base_in_jax(cls: type) -> type:
    return [c for c in cls.__mro__ if c.__module__.partition(".")[0] == "jax"][-1]


# The base class of JAX's traces, and that of what stands for their state.
TRACES = tuple(_base_in_jax(type(f(()))) for f in (_current_trace, _trace_state))


class _Local(threading.local):
    plain: Any = None  # the trace of a value that JAX does not differentiate


_local = _Local()


def is_idle() -> bool:
    """Return whether no derivative can flow: nothing is transformed, or `plainly` runs."""
    now = _current_trace(())
    return now == _IDLE or now == _local.plain


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Compute only the value: decorated functions called directly at this trace take no rule.

    JAX does not differentiate the value of a function that has a rule. With rules, nested calls
    would be staged at every level. A `jit`, a `scan` or a `vmap` inside has its own trace, so JAX
    caches nothing that depends on this.
    """
    before, _local.plain = _local.plain, _current_trace(())
    try:
        yield
    finally:
        _local.plain = before


def is_operand(value: Any) -> bool:
    """Return whether JAX must be given a value as an operand: a tracer, or a Ref under staging."""
    return isinstance(value, Tracer) or (is_ref(value) and is_staging())


def is_live(tracer: Any) -> bool:
    """Return whether the trace of a tracer is running: no other tracer can be used."""
    trace = _current_trace(())
    while trace is not tracer._trace:
        if not hasattr(trace, "parent_trace"):
            # A shard_map does not say which trace runs around it.
            return bool(jax.sharding.get_abstract_mesh().manual_axes)
        trace = trace.parent_trace
    return True


def is_staging() -> bool:
    """Return whether JAX records operations, as under `jit` and `scan`, instead of running them."""
    trace = _current_trace(())
    while hasattr(trace, "parent_trace"):
        if type(trace) is _staging():
            return True
        trace = trace.parent_trace
    return trace != _IDLE and isinstance(jax.lax.iota(np.int32, 1), Tracer)


@functools.cache
def _staging() -> type:
    """Return the type of the trace that records operations, seen from inside a staged function."""
    seen: list[type] = []
    with jax.disable_jit(False):
        jax.eval_shape(lambda: seen.append(type(_current_trace(()))))
    return seen[0]


def is_transposed(value: Any) -> bool:
    """Return whether JAX is looking for a transpose by way of this value.

    It linearizes under such a trace, too; then the values that it knows are none of its tracers.
    """
    trace, tracer = _transposing()
    return isinstance(value, tracer) and type(_current_trace(())) is trace


@functools.cache
def _transposing() -> tuple[type, type]:
    """Return the types of the trace under which JAX transposes a function, and of its tracers."""
    seen: list[type] = []

    def probe(x: Any) -> Any:
        seen.extend((type(_current_trace(())), type(x)))
        return x

    jax.linear_transpose(probe, jax.ShapeDtypeStruct((), np.float32))
    return seen[0], seen[1]


def is_reverse(values: Sequence[Any]) -> bool:
    """Return whether values are differentiated in reverse mode alone.

    JAX 0.8 does not tell. JAX's new `custom_vjp` would stage what runs eagerly.
    """
    trace = _current_trace(())
    pair = getattr(trace, "to_primal_tangent_pair", None)
    if pair is None or not getattr(trace, "is_vjp", False):
        return False
    if getattr(jax.config, "jax_custom_vjp3", False):
        return False
    return any(pair(v)[0] is not v for v in values)


def below(primals: Sequence[Any]) -> Any:
    """Return a context in which code runs at the level of the primals, inside a jvp rule.

    Where JAX linearizes, it runs the rule under a trace to which no primal belongs, and every
    operation would go through that trace.
    """
    now, (trace, tracer) = _current_trace(()), _linearizing()
    if type(now) is trace and not any(isinstance(p, tracer) for p in primals):
        # It is speed alone: a JAX without this name is served as well.
        return contextlib.nullcontext() if _set_trace is None else _set_trace(now.parent_trace)
    return contextlib.nullcontext()


@functools.cache
def _linearizing() -> tuple[type, type]:
    """Return the types of the trace that linearizes and of its tracers, seen from inside a rule."""
    seen: list[type] = []

    @jax.custom_jvp
    def probe(x: Any) -> Any:
        return x

    @probe.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        seen.extend((type(_current_trace(())), type(tangents[0])))
        return primals[0], tangents[0]

    # However a future JAX linearizes; and staged, so that it is the same wherever it runs first.
    with contextlib.suppress(Exception):
        jax.eval_shape(lambda x: jax.linearize(probe, x)[0], jax.ShapeDtypeStruct((), np.float32))
    return (seen[0], seen[1]) if len(seen) == 2 else (types.NoneType, types.NoneType)
