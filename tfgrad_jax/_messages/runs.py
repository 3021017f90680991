"""Add notes to errors of the user's code: what JAX and others do not say of it.

What an error is, its type tells, the frame in which it was raised, and the instruction there: never
its text.
"""

import dis

from jax.core import Tracer
from jax.errors import UnexpectedTracerError

from .._jax.types import NEEDS_VALUES
from . import errors
from .source import Source, Where
from .tracebacks import frames_of_jax, is_of_derivative, is_ours, line_of, note


def annotate(error: Exception, who: Source | Where) -> None:
    """Add a note to an error in a run of a function, or of its rule."""
    if needs_value(error):
        note(error, errors.needs_value(who))
    elif not frames_of_jax(error):
        return
    elif isinstance(error, UnexpectedTracerError):
        note(error, str(errors.leaked(who)))
    elif isinstance(error, NameError):
        note(error, errors.unbound_axis(who))
    elif is_of_derivative(error):
        note(error, errors.not_differentiable(who))


def annotate_recorded(error: Exception, source: Source) -> None:
    """Say where a recorded rule raised, and why it is recorded, if its code needs a value."""
    if line := line_of(error):
        error.add_note(f"Raised by the rule of {source} {line}: JAX records it at the call.")
    if needs_value(error):
        error.add_note(errors.recorded(source))


def needs_value(error: BaseException) -> bool:
    """Return whether code needs the value of a tracer.

    NumPy raises a `ValueError` because of the error of JAX; a format, as in `f"{x:g}"`, a
    `TypeError` of Python's.
    """
    if isinstance(error, NEEDS_VALUES) or isinstance(error.__cause__, NEEDS_VALUES):
        return True
    tb = last = error.__traceback__
    while tb is not None:
        last = last if is_ours(tb.tb_frame.f_code.co_filename) else tb
        tb = tb.tb_next
    if last is None or not isinstance(error, TypeError):
        return False
    code, held = last.tb_frame.f_code, [*last.tb_frame.f_locals.values()]
    here = (i.opname for i in dis.get_instructions(code) if i.offset == last.tb_lasti)
    held += [v for one in held for v in getattr(one, "__dict__", {}).values()]  # `self.w`
    return any(n.startswith("FORMAT_") for n in here) and any(isinstance(v, Tracer) for v in held)
