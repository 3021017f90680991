"""Why code gets a tracer where it needs a value: which transformation traces, or what of ours.

The types of the traces tell: each is learned once, inside the transformation. Only messages ask.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import find_top_trace as _current_trace

from .trace import derivatives, type_of_trace

DERIVATIVE, VMAP, SHARD_MAP = "a derivative", "vmap", "shard_map"


Why: TypeAlias = Callable[[], str] | None  # says why we trace; None: for a trace of the user's


class _Noted(NamedTuple):
    trace: Any
    is_ours: bool  # whether this package has started it; else a decorated function is called there
    why: Why


class _Local(threading.local):
    noted: tuple[_Noted, ...] = ()  # from the outside in


_local = _Local()


class noting:  # noqa: N801  # a context, faster than that of a generator: it runs at every call
    """Note why this package has started the current trace, or that a function is called there."""

    def __init__(self, why: Why = None, *, is_ours: bool = True, trace: Any = None) -> None:
        self._why, self._is_ours, self._trace = why, is_ours, trace

    def __enter__(self) -> None:
        self._before, trace = _local.noted, self._trace or _current_trace(())
        _local.noted = (*self._before, _Noted(trace, self._is_ours, self._why))

    def __exit__(self, *_: object) -> None:
        _local.noted = self._before


def why_traced(tracer: Any, in_branch: bool) -> tuple[str, str]:
    """Return why code that needs the value of a tracer, in a branch or elsewhere, gets none.

    First what has been noted, if the trace is ours; second JAX's name of the transformation. Both
    are empty if it is not known.
    """
    ours = {id(one.trace): one.why for one in _local.noted if one.is_ours}
    # What encloses the trace of a function that has a derivative of its own, JAX does not say.
    calls = [one.trace for one in reversed(_local.noted) if not one.is_ours]
    last = ""
    for trace in (getattr(tracer, "_trace", None), *calls):
        while trace is not None:
            if why := ours.get(id(trace)):
                return why(), ""
            by = "" if id(trace) in ours else _transformation(trace)
            # A branch takes a tracer of a derivative for its value; NumPy and `float` do not.
            if by not in ("", DERIVATIVE, VMAP if last else ""):
                return "", by
            last = DERIVATIVE if by == DERIVATIVE and not in_branch else last
            trace = getattr(trace, "parent_trace", None)
    return "", last


def _transformation(trace: Any) -> str:
    """Return what JAX calls the transformation of a trace; "" if not known, or if it is no cause.

    Code with a derivative of its own is recorded because another transformation records it.
    """
    name = _transformations().get(type(trace), "")
    if name == "jit":
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        name = str(getattr(info, "traced_for", "")).partition(" ")[0]
        return name if name not in ("custom_jvp", "custom_vjp") else ""
    if not name and jax.sharding.get_abstract_mesh().manual_axes and hasattr(trace, "mesh"):
        return SHARD_MAP
    return name


@functools.cache
def _transformations() -> dict[type, str]:
    """Return the types of JAX's traces, each with the transformation that it is of."""
    under = {
        "jit": [type_of_trace(lambda f: jax.eval_shape(f, 1.0))],
        VMAP: [type_of_trace(lambda f: jax.vmap(f)(np.ones(1)))],
        DERIVATIVE: derivatives(),
    }
    return {cls: name for name, types in reversed(under.items()) for cls in types}
