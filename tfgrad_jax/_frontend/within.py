"""Whether a decorated function is written inside a rule, or is one.

Each rule of ours is `running`. `written_within` asks, once, when a function is decorated.
"""

import contextlib
import enum
import functools
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from .._jax.types import AnyFunction
from .._messages.source import Source, codes_in


class Within(enum.Enum):
    """Where a decorated function is written."""

    NOTHING = enum.auto()
    RULE = enum.auto()  # the rule of another decorated function
    IS_RULE = enum.auto()  # nothing: it is the rule of another one itself


_now: ContextVar[tuple[types.CodeType, ...]] = ContextVar(
    "the code of the rules that are running, and of functions decorated in one", default=()
)


@contextlib.contextmanager
def added(to: ContextVar[Any], value: object) -> Iterator[tuple[object, ...]]:
    """Add a value to those of a context; yield these."""
    before = to.get()
    token = to.set((*before, value))
    try:
        yield before
    finally:
        to.reset(token)


def running(f: AnyFunction) -> contextlib.AbstractContextManager[object]:
    """Note that a rule runs: what is decorated now may be written in it.

    A decorated function that is a rule, such as an operator that is its own, is not inside itself.
    """
    # TensorFlow's documented `op_with_fused_backprop` depends on it: what a decorated function in a
    # rule closes over is constant for it. "In" is meant as written, not as called; but no code says
    # where it is written. So what runs is noted here, and `written_within` asks once, when a
    # function is decorated. Nothing else reads the note, so no cache of `jit` depends on it.
    while isinstance(f, functools.partial):
        f = f.func
    code = getattr(f, "__code__", None)
    return added(_now, code) if code else contextlib.nullcontext()


def written_within(source: Source) -> Within:
    """Return what a function that is being decorated is written inside."""
    codes = (code for rule in _now.get() for code in codes_in(rule) if code is not rule)
    return Within.RULE if any(code is source.code for code in codes) else Within.NOTHING
