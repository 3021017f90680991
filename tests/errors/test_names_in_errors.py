"""Whose rule it is: a message names the function that the user wrote, wherever it is raised."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from messages import at, gradient_message, message, prefix, text

from tfgrad_jax import custom_gradient


class Model:
    @custom_gradient
    def method(self, x):
        return x, lambda dy: (dy, dy)


class CallableObject:
    def __call__(self, x):
        return x, lambda dy: (dy, dy)


def _partial(scale, x):
    return scale * x, lambda dy: (dy, dy)


@pytest.mark.parametrize(
    ("h", "code", "name"),
    [
        (Model().method, Model.method.__wrapped__, "Model.method"),
        (custom_gradient(CallableObject()), CallableObject.__call__, "CallableObject"),
        (custom_gradient(functools.partial(_partial, 2.0)), _partial, "_partial"),
    ],
    ids=["method", "callable object", "partial"],
)
def test_names_of_callables(h, code, name):
    line = code.__code__.co_firstlineno
    text = message(ValueError, jax.grad(h), 1.0)
    assert f" of `{name}` ({__file__}:{line}) returned 2 gradients" in text


def test_name_of_a_function_under_another_decorator():
    """The function that the user wrote, not the wrapper that a decorator put around it."""

    def logged(f):
        @functools.wraps(f)
        def wrapper(*args):
            return f(*args)

        return wrapper

    def f(x):
        def grad(dy):
            return dy, dy

        return x, grad

    text = gradient_message(ValueError, logged(f), 1.0)
    assert text.startswith(f"{prefix(f)} returned 2 gradients")

    def lonely(x):
        return None

    text = message(TypeError, custom_gradient(logged(lonely)), 1.0)
    assert text.startswith(f"{at(lonely)} must return a pair")


def test_name_of_a_rule_that_is_no_plain_function():
    class Rule:
        def __call__(self, dy):
            return dy, dy

    def f(x):
        return x, Rule()

    text = gradient_message(ValueError, f, 1.0)
    line = Rule.__call__.__code__.co_firstlineno
    assert re.match(rf"The gradient function `.*Rule` \({re.escape(__file__)}:{line}\) of", text)


def test_errors_are_raised_when_differentiated_only():
    """The value of a function with a wrong rule is still its value."""
    h = custom_gradient(lambda x: (2 * x, lambda dy: (dy, dy)))
    assert h(1.0) == 2.0
    assert jax.jit(h)(1.0) == 2.0


@pytest.mark.parametrize(
    "transformation",
    [
        jax.grad,
        lambda h: jax.vmap(jax.grad(h)),
        lambda h: jax.grad(lambda xs: jnp.sum(jax.vmap(h)(xs))),
        lambda h: jax.grad(lambda xs: jax.lax.scan(lambda c, x: (c + h(x), None), 0.0, xs)[0]),
        lambda h: jax.grad(lambda xs: jnp.sum(jax.checkpoint(jax.vmap(h))(xs))),
    ],
    ids=["grad", "vmap of grad", "grad of vmap", "scan", "checkpoint"],
)
def test_errors_under_transformations(transformation):
    def f(x):
        def grad(dy):
            return jnp.ones(2)

        return x, grad

    x = jnp.ones(()) if transformation is jax.grad else jnp.ones(3)
    with pytest.raises(ValueError, match="expected its own shape") as caught:
        transformation(custom_gradient(f))(x)
    assert text(caught).startswith(prefix(f))
