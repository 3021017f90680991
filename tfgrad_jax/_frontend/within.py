"""Whether a decorated function is written inside a rule.

`enter` notes what runs, a rule or a function that is written in one, until `leave`. `is_in_rule`
asks, once, when a function is decorated.
"""

import functools
import types
from contextvars import ContextVar, Token
from typing import TypeAlias

from tfgrad_jax._jax.types import AnyFunction
from tfgrad_jax._messages.source import Source, is_within

Running: TypeAlias = tuple[types.CodeType, ...]
_now: ContextVar[Running] = ContextVar(
    "the code of the rules that are running, and of the functions in them", default=()
)


def enter(f: AnyFunction) -> Token[Running]:
    """Note that a rule, or a function in one, runs: what is decorated now may be written in it.

    A decorated function that is a rule, such as an operator that is its own, is not inside itself.
    """
    # TensorFlow's documented `op_with_fused_backprop` depends on it: what a decorated function in a
    # rule closes over is constant for it. "In" is meant as written, not as called; but no code says
    # where it is written. So what runs is noted here, and `is_in_rule` asks once, when a function
    # is decorated. Nothing else reads the note, so no cache of `jit` depends on it.
    while isinstance(f, functools.partial):
        f = f.func
    code = getattr(f, "__code__", None)
    return _now.set((*_now.get(), code) if code else _now.get())


def leave(token: Token[Running] | None) -> None:
    if token is not None:
        _now.reset(token)


def is_in_rule(source: Source) -> bool:
    """Return whether a function that is being decorated is written inside a rule that runs."""
    return any(is_within(code, source.code) for code in _now.get())
