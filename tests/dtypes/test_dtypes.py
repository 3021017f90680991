"""Each gradient has its input's dtype: precision, numbers, NumPy, integers, keys, complex."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient


def product(of_f, of_rule):
    """Return `w x` in one dtype, whose rule computes in another; wrong by 5 for w and 7 for x."""

    @custom_gradient
    def h(w, x):
        def grad(dy):
            assert dy.dtype == of_f
            dy, a, b = (v.astype(of_rule) for v in (dy, w, x))
            return 5 * dy * b, 7 * dy * a

        return w.astype(of_f) * x.astype(of_f), grad

    return h


# dtypes of w, of x, of the product, and of the rule
HALF, SINGLE = jnp.bfloat16, jnp.float32
DTYPES = {
    "bfloat16": (HALF, HALF, HALF, SINGLE),
    "float16": (jnp.float16, jnp.float16, jnp.float16, SINGLE),
    "rule in half precision": (SINGLE, SINGLE, SINGLE, HALF),
    "output in half precision": (SINGLE, SINGLE, HALF, SINGLE),
    "master weights": (SINGLE, HALF, HALF, SINGLE),
    "float8 output": (SINGLE, SINGLE, jnp.float8_e5m2, SINGLE),
}


@eager_and_jit
@pytest.mark.parametrize("name", DTYPES)
def test_gradients_and_tangents_have_the_dtypes_of_inputs_and_outputs(name, mode):
    dtype_w, dtype_x, of_f, of_rule = DTYPES[name]
    w, x = jnp.asarray([1, 2], dtype_w), jnp.asarray([3, 4], dtype_x)
    h = product(of_f, of_rule)
    gradient = jax.grad(lambda w, x: jnp.sum(h(w, x).astype(SINGLE)), (0, 1))
    expected = jnp.asarray([15, 20], dtype_w), jnp.asarray([7, 14], dtype_x)
    assert_same(mode(gradient)(w, x), expected)
    assert_same(mode(jax.vmap(gradient))(w, x), expected)
    dy = mode(lambda w, x: jax.jvp(h, (w, x), (jnp.ones_like(w), jnp.ones_like(x)))[1])(w, x)
    assert_same(dy, jnp.float32([5 * 3 + 7 * 1, 5 * 4 + 7 * 2]).astype(of_f), rtol=0.2)


square = custom_gradient(lambda x: (x * x, lambda dy: 7 * dy * x))


def test_x64(x64):
    x = np.float64(1) / 3
    assert_same(jax.grad(square)(x), jnp.asarray(7 * x, jnp.float64), rtol=1e-15, atol=0)
    assert_same(jax.grad(square)(1.0), jnp.float64(7))
    assert_same(jax.grad(square)(jnp.float32(1)), jnp.float32(7))
    w, x = jnp.float64(2), jnp.float32(3)
    mixed = jax.grad(product(jnp.float32, jnp.float64), (0, 1))
    for f in (mixed, jax.jit(mixed)):
        assert_same(f(w, x), (jnp.float64(15), jnp.float32(14)))
    z = jnp.complex128(1 + 2j) / 3
    h = custom_gradient(lambda z: (z * z, lambda dy: 7 * dy * jnp.conj(2 * z)))
    assert_same(jax.grad(h, holomorphic=True)(z), 14 * z, rtol=1e-15, atol=0)


# --- Python numbers and NumPy ---------------------------------------------------------------------


@eager_and_jit
def test_python_float_stays_weakly_typed(mode):
    """A Python float beside bfloat16 does not make float32 of it."""
    x = jnp.bfloat16(3)
    h = custom_gradient(lambda x, y: (x * y, lambda dy: (7 * dy * y, 5 * dy * x)))
    assert_same(mode(h)(x, 2.0), jnp.bfloat16(6))
    assert_same(mode(jax.grad(h, (0, 1)))(x, 2.0), (jnp.bfloat16(14), jnp.float32(15)))
    assert_same(mode(h)(3.0, 2.0) * x, jnp.bfloat16(18))  # so is a value computed of such numbers


def test_a_number_that_is_not_differentiated_stays_a_number():
    seen = []

    @custom_gradient
    def h(x, y):
        seen.append(type(y))
        return x * y, lambda dy: (7 * dy * y, 5 * dy * x)

    assert_same(jax.grad(h)(3.0, 2.0), jnp.float32(14))
    assert seen == [float]
    # By `y` at the second order alone: d/dy (7 y).
    assert_same(jax.grad(lambda y: jax.grad(h)(3.0, y))(2.0), jnp.float32(7))


NUMPY = np.float32(3), np.float32([1, 3]), np.asarray(3, jnp.bfloat16), np.array(3, np.float16)


@pytest.mark.parametrize("x", NUMPY, ids=["scalar", "array", "bfloat16", "0-d"])
def test_numpy_inputs(x):
    loss = lambda x: jnp.sum(square(x))  # noqa: E731
    assert_same(jax.grad(loss)(x), jnp.asarray(7 * x, x.dtype))
    assert_same(jax.jit(jax.grad(loss))(x), jnp.asarray(7 * x, x.dtype))
    assert type(square(x)) is type(x * x)  # eagerly NumPy in, NumPy out


# --- integers and booleans ------------------------------------------------------------------------


def test_integer_gradients_are_float0_to_jax():
    """What a rule returns for an integer counts for nothing; `jax.vjp` itself has float0 there."""
    h = custom_gradient(lambda x, n: (x * 2, lambda dy: (7 * dy, 3 * dy)))
    _, pull_back = jax.vjp(h, 1.0, jnp.int32(3))
    dx, dn = pull_back(jnp.float32(1))
    assert_same(dx, jnp.float32(7))
    assert dn.dtype == jax.dtypes.float0
    allowed = jax.grad(h, (0, 1), allow_int=True)(1.0, jnp.int32(3))
    assert allowed[1].dtype == jax.dtypes.float0


# --- PRNG keys ------------------------------------------------------------------------------------


def dropout(key, x):
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(keep, 2 * x, 0), lambda dy: (None, jnp.where(keep, 7 * dy, 0))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_random_keys(make_key):
    h = custom_gradient(dropout)
    key, x = make_key(3), jnp.arange(1.0, 9.0)
    kept = np.asarray(jax.random.bernoulli(key, 0.5, x.shape))
    assert 0 < kept.sum() < 8
    gradient = jax.grad(lambda key, x: jnp.sum(h(key, x)), 1)
    expected = jnp.where(kept, jnp.float32(7), 0)
    assert_same((gradient(key, x), jax.jit(gradient)(key, x)), (expected, expected))


# --- complex numbers: in both conventions as `jax.grad` of the plain function ---------------------

Z, W, T = jnp.complex64(1 + 2j), jnp.complex64(3 - 1j), jnp.float32(0.5)

# name: plain function, its rule in TensorFlow's convention, `dy * conj(f'(z))`, and arguments.
FUNCTIONS = {
    "product": (lambda z, w: z * w, lambda z, w, dy: (dy * jnp.conj(w), dy * jnp.conj(z)), (Z, W)),
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
    f, rule, _ = FUNCTIONS[name]
    turn = jnp.conj if convention == "jax" else lambda g: g

    def pair(*args):
        return f(*args), lambda dy: jax.tree.map(turn, rule(*args, 7 * turn(dy)))

    return custom_gradient(pair, convention=convention)


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


def test_a_complex_number_of_python_and_no_gradient():
    h = custom_gradient(lambda z, t: (t * z, lambda dy: (7 * dy, None)))
    got = jax.grad(lambda z, t: jnp.real(h(z, t)), (0, 1))(1 + 2j, Z)
    assert_same(got, (jnp.complex64(7), jnp.complex64(0)))


def test_real_code_conjugates_nothing():
    jaxpr = str(jax.make_jaxpr(jax.grad(square))(1.0))
    assert not re.search(r"\b(conj|complex|real|imag)\[|\bc64\b", jaxpr)
