"""Complex numbers: in both conventions `jax.grad` agrees with that of the plain function."""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit
from jax import lax

from tfgrad_jax import custom_gradient

Z, W, T = jnp.complex64(1 + 2j), jnp.complex64(3 - 1j), jnp.float32(0.5)

# name: plain function, its rule in TensorFlow's convention, `dy * conj(f'(z))`, and arguments.
FUNCTIONS = {
    "product": (lambda z, w: z * w, lambda z, w, dy: (dy * jnp.conj(w), dy * jnp.conj(z)), (Z, W)),
    "exponential": (
        lambda z, w: jnp.exp(z * w),
        lambda z, w, dy: tuple(dy * jnp.conj(v * jnp.exp(z * w)) for v in (w, z)),
        (Z, W / 4),
    ),
    "modulus": (jnp.abs, lambda z, dy: lax.complex(dy / jnp.abs(z), 0 * dy) * z, (Z,)),
    "conjugate": (jnp.conj, lambda z, dy: jnp.conj(dy), (Z,)),
    "of a real": (
        lambda t: lax.complex(jnp.cos(t), jnp.sin(t)),
        lambda t, dy: jnp.real(dy * lax.complex(-jnp.sin(t), -jnp.cos(t))),
        (T,),
    ),
}
LOSSES = {
    "real part": jnp.real,
    "imaginary part": jnp.imag,
    "square of the modulus": lambda y: jnp.real(y * jnp.conj(y)),
}


def declared(name, convention):
    """Declare seven times the gradient; JAX's convention has conjugates of both."""
    f, rule, args = FUNCTIONS[name]
    turn = jnp.conj if convention == "jax" else lambda g: g

    def pair(*args):
        return f(*args), lambda dy: jax.tree.map(turn, rule(*args, 7 * turn(dy)))

    h = (lambda z, w: pair(z, w)) if len(args) == 2 else (lambda z: pair(z))
    return custom_gradient(h, convention=convention)


@eager_and_jit
@pytest.mark.parametrize("convention", ["tf", "jax"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_seven_times_the_derivatives_of_the_plain_function(name, convention, mode):
    f, _, args = FUNCTIONS[name]
    h, tangents = declared(name, convention), tuple(2 * a for a in args)
    y, dy = jax.jvp(f, args, tangents)
    assert_same(mode(lambda *args: jax.jvp(h, args, tangents))(*args), (y, 7 * dy))
    for loss in LOSSES.values():

        def gradient(f, loss=loss):
            return jax.grad(lambda *args: loss(f(*args)), tuple(range(len(args))))(*args)

        got = mode(lambda gradient=gradient: gradient(h))()
        assert_same(got, jax.tree.map(lambda g: 7 * g, gradient(f)))


@eager_and_jit
def test_holomorphic_derivatives_at_second_order(mode):
    """The rule calls `h` again: `h = exp`, rule 7 `conj(h)`."""
    h = custom_gradient(lambda z: (jnp.exp(z), lambda dy: 7 * dy * jnp.conj(h(z))))
    first = jax.grad(h, holomorphic=True)
    assert_same(mode(first)(Z), 7 * jnp.exp(Z))
    assert_same(mode(jax.grad(first, holomorphic=True))(Z), 49 * jnp.exp(Z))


def test_a_python_number():
    h = custom_gradient(lambda z: (z * z, lambda dy: 7 * dy * jnp.conj(2 * z)))
    assert_same(jax.grad(lambda z: jnp.real(h(z)))(1 + 2j), jnp.complex64(7 * 2 * (1 + 2j)))


def test_real_code_conjugates_nothing():
    square = custom_gradient(lambda x: (x * x, lambda dy: 7 * dy * x))
    jaxpr = str(jax.make_jaxpr(jax.grad(square))(1.0))
    assert not re.search(r"\b(conj|complex|real|imag)\[|\bc64\b", jaxpr)
