"""Keep this package out of the user's tracebacks, jaxprs and profiles.

`hide` removes our frames from the traceback of an error that leaves the package. `hidden` does so
in functions that JAX calls. As with JAX's own frames, `jax_traceback_filtering="off"` shows them.
JAX gives each operation the innermost source line outside of excluded files; we exclude ours.
"""

import functools
import itertools
import os
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend import source_info_util

from .._jax.compat import BINDS, DIFFERENTIATES

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CONFIG: Any = jax.config
_OURS, _JAX = str(Path(__file__).parents[1]) + os.sep, str(Path(jax.__file__).parent) + os.sep
_SHOWN = str(Path(_OURS) / "_jax" / "shown.py")
_SAYS_WHAT_TO_DO = "_tfgrad_jax_noted"  # an attribute of errors that are ours, or have our note
source_info_util.register_exclusion(_OURS)


def is_ours(file: str) -> bool:
    """Return whether a file is one of this package."""
    return file.startswith(_OURS)


def is_raised_here(error: BaseException) -> bool:
    """Return whether an error comes from this package, or from a call that Python did not make.

    Not from a value that `f` shows to Python, such as a format: that is code of the user's.
    """
    files = (frame.f_code.co_filename for frame in frames(error))
    return is_ours(next((file for file in files if file != _SHOWN), ""))


def frames(error: BaseException) -> list[types.FrameType]:
    """Return the frames of an error, from the inside out."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def frames_of_jax(error: BaseException) -> list[types.FrameType]:
    """Return those of JAX in which an error was raised, from the inside out; none if elsewhere.

    JAX removes its frames only where an error leaves the outermost of its functions.
    """
    of_jax = lambda frame: frame.f_code.co_filename.startswith(_JAX)  # noqa: E731
    return [*itertools.takewhile(of_jax, frames(error))]


def line_of(error: BaseException) -> str:
    """Return the innermost line outside of JAX and of us that led to an error, in brackets."""
    # Not `f_lineno`, at which a frame has ended: after a `finally`, say, that is another line.
    every = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)][::-1]
    return next((f"({f}:{n})" for f, n in every if not f.startswith((_OURS, _JAX))), "")


def is_of_derivative(error: BaseException) -> bool:
    """Return whether JAX raised an error because it cannot differentiate an operation.

    The rules of operations run in code that differentiates, and bind others; where one of these
    raises, because of a shape say, the code that binds is nearer.
    """
    files = (frame.f_code.co_filename for frame in frames_of_jax(error))
    return next((file for file in files if file in (DIFFERENTIATES, BINDS)), "") == DIFFERENTIATES


def note(error: Exception, text: str) -> None:
    """Add a note to an error, unless it has one of the function in which it was raised."""
    if not (is_raised_here(error) or hasattr(error, _SAYS_WHAT_TO_DO)):
        setattr(error, _SAYS_WHAT_TO_DO, text)
        error.add_note(text)


def note_of(error: BaseException | None) -> str:
    """Return the note that we have added to an error, if any."""
    return getattr(error, _SAYS_WHAT_TO_DO, "")


def hide(error: BaseException) -> None:
    """Remove our frames from the traceback of an error that is being handled."""
    if is_raised_here(error):  # the traceback will no longer show it
        setattr(error, _SAYS_WHAT_TO_DO, "")
    if _CONFIG.jax_traceback_filtering == "off":
        return
    kept, tb = [], error.__traceback__
    while tb is not None:
        if not is_ours(tb.tb_frame.f_code.co_filename):
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
