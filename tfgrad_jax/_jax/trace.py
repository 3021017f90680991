"""Which of JAX's traces is running: which work a call may skip, and at which level it runs.

`is_idle` runs at every call, and `is_around` for every tracer that a function holds. Every answer
depends on the trace alone, never on earlier calls.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import find_top_trace as _current_trace
from jax.extend.core import set_current_trace

from .compat import FORWARD, LINEARIZED, is_ref, opens, parent_of, tag_of, trace_of

# The trace that is current when no transformation is running. JAX has one for all threads. It is
# not simply the trace of this moment: a program may import this package inside a function that it
# differentiates, and then nothing would have been differentiated there.
with jax.core.eval_context():
    _IDLE = _current_trace(())


at = set_current_trace  # a context in which operations run at a trace


class _Local(threading.local):
    def __init__(self) -> None:  # runs once in each
        self.plain: Any = None  # the trace of a value that JAX does not differentiate
        self.watches: list[Any] = []  # those of `watch.py` under which code runs, from outside in
        # JAX's cache of compiled functions keeps an entry for each operation on values under each
        # trace that ever ran, and searches through them: after 6,000 traces an operation took
        # 1.2 ms instead of 0.04. So each watch is used again. Remove when JAX mends that.
        self.free: list[Any] = []


local = _Local()  # the state of one thread


class Transparent(jax.core.Trace):
    """A trace of ours, which belongs to no transformation: its operations run at its parent."""

    parent_trace: Any = None


def innermost() -> Any:
    """Return the trace of the innermost transformation that is running."""
    trace = _current_trace(())
    while isinstance(trace, Transparent):
        trace = parent_of(trace)
    return trace


def has_values(trace: Any) -> bool:
    """Return whether operations at this trace run at once."""
    while isinstance(trace, Transparent):
        trace = parent_of(trace)
    return trace == _IDLE


def differentiates(trace: Any) -> bool:
    """Return whether a trace is one at which JAX differentiates operations one by one."""
    # Where JAX transposes, there is no trace below.
    return opens(trace) and parent_of(trace) is not None


def below(derivative: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which operations run at the level below a derivative."""
    return at(parent_of(derivative))


def is_of(tracer: Any, derivative: Any) -> bool:
    """Return whether a tracer is one of a derivative."""
    return tag_of(trace_of(tracer)) is tag_of(derivative)


def is_idle() -> bool:
    """Return whether nothing can be differentiated: no transformation runs, or `plainly` does."""
    now = _current_trace(())
    return now == _IDLE or now == local.plain


def is_plain() -> bool:
    """Return whether `plainly` runs at this trace: what JAX traces may be on the way."""
    return _current_trace(()) == local.plain


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Compute only the value: decorated functions called directly at this trace run without rules.

    JAX does not differentiate the value of a function that has a rule, so it needs none of the
    rules inside. With them, it would stage nested calls again at every level. A `jit`, a `scan` or
    a `vmap` inside has its own trace, so JAX caches nothing that depends on this.
    """
    before, local.plain = local.plain, _current_trace(())
    try:
        yield
    finally:
        local.plain = before


def is_operand(value: Any) -> bool:
    """Return whether a value must be an operand for JAX: a tracer, or a Ref under staging."""
    # Not a concrete array, although JAX would take it. JAX makes zeros for the tangent of each
    # operand that is not differentiated: 64 MB of them, and 23 ms instead of 1, for an input array
    # of 64 MB. As a constant of the program it costs nothing, and `f` gets it as it is.
    return isinstance(value, Tracer) or (is_ref(value) and is_staging())


def is_around(tracer: Any) -> bool:
    """Return whether the trace of a tracer is the current one, or one around it."""
    trace, tag = _current_trace(()), tag_of(trace_of(tracer))
    while tag_of(trace) is not tag:
        below = parent_of(trace)
        if below is None:
            # Where JAX records a `shard_map`, it does not say which traces enclose the record.
            is_known = trace is not None and trace != _IDLE and not is_recording(trace)
            return not is_known and bool(jax.sharding.get_abstract_mesh().manual_axes)
        trace = below
    return True


def is_staging() -> bool:
    """Return whether JAX records operations, as under `jit` and `scan`, instead of running them."""
    trace = now = _current_trace(())
    while now is not None:
        if is_recording(now):
            return True
        trace, now = now, parent_of(now)
    return trace != _IDLE and isinstance(jax.lax.iota(np.int32, 1), Tracer)


def is_recording(trace: Any) -> bool:
    """Return whether a trace records operations, as that of `jit` and `scan` does."""
    return type(trace) is _recording()


@functools.cache
def _recording() -> type:
    """Return the type of the traces that record, read inside a function under one."""
    seen: list[type] = []
    with jax.disable_jit(False), jax.core.eval_context():
        jax.eval_shape(lambda x: (seen.append(type(_current_trace(()))), x)[1], 1.0)
    return seen[0]


def is_transposed(value: Any) -> bool:
    """Return whether JAX is transposing a function of this value, as `jax.linear_transpose` does.

    JAX also linearizes under a trace of this type; but then known values are not its tracers.
    """
    return isinstance(value, LINEARIZED) and trace_of(value) is innermost()


def is_forward(trace: Any) -> bool:
    """Return whether a trace is that of forward mode."""
    return type(trace) is FORWARD
