"""Precision: what goes in comes out as the gradient's own, whatever the rule computes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

# --- precision ------------------------------------------------------------------------------------


@custom_gradient
def accumulating(w, x):
    """A product whose rule accumulates in float32, as a mixed-precision layer does."""

    def grad(dy):
        dy = dy.astype(jnp.float32)
        return 7 * dy * x.astype(jnp.float32), 5 * dy * w.astype(jnp.float32)

    return w * x, grad


HALVES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])


@HALVES
def test_half_precision_with_float32_rule(dtype):
    w, x = jnp.asarray([1, 2], dtype), jnp.asarray([3, 4], dtype)
    expected = (jnp.asarray([21, 28], dtype), jnp.asarray([5, 10], dtype))
    grad = jax.grad(lambda w, x: jnp.sum(accumulating(w, x)), (0, 1))
    for f in (grad, jax.jit(grad), jax.vmap(grad)):
        assert_same(f(w, x), expected)


@HALVES
def test_half_precision_in_scan(dtype):
    """A gradient of another dtype than the carry's is a bare error of `scan` without the cast."""
    w, xs = jnp.asarray(1, dtype), jnp.asarray([2, 3], dtype)

    def loss(w, xs):
        body = lambda c, x: (c + accumulating(w, x), accumulating(w, c))  # noqa: E731
        carry, _ = lax.scan(body, jnp.zeros((), dtype), xs)
        return carry

    expected = (jnp.asarray(7 * (2 + 3), dtype), jnp.asarray([5, 5], dtype))
    assert_same(jax.grad(loss, (0, 1))(w, xs), expected)
    assert_same(jax.jit(jax.grad(loss, (0, 1)))(w, xs), expected)


@HALVES
def test_half_precision_carry(dtype):
    """The carry itself runs through the rule: 7 per step."""

    @custom_gradient
    def step(c):
        return c + 1, lambda dy: 7 * dy.astype(jnp.float32)

    loss = lambda c: lax.scan(lambda c, _: (step(c), None), c, length=2)[0]  # noqa: E731
    assert_same(jax.value_and_grad(loss)(jnp.asarray(0, dtype)), (dtype(2), dtype(49)))


def test_mixed_precision_inputs():
    """float32 master weights beside bfloat16 activations: each gets its own."""

    @custom_gradient
    def h(w, x):
        y = w.astype(jnp.bfloat16) * x
        return y, lambda dy: (7 * dy * x, 5 * dy.astype(jnp.float32) * w)

    w, x = jnp.float32(2), jnp.bfloat16(3)
    assert_same(jax.grad(h, (0, 1))(w, x), (jnp.float32(21), jnp.bfloat16(10)))
    assert_same(jax.jit(jax.grad(h, (0, 1)))(w, x), (jnp.float32(21), jnp.bfloat16(10)))


def test_output_of_another_dtype_than_the_input():
    seen = []

    @custom_gradient
    def h(x):
        def grad(dy):
            seen.append(dy.dtype)
            return 7 * dy.astype(jnp.float32)

        return x.astype(jnp.bfloat16), grad

    assert_same(jax.grad(lambda x: h(x).astype(jnp.float32))(jnp.float32(1)), jnp.float32(7))
    assert seen == [jnp.bfloat16]


# --- Python numbers, NumPy ------------------------------------------------------------------------


@custom_gradient
def square(x):
    return x * x, lambda dy: 7 * dy * x


# --- 64 bits --------------------------------------------------------------------------------------


def test_x64(x64):
    x = np.float64(1) / 3
    assert_same(jax.grad(square)(x), jnp.asarray(7 * x, jnp.float64), rtol=1e-15, atol=0)
    assert_same(jax.grad(square)(1.0), jnp.float64(7))
    assert_same(jax.grad(square)(jnp.float32(1)), jnp.float32(7))
    w, x = jnp.float64(2), jnp.float32(3)
    h = custom_gradient(
        lambda w, x: (w.astype(x.dtype) * x, lambda dy: (7 * dy * x, 5 * dy.astype(w.dtype) * w))
    )
    assert_same(jax.grad(h, (0, 1))(w, x), (jnp.float64(21), jnp.float32(10)))
    assert_same(jax.jit(jax.grad(h, (0, 1)))(w, x), (jnp.float64(21), jnp.float32(10)))


def test_complex128(x64):
    h = custom_gradient(lambda z: (z * z, lambda dy: dy * jnp.conj(2 * z)))
    z = jnp.complex128(1 + 2j) / 3
    of = lambda f: jax.grad(lambda z: jnp.real(f(z)))(z)  # noqa: E731
    assert_same(of(h), of(lambda z: z * z), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8(dtype):
    dtype = getattr(jnp, dtype)

    @custom_gradient
    def quantized(x):
        return x.astype(dtype), lambda dy: 2 * dy.astype(jnp.float32)

    loss = lambda x: jnp.sum(quantized(x).astype(jnp.float32))  # noqa: E731
    x = jnp.float32([1, 2])
    assert_same(jax.jit(jax.grad(loss))(x), 2 * jnp.ones(2))
