"""Explain errors of the user's code: of a function and of its rule."""

import re

from jax.errors import UnexpectedTracerError

from tfgrad_jax._jax.types import NEEDS_VALUES

from . import errors, gradient_errors
from .source import Source, Where
from .tracebacks import is_own


def explain_run(error: Exception, source: Source) -> None:
    """Add a note to an error in a run of a function that reads a tracer of an earlier one."""
    note = errors.left_behind(source)
    is_new = not is_own(error) and note not in getattr(error, "__notes__", ())
    if is_new and isinstance(error, UnexpectedTracerError):
        error.add_note(note)


def explain_rule(error: Exception, where: Where, lists_none: bool) -> None:
    """Add a note to an error in a rule; `lists_none` if it takes `variables`, and got none."""
    if type(error) is NameError and error.name is None:  # Python's own have one; so JAX raised it
        error.add_note(errors.unbound_axis(where))
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
