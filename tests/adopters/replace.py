"""A pytest plugin: `jax.custom_gradient` is our decorator, before anybody imports it.

Load it with `-p tests.adopters.replace`. It reports how many functions were decorated and
how many times they were called, so that a pass proves something.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from tfgrad_jax import custom_gradient

_count = {"decorated": 0, "called": 0}


def _replacement(fun: Callable[..., Any]) -> Callable[..., Any]:
    decorated = custom_gradient(fun, convention="jax")
    _count["decorated"] += 1

    @functools.wraps(fun)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _count["called"] += 1
        return decorated(*args, **kwargs)

    return counted


jax.custom_gradient = _replacement


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"tfgrad_jax decorated {_count['decorated']} functions, {_count['called']} calls"
    )
