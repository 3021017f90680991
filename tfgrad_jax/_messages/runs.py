"""Explain errors of the user's code: what JAX and others say of it, and do not say.

What an error is, its type tells, and the frame in which it was raised: never its text.
"""

import itertools
from typing import Any

from jax.core import Tracer
from jax.errors import TracerBoolConversionError, UnexpectedTracerError

from tfgrad_jax._jax.reasons import why_traced
from tfgrad_jax._jax.types import NEEDS_VALUES

from . import errors, gradient_errors
from .source import Source, Where
from .tracebacks import frames, frames_of_jax, is_of_derivative, note


def explain_run(error: Exception, source: Source) -> None:
    """Add a note to an error in a run of a function."""
    if needed := _needed(error):
        note(error, errors.needs_value(source, *why_traced(*needed)))
    elif isinstance(error, UnexpectedTracerError) and frames_of_jax(error):
        note(error, errors.unsearched(source))


def explain_rule(error: Exception, where: Where, lists_none: bool) -> None:
    """Add a note to an error in a rule; `lists_none` if it takes `variables`, and got none."""
    if needed := _needed(error):
        note(error, errors.needs_value(where, *why_traced(*needed)))
    elif lists_none and isinstance(error, TypeError) and _gets_no_variables(error):
        note(error, gradient_errors.no_variables(where))
    elif isinstance(error, UnexpectedTracerError) and frames_of_jax(error):
        note(error, errors.unsearched(where))
    elif isinstance(error, NameError) and frames_of_jax(error):
        note(error, errors.unbound_axis(where))
    elif is_of_derivative(error):
        line = Source.of(where.grad_fn).line_in(error)
        note(error, errors.not_differentiable(where, line), first=True)


def explain_derivative(error: Exception, source: Source) -> None:
    """Name the function if JAX cannot differentiate its operations.

    For second derivatives JAX differentiates the operations of `f`, and fails at a callback, for
    instance.
    """
    if is_of_derivative(error):
        note(error, errors.not_differentiable(source, source.line_in(error)), first=True)


def _needed(error: Exception) -> tuple[Any, bool] | None:
    """Return the tracer whose value code needs, None if not known, and whether a branch needs it.

    None if the error is another one. NumPy raises a `ValueError` because of the error of JAX.
    """
    cause = error if isinstance(error, NEEDS_VALUES) else error.__cause__
    if not isinstance(cause, NEEDS_VALUES):
        return None
    held = itertools.chain.from_iterable(f.f_locals.values() for f in frames_of_jax(cause))
    tracer = next((value for value in held if isinstance(value, Tracer)), None)
    return tracer, isinstance(cause, TracerBoolConversionError)


def _gets_no_variables(error: Exception) -> bool:
    """Return whether the function in which an error was raised has None for `variables`."""
    return frames(error)[0].f_locals.get("variables", error) is None
