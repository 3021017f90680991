"""Explain errors of the user's code: of a rule, and in runs that the user did not ask for.

A function runs again where a first run did not show what it reads, or what `y` depends on. If it
makes parameters (flax, haiku), or counts, a run finds others than the one before.
"""

import re
import weakref
from contextvars import ContextVar
from typing import Any, NamedTuple

from jax.errors import UnexpectedTracerError

from tfgrad_jax._jax.compat import core_name
from tfgrad_jax._jax.types import NEEDS_VALUES

from . import errors, gradient_errors
from .source import Source, Where
from .tracebacks import is_own

_current_trace = core_name("find_top_trace")


class _Run(NamedTuple):
    source: Source
    trace: "weakref.ref[Any]"  # JAX deletes it when the derivative is done


_again: ContextVar[_Run | None] = ContextVar("the last other run of a function", default=None)


def note_another_run(source: Source) -> None:
    """Remember that a function runs again, for an error in this run or in a later one.

    haiku and flax count modules. After another run, the next *call* does not find its parameters:
    the error is of a function that runs for the first time there. Only the note depends on this.
    """
    _again.set(_Run(source, weakref.ref(_current_trace(()))))


def explain_run(error: Exception, source: Source) -> None:
    """Add a note to an error in a run of a function, if it may be of another run."""
    run, note = _again.get(), ""
    if isinstance(error, NEEDS_VALUES):
        return  # another note says why it is traced
    if isinstance(error, UnexpectedTracerError):
        note = errors.left_behind(source)
    elif run is not None and run.source == source and run.trace() is not None:
        note = errors.ran_again(source)
    if note and not is_own(error) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def explain_rule(error: Exception, where: Where, lists_none: bool) -> None:
    """Add a note to an error in a rule; `lists_none` if it takes `variables`, and got none."""
    if is_own(error) or isinstance(error, NEEDS_VALUES) or hasattr(error, "__notes__"):
        return
    if lists_none and isinstance(error, TypeError) and "NoneType" in str(error):
        error.add_note(gradient_errors.no_variables(where))
    elif isinstance(error, UnexpectedTracerError):
        error.add_note(gradient_errors.reads_ended_tracer(where))
    elif is_of_derivative(error):
        line = Source.of(where.grad_fn).line_in(error)
        error.add_note(gradient_errors.not_differentiable(where, line))


def is_of_derivative(error: Exception) -> bool:
    """Return whether JAX cannot differentiate an operation; the type of its error depends on it."""
    if isinstance(error, UnexpectedTracerError):  # it names the classes of tracers
        return False
    return re.search("jvp|differentiat|lineariz", str(error), re.IGNORECASE) is not None
