"""Complex numbers, in TensorFlow's convention and in JAX's."""

import operator
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

# --- Python numbers, NumPy ------------------------------------------------------------------------


@custom_gradient
def square(x):
    return x * x, lambda dy: 7 * dy * x


# --- complex --------------------------------------------------------------------------------------

Z, W = jnp.complex64(1 + 2j), jnp.complex64(3 - 1j)

# Plain functions and their rules in TensorFlow's convention, `dy * conj(f'(z))`.
HOLOMORPHIC = {
    "product": (operator.mul, lambda z, w, dy: (dy * jnp.conj(w), dy * jnp.conj(z))),
    "square": (lambda z, w: z * z * w, lambda z, w, dy: (
        dy * jnp.conj(2 * z * w), dy * jnp.conj(z * z)
    )),
    "exponential": (lambda z, w: jnp.exp(z * w), lambda z, w, dy: (
        dy * jnp.conj(w * jnp.exp(z * w)), dy * jnp.conj(z * jnp.exp(z * w))
    )),
}  # fmt: skip

REAL_LOSSES = {
    "real part": jnp.real,
    "imaginary part": jnp.imag,
    "square of the modulus": lambda y: jnp.real(y * jnp.conj(y)),
}


@pytest.mark.parametrize("loss", REAL_LOSSES)
@pytest.mark.parametrize("name", HOLOMORPHIC)
def test_complex_in_tensorflow_convention(name, loss):
    """`jax.grad` of the decorated function is `jax.grad` of the plain one."""
    f, rule = HOLOMORPHIC[name]
    h = custom_gradient(lambda z, w: (f(z, w), lambda dy: rule(z, w, dy)))
    of = lambda f: jax.grad(lambda z, w: REAL_LOSSES[loss](f(z, w)), (0, 1))  # noqa: E731
    assert_same(of(h)(Z, W), of(f)(Z, W))
    assert_same(jax.jit(of(h))(Z, W), of(f)(Z, W))


@pytest.mark.parametrize("loss", REAL_LOSSES)
def test_complex_in_jax_convention(loss):
    h = custom_gradient(
        lambda z, w: (z * z * w, lambda dy: (dy * 2 * z * w, dy * z * z)), convention="jax"
    )
    of = lambda f: jax.grad(lambda z, w: REAL_LOSSES[loss](f(z, w)), (0, 1))  # noqa: E731
    assert_same(of(h)(Z, W), of(lambda z, w: z * z * w)(Z, W))


def test_complex_upstreams_are_those_of_tensorflow():
    """`dL/dRe + i dL/dIm`: 1 for the real part, 1j for the imaginary part, 2 y for |y|**2."""
    seen = []

    @custom_gradient
    def h(z):
        return z, lambda dy: (seen.append(dy), dy)[1]

    for loss in REAL_LOSSES.values():
        jax.grad(lambda z, loss=loss: loss(h(z)))(Z)
    assert_same(seen, [jnp.complex64(1), jnp.complex64(1j), 2 * Z])


def test_complex_wrong_factor_proves_the_rule_ran():
    h = custom_gradient(lambda z: (z * z, lambda dy: 7 * dy * jnp.conj(2 * z)))
    plain = jax.grad(lambda z: jnp.real(z * z))(Z)
    assert_same(jax.grad(lambda z: jnp.real(h(z)))(Z), 7 * plain)
    assert_same(jax.grad(h, holomorphic=True)(Z), 7 * 2 * Z)


def test_complex_second_order():
    """`L = Re h(z)`, the rule calling `h` again: `h = exp`, rule 7 `conj(h)`."""

    @custom_gradient
    def h(z):
        return jnp.exp(z), lambda dy: 7 * dy * jnp.conj(h(z))

    second = jax.grad(jax.grad(h, holomorphic=True), holomorphic=True)
    assert_same(second(Z), 49 * jnp.exp(Z))
    assert_same(jax.jit(second)(Z), 49 * jnp.exp(Z))


def test_modulus():
    """A real output of a complex input: TensorFlow returns `dy z / |z|`."""

    @custom_gradient
    def modulus(z):
        r = jnp.abs(z)
        return r, lambda dy: lax.complex(dy / r, jnp.zeros_like(r)) * z

    assert_same(jax.grad(modulus)(Z), jax.grad(jnp.abs)(Z))
    assert_same(jax.jit(jax.grad(modulus))(Z), jax.grad(jnp.abs)(Z))


def test_real_input_complex_output():
    @custom_gradient
    def rotate(t):
        y = jnp.exp(1j * t)
        return y, lambda dy: jnp.real(dy * jnp.conj(1j * y))

    plain = lambda t: jnp.imag(jnp.exp(1j * t))  # noqa: E731
    assert_same(jax.grad(lambda t: jnp.imag(rotate(t)))(0.5), jax.grad(plain)(0.5))


def test_python_complex_input():
    h = custom_gradient(lambda z: (z * z, lambda dy: 7 * dy * jnp.conj(2 * z)))
    assert_same(jax.grad(lambda z: jnp.real(h(z)))(1 + 2j), jnp.complex64(7 * 2 * (1 + 2j)))


def test_real_code_conjugates_nothing():
    jaxpr = str(jax.make_jaxpr(jax.grad(square))(1.0))
    assert not re.search(r"\b(conj|complex|real|imag)\[|\bc64\b", jaxpr)
