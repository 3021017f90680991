"""Whether a decorated function is written inside a rule, or is one.

`enter` runs before each rule of ours, and notes it until `leave`. `written_within` asks, once, when
a function is decorated.
"""

import enum
import functools
import types
from contextvars import ContextVar, Token
from typing import TypeAlias

from .._jax.types import AnyFunction
from .._messages.source import Source, is_within


class Within(enum.Enum):
    """Where a decorated function is written."""

    NOTHING = enum.auto()
    RULE = enum.auto()  # the rule of another decorated function
    IS_RULE = enum.auto()  # nothing: it is the rule of another one itself


Running: TypeAlias = tuple[types.CodeType, ...]
_now: ContextVar[Running] = ContextVar(
    "the code of the rules that are running, and of functions decorated in one", default=()
)


def enter(f: AnyFunction) -> Token[Running]:
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
    return _now.set((*_now.get(), code) if code else _now.get())


def leave(token: Token[Running]) -> None:
    _now.reset(token)


def written_within(source: Source) -> Within:
    """Return what a function that is being decorated is written inside."""
    is_in_rule = any(is_within(code, source.code) for code in _now.get())
    return Within.RULE if is_in_rule else Within.NOTHING
