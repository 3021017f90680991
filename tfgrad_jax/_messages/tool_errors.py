"""The messages of `explain` and of `tfgrad_jax.testing`, as in `errors.py`."""

from typing import Any

from .errors import builder
from .text import kind_of

explain_needs_values = builder(
    "explain cannot run `{}` without values: it branches on them. Pass arrays instead."
)
checks_values = builder(
    "check_gradient compares values, but {} got an argument that JAX is tracing. Call it outside "
    "of `jax.jit`, `jax.grad` and the like: it runs them itself."
)
nothing_to_check = builder(
    "check_gradient found nothing to differentiate in {}: there is no floating array among its {}. "
    "Pass floats: integer inputs and outputs have no gradient.",
    ValueError,
)
bad_reference = builder(
    "The reference {} of check_gradient must return arrays of the shapes that {} returns, {}, but "
    "returned {}.",
    ValueError,
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
