"""The messages of `explain` and of `tfgrad_jax.testing`, as in `errors.py`."""

from typing import Any

from .source import describe
from .text import kind_of


def explain_needs_values(name: str) -> TypeError:
    return TypeError(
        f"explain cannot run `{name}` without values: it branches on them. Pass arrays instead."
    )


def checks_values(h: Any) -> TypeError:
    return TypeError(
        f"check_gradient compares values, but {describe(h)} got an argument that JAX is tracing. "
        "Call it outside of `jax.jit`, `jax.grad` and the like: it runs them itself."
    )


def nothing_to_check(h: Any, what: str) -> ValueError:
    return ValueError(
        f"check_gradient found nothing to differentiate in {describe(h)}: there is no floating "
        f"array among its {what}. Pass floats: integer inputs and outputs have no gradient."
    )


def bad_reference(reference: Any, h: Any, wanted: Any, came: Any) -> ValueError:
    return ValueError(
        f"The reference {describe(reference)} of check_gradient must return arrays of the shapes "
        f"that {describe(h)} returns, {wanted}, but returned {came}."
    )


def not_checked(report: Any, weights: bool) -> AssertionError:
    what = (
        "What `not checked` names was not checked: pass it as an argument, store it on the layer "
        "itself (a reference reads it from there, too)"
        if weights
        else "No judge could tell where it says `not judged`: choose a point at which the value is "
        "finite and smooth"
    )
    accept = "or accept that with `assert_gradient(..., unchecked='allow')`."
    return AssertionError(f"{report}\n{what}, {accept}")


def not_explainable(h: Any, wraps: bool) -> TypeError:
    how = "and its arguments" + ": `explain(h.__wrapped__, ...)`" * wraps
    return TypeError(
        "explain takes a function that custom_gradient, grad_pass_through or recompute_grad "
        f"returned, but got {kind_of(h)}. Pass the decorated function itself, {how}."
    )
