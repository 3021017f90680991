"""Explain errors of the user's code: what JAX and others say of it, and do not say.

What an error is, its type tells, and the frame in which it was raised: never its text.
"""

import dis
import inspect
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.errors import TracerBoolConversionError, UnexpectedTracerError

from tfgrad_jax._jax.reasons import why_traced
from tfgrad_jax._jax.types import NEEDS_VALUES

from . import errors, gradient_errors
from .source import Source, Where
from .tracebacks import frames_of_jax, is_of_derivative, note

_CALL_OF_VJP = inspect.unwrap(jax.custom_vjp.__call__).__code__


def explain_run(error: Exception, source: Source) -> None:
    """Add a note to an error in a run of a function."""
    if needed := _needed(error):
        note(error, errors.needs_value(source, *why_traced(*needed)))
    elif isinstance(error, UnexpectedTracerError) and frames_of_jax(error):
        note(error, errors.left_behind(source))
    elif isinstance(error, getattr(sys.modules.get("flax.errors"), "TraceContextError", ())):
        note(error, errors.other_level(source))


def explain_rule(error: Exception, where: Where, lists_none: bool) -> None:
    """Add a note to an error in a rule; `lists_none` if it takes `variables`, and got none."""
    if needed := _needed(error):
        note(error, errors.needs_value(where, *why_traced(*needed)))
    elif lists_none and isinstance(error, TypeError) and _reads_variables(error):
        note(error, gradient_errors.no_variables(where))
    elif isinstance(error, UnexpectedTracerError) and frames_of_jax(error):
        note(error, gradient_errors.reads_ended_tracer(where))
    elif isinstance(error, NameError) and frames_of_jax(error):
        note(error, errors.unbound_axis(where))
    elif is_of_derivative(error):
        line = Source.of(where.grad_fn).line_in(error)
        note(error, gradient_errors.not_differentiable(where, line), first=True)


def explain_derivative(error: Exception, source: Source) -> None:
    """Name the function if JAX cannot differentiate its operations.

    For second derivatives JAX differentiates the operations of `f`, and fails at a callback, for
    instance.
    """
    if is_of_derivative(error):
        calls_vjp = any(frame.f_code is _CALL_OF_VJP for frame in frames_of_jax(error))
        text = errors.not_differentiable(source, source.line_in(error), calls_vjp)
        note(error, text, first=True)


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


def _reads_variables(error: Exception) -> bool:
    """Return whether a line of the user's raised an error that reads `variables`, which is None."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or tb.tb_frame.f_locals.get("variables", error) is not None:
        return False
    read = [
        i.argval
        for i in dis.get_instructions(tb.tb_frame.f_code)
        if i.positions is not None and i.positions.lineno == tb.tb_lineno
    ]
    return "variables" in read or any("variables" in r for r in read if isinstance(r, tuple))


def warn_of_unlisted(
    source: Source, values: Sequence[tuple[str, Any]], together: Sequence[str], in_instance: bool
) -> None:
    """Warn of values that only a rule reads, and of which variables to declare together."""
    listed = ", ".join(errors.captured(name, s) for name, s in values)
    how = "add the value to the `variables`"
    if together:
        shown = errors.declaration(source, together, in_instance)
        how = f"declare the value, `custom_gradient(variables={shown})`,"
    gradient_errors.warn(
        f"{source} is differentiated with respect to {listed}, which only its gradient function "
        f"reads: this gradient is zero. If there is one, {how} and return it; if there is none, "
        "read `jax.lax.stop_gradient` of the value.",
        source.code,
    )
