"""Decorated functions in each other: the outer rule hides what `f` calls, and may call any."""

import jax
import jax.numpy as jnp
from helpers import assert_same, sine

from tfgrad_jax import custom_gradient


def test_nested_functions_hide_what_they_call():
    @custom_gradient
    def outer(x):
        return sine(x) ** 2, lambda dy: 11 * dy * x

    assert_same(jax.value_and_grad(outer)(0.5), (jnp.sin(0.5) ** 2, jnp.float32(5.5)))


def test_a_rule_may_differentiate_decorated_functions():
    @custom_gradient
    def outer(x):
        return x, lambda dy: 2 * dy * jax.grad(sine)(x)

    expected = 14 * jnp.cos(0.5)
    assert_same(jax.grad(outer)(0.5), jnp.asarray(expected))
    assert_same(jax.jit(jax.grad(outer))(0.5), jnp.asarray(expected))
