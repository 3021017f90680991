"""Keep this package out of the user's tracebacks, jaxprs and profiles.

`hide` removes our frames from the traceback of an error that leaves the package. `hidden` does so
in functions that JAX calls. As with JAX's own frames, `jax_traceback_filtering="off"` shows them.
JAX gives each operation the innermost source line outside of excluded files; we exclude ours.
"""

import functools
import itertools
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend import source_info_util

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CONFIG: Any = jax.config
_OURS = str(Path(__file__).parents[1] / "_")[:-1]
_OWN = "_tfgrad_jax_own"  # an attribute of our errors, whose traceback no longer shows it
source_info_util.register_exclusion(_OURS)


def is_own(error: BaseException) -> bool:
    """Return whether this package raised an error: then its message says what to do."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return hasattr(error, _OWN) or files[-1].startswith(_OURS)


def is_written_here(code: types.CodeType | None) -> bool:
    """Return whether a function is one of this package, such as the rule of a helper."""
    return code is not None and code.co_filename.startswith(_OURS)


def hide(error: BaseException) -> None:
    """Remove our frames from the traceback of an error that is being handled."""
    if is_own(error):
        setattr(error, _OWN, True)
    if _CONFIG.jax_traceback_filtering == "off":
        return
    kept, tb = [], error.__traceback__
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(tb)
        tb = tb.tb_next
    for tb, below in itertools.zip_longest(kept, kept[1:]):
        tb.tb_next = below
    error.__traceback__ = kept[0] if kept else None


def hidden(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function, such that its errors show none of our frames."""

    @functools.wraps(f)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return f(*args, **kwargs)
        except BaseException as error:
            hide(error)
            raise

    return run
