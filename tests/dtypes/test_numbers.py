"""Python numbers and NumPy: they reach `f` as they are, unless they are differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


@custom_gradient
def square(x):
    return x * x, lambda dy: 7 * dy * x


def test_python_float_calls_the_rule():
    assert_same(jax.grad(square)(1.0), jnp.float32(7))
    assert_same(jax.value_and_grad(square)(3.0), (jnp.float32(9), jnp.float32(21)))
    assert_same(jax.grad(jax.grad(square))(3.0), jnp.float32(7))
    assert_same(jax.vjp(square, 3.0)[1](1.0), (jnp.float32(21),))


def test_python_float_stays_weakly_typed():
    """A Python float beside bfloat16 does not make float32 of it."""

    @custom_gradient
    def h(x, y):
        return x * y, lambda dy: (7 * dy * y, 5 * dy * x)

    x = jnp.bfloat16(3)
    for f in (h, jax.jit(h)):
        assert_same(f(x, 2.0), jnp.bfloat16(6))
        assert_same(jax.grad(f)(x, 2.0), jnp.bfloat16(14))
    assert_same(jax.grad(lambda x: h(x, 2.0))(x), jnp.bfloat16(14))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.float32(3), jnp.float32(21)),
        (np.float32([1, 3]), jnp.float32([7, 21])),
        (np.asarray(3, jnp.bfloat16), jnp.bfloat16(21)),
        (np.array(3, np.float16), jnp.float16(21)),
    ],
    ids=["scalar", "array", "bfloat16", "0-d"],
)
def test_numpy_inputs(x, expected):
    loss = lambda x: jnp.sum(square(x))  # noqa: E731
    assert_same(jax.grad(loss)(x), expected)
    assert_same(jax.jit(jax.grad(loss))(x), expected)
    assert type(square(x)) is type(x * x)  # eagerly NumPy in, NumPy out


def test_numpy_beside_what_is_differentiated():
    table = np.float32([1, 2])

    @custom_gradient
    def h(x, table):
        return jnp.sum(x * table), lambda dy: (7 * dy * table, None)

    assert_same(jax.grad(h)(jnp.ones(2), table), jnp.float32([7, 14]))
