"""`vmap` over what an output or the rule ignores, where integers go in or come out.

The value and the differentiated value of a function must agree on which outputs are mapped, or JAX
fails where it traces one and evaluates the other, as under `jit` and `checkpoint`.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient

K = jnp.float32([1, 2, 3])
SCALE = jnp.float32([10, 100, 1000])
X = jnp.float32(2)
OWN = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "jit of jit": lambda f: jax.jit(lambda *args: jax.jit(f)(*args)),
    "checkpoint": jax.checkpoint,
}


@custom_gradient
def with_index(x, k):
    """Return what depends on both, and an integer that ignores `k`."""
    return (x * k, jnp.int32(3) + x.astype(jnp.int32)), lambda dy, _: (7 * dy * k, None)


@custom_gradient
def of_an_index(x, i):
    """Ignore an integer, in the rule too."""
    return x * 2, lambda dy: (7 * dy, None)


@pytest.mark.parametrize("own", OWN)
def test_an_output_that_ignores_what_is_mapped(own):
    f = OWN[own](with_index)

    def loss(x):
        y, i = jax.vmap(f, (None, 0))(x, K)
        return jnp.sum(y * SCALE), i

    gradient, i = jax.grad(loss, has_aux=True)(X)
    assert_same(gradient, jnp.sum(7 * SCALE * K))
    assert_same(jnp.broadcast_to(i, 3), jnp.full(3, 5, jnp.int32))
    tangent = jax.jvp(lambda x: loss(x)[0], (X,), (jnp.float32(1),))[1]
    assert_same(tangent, jnp.sum(7 * SCALE * K))


@pytest.mark.parametrize("own", OWN)
def test_a_mapped_integer_that_nothing_uses(own):
    f = OWN[own](of_an_index)

    def loss(x):
        return jnp.sum(jax.vmap(f, (None, 0))(x, jnp.arange(3)) * SCALE)

    assert_same(jax.grad(loss)(X), jnp.sum(7 * SCALE))
    assert_same(jax.jvp(loss, (X,), (jnp.float32(1),))[1], jnp.sum(7 * SCALE))
