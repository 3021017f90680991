"""What is assigned while `f` runs is seen: by functions that it calls, and by its rule."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_keyword_below_a_function_that_was_looked_through(jit):
    def loss(x):
        @custom_gradient
        def inner(x, *, scale):
            def grad(dy, variables):
                return 5 * dy * scale, [7 * dy * x for _ in variables]

            return scale * x, grad

        @custom_gradient
        def outer(x):
            dx = jax.grad(lambda x: inner(x, scale=3 * x))(x)
            return 1.0 * x, lambda dy: dy * dx

        return outer(x)

    gradient = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    assert_same(gradient(2.0), jnp.float32(5 * 6 + 21 * 2))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_what_a_function_assigns_is_seen_by_those_below_it(jit):
    """They have been looked through before `f` ran, and then held no tracer."""

    def loss(x):
        w = None

        @custom_gradient
        def inner(x):
            def grad(dy, variables):
                (v,) = variables
                return 5 * dy * v, [7 * dy * x]

            return w * x, grad

        @custom_gradient
        def outer(x):
            dx = jax.grad(through)(x)
            return 1.0 * x, lambda dy: dy * dx

        def through(x):
            nonlocal w
            w = 3 * x
            return inner(x)

        return outer(x)

    gradient = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    # The rule of `outer` is the gradient of `inner` at w = 3 x: 5 w + 3 * 7 x.
    assert_same(gradient(2.0), jnp.float32(5 * 6 + 21 * 2))


def test_a_cell_that_a_function_empties():
    def make():
        scale = 1.0

        @custom_gradient
        def inner(x):
            return x**2, lambda dy: 7 * dy * x * scale

        @custom_gradient
        def outer(x):
            nonlocal scale
            del scale
            y = inner(x)
            scale = 2.0
            return y, lambda dy: 5 * dy * scale

        return outer

    assert_same(jnp.asarray(make()(3.0)), jnp.float32(9))
    assert_same(jax.grad(make())(3.0), jnp.float32(10))
