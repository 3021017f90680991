"""What a decorated function is written inside: nothing, another decorated function, or a rule.

`enter` runs before each function and rule of ours, and notes it until `leave`. `written_within`
asks, once, when a function is decorated.
"""

import enum
import functools
import types
from contextvars import ContextVar, Token
from typing import TypeAlias

from tfgrad_jax._jax.types import AnyFunction
from tfgrad_jax._messages.source import Source, is_within


class Within(enum.Enum):
    """What a decorated function is written inside."""

    NOTHING = enum.auto()
    FUNCTION = enum.auto()  # another decorated function
    RULE = enum.auto()  # the rule of one


Running: TypeAlias = tuple[tuple[types.CodeType, Within], ...]
_now: ContextVar[Running] = ContextVar(
    "the code of the decorated functions and of the rules that are running", default=()
)


def enter(f: AnyFunction, within: Within) -> Token[Running]:
    """Note that a decorated function or a rule runs: what is decorated now may be written in it.

    A decorated function that is a rule, such as an operator that is its own, is not inside itself.
    """
    # TensorFlow's documented `op_with_fused_backprop` depends on it: what a decorated function in a
    # rule closes over is constant for it. "In" is meant as written, not as called; but no code says
    # where it is written. So what runs is noted here, and `written_within` asks once, when a
    # function is decorated. Nothing else reads the note, so no cache of `jit` depends on it.
    while isinstance(f, functools.partial):
        f = f.func
    code = getattr(f, "__code__", None)
    return _now.set((*_now.get(), (code, within)) if code else _now.get())


def leave(token: Token[Running]) -> None:
    _now.reset(token)


def written_within(source: Source) -> Within:
    """Return what a function that is being decorated is written inside."""
    found = {within for code, within in _now.get() if is_within(code, source.code)}
    return next((w for w in (Within.RULE, Within.FUNCTION) if w in found), Within.NOTHING)
