"""The messages of `explain` and of `tfgrad_jax.testing`, as in `errors.py`."""

from collections.abc import Callable, Sequence
from typing import Any

from .source import Source

_Function = Callable[..., Any]


def formats(line: str) -> str:
    return (
        f"it formats an array that JAX is tracing, at {line}: drop the format, as the `:g` of "
        "`{x:g}`, or use `jax.debug.print`"
    )


def checks_values(h: _Function) -> TypeError:
    return TypeError(
        f"check_gradient compares values, but {Source.of(h)} got an argument that JAX is tracing. "
        "Call it outside of `jax.jit`, `jax.grad` and the like: it runs them itself."
    )


def nothing_to_check(h: _Function, among: str) -> ValueError:
    return ValueError(
        f"check_gradient found nothing to differentiate in {Source.of(h)}: there is no floating "
        f"array among its {among}. Pass floats: integer inputs and outputs have no gradient."
    )


def bad_reference(reference: _Function, h: _Function, wanted: object, got: object) -> ValueError:
    return ValueError(
        f"The reference {Source.of(reference)} of check_gradient must return arrays of the shapes "
        f"that {Source.of(h)} returns, {wanted}, but returned {got}."
    )


def not_checked(report: object, unchecked: Sequence[str], example: str) -> AssertionError:
    what = (
        "No judge could tell where it says `not judged`: choose a point at which the value is "
        "finite and smooth"
    )
    if unchecked:
        what = f"What `not checked` names was not checked: make it an argument, as in `{example}`"
    accept = "or accept that with `assert_gradient(..., unchecked='allow')`."
    return AssertionError(f"{report}\n{what}, {accept}")


def explain_needs_values(h: _Function, line: str) -> TypeError:
    why = formats(line) if line else "it branches on one, say"
    return TypeError(
        f"explain traces {Source.of(h)}, as `jax.jit` does, and it needs a value: {why}."
    )
