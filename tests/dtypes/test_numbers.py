"""Python numbers and NumPy: inputs where they are traced, else what they are.

Which values reach `f` as they are is the matter of `frontend/test_what_reaches_f.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


@custom_gradient
def square(x):
    return x * x, lambda dy: 7 * dy * x


@custom_gradient
def product(x, y):
    return x * y, lambda dy: (7 * dy * y, 5 * dy * x)


def test_python_float_stays_weakly_typed():
    """A Python float beside bfloat16 does not make float32 of it."""
    x = jnp.bfloat16(3)
    for f in (product, jax.jit(product)):
        assert_same(f(x, 2.0), jnp.bfloat16(6))
        assert_same(jax.grad(f)(x, 2.0), jnp.bfloat16(14))
        assert_same(jax.grad(f, (0, 1))(x, 2.0), (jnp.bfloat16(14), jnp.float32(15)))
    assert_same(jax.grad(lambda x: product(x, 2.0))(x), jnp.bfloat16(14))


def test_a_number_that_is_differentiated_is_a_weakly_typed_array():
    seen = []

    @custom_gradient
    def h(x, y):
        seen.append((x, y))
        return x * y, lambda dy: (7 * dy * y, 5 * dy * x)

    assert_same(jax.grad(h, (0, 1))(3.0, 2.0), (jnp.float32(14), jnp.float32(15)))
    for x in seen.pop():
        assert isinstance(x, jax.Array)
        assert (jnp.bfloat16(1) * x).dtype == jnp.bfloat16
    assert_same(jax.grad(h)(3.0, 2.0), jnp.float32(14))
    x, y = seen.pop()
    assert isinstance(x, jax.Array) and type(y) is float
    # By `y` at the second order alone: d/dy (7 y).
    assert_same(jax.grad(lambda y: jax.grad(h)(3.0, y))(2.0), jnp.float32(7))


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
    given = np.float32([1, 2])

    @custom_gradient
    def h(x, table):
        assert isinstance(table, jax.core.Tracer) or table is given
        return jnp.sum(x * table), lambda dy: (7 * dy * table, None)

    for grad in (jax.grad(h), jax.jit(jax.grad(h))):
        assert_same(grad(jnp.ones(2), given), jnp.float32([7, 14]))
