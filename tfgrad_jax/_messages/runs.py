"""Add notes to errors of the user's code: what JAX and others do not say of it.

What an error is, its type tells, the frame in which it was raised, and the instruction there: never
its text.
"""

import dis
import itertools
import types
from collections.abc import Sequence

from jax.core import Tracer
from jax.errors import UnexpectedTracerError

from .._jax.trace import is_of
from .._jax.types import NEEDS_VALUES
from .._jax.watch import Watch
from . import errors, gradient_errors
from .source import Source, Where
from .tracebacks import frames, frames_of_jax, is_of_derivative, note


def annotate_run(error: Exception, source: Source) -> None:
    """Add a note to an error in a run of a function."""
    if needs_value(error):
        is_bare = _is_bare_weight(error)
        note(error, errors.bare_weight(source) if is_bare else errors.needs_value(source))
    elif is_format(error):
        note(error, errors.formatted(source))
        if _holds_weight(frames(error)[:1]):
            error.add_note(errors.bare_weight(source))
    elif isinstance(error, UnexpectedTracerError) and frames_of_jax(error):
        note(error, errors.leaked(source))


def annotate_rule(error: Exception, where: Where, lists_none: bool) -> None:
    """Add a note to an error in a rule; `lists_none` if it takes `variables`, and got none."""
    if needs_value(error):
        note(error, errors.needs_value(where))
    elif is_format(error):
        note(error, errors.formatted(where))
    elif lists_none and isinstance(error, TypeError) and _gets_no_variables(error):
        note(error, gradient_errors.no_variables(where))
    elif isinstance(error, UnexpectedTracerError) and frames_of_jax(error):
        note(error, errors.leaked(where))
    elif isinstance(error, NameError) and frames_of_jax(error):
        note(error, errors.unbound_axis(where))
    elif is_of_derivative(error):
        line = Source.of(where.grad_fn).line_in(error)
        note(error, errors.not_differentiable(where, line), instead=True)


def annotate_derivative(error: Exception, source: Source) -> None:
    """Name the function if JAX cannot differentiate its operations.

    For second derivatives JAX differentiates the operations of `f`, and fails at a callback, for
    instance.
    """
    if is_of_derivative(error):
        note(error, errors.not_differentiable(source, source.line_in(error)), instead=True)


def annotate_recorded(error: Exception, source: Source) -> None:
    """Say why a rule is recorded, if its code needs a value."""
    if needs_value(error) or is_format(error):
        error.add_note(errors.recorded(source))


def needs_value(error: BaseException) -> bool:
    """Return whether code needs the value of a tracer.

    NumPy raises a `ValueError` because of the error of JAX.
    """
    return isinstance(error, NEEDS_VALUES) or isinstance(error.__cause__, NEEDS_VALUES)


def is_format(error: BaseException) -> bool:
    """Return whether code formats a tracer, as in `f"{x:g}"`.

    Python itself raises this `TypeError`: at an instruction that formats, beside a tracer.
    """
    if not isinstance(error, TypeError):
        return False
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or not any(isinstance(v, Tracer) for v in tb.tb_frame.f_locals.values()):
        return False
    here = (i for i in dis.get_instructions(tb.tb_frame.f_code) if i.offset == tb.tb_lasti)
    return any(i.opname.startswith("FORMAT_") for i in here)


def _is_bare_weight(error: BaseException) -> bool:
    """Return whether a tracer whose value code needs is a weight, as JAX differentiates it.

    It is of the derivative that a run of ours stands for; all else in that run shows its value.
    """
    cause = error if isinstance(error, NEEDS_VALUES) else error.__cause__
    assert cause is not None
    return _holds_weight(frames_of_jax(cause))


def _holds_weight(frames: Sequence[types.FrameType]) -> bool:
    """Return whether code has a tracer of a derivative that is on where a run of ours is."""
    watch = Watch.now()
    ofs = () if watch is None else watch.ofs
    held = itertools.chain.from_iterable(f.f_locals.values() for f in frames)
    return any(isinstance(v, Tracer) and any(is_of(v, of) for of in ofs) for v in held)


def _gets_no_variables(error: Exception) -> bool:
    """Return whether the function in which an error was raised has None for `variables`."""
    return frames(error)[0].f_locals.get("variables", error) is None
