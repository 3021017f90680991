"""Dtypes: what goes in comes out as the gradient's own, whatever the rule computes in."""

import operator

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


# --- integers and booleans ------------------------------------------------------------------------


@custom_gradient
def selected(x, indices, mask):
    y = jnp.where(mask, x[indices], 0)

    def grad(dy):
        return 7 * jnp.zeros_like(x).at[indices].add(jnp.where(mask, dy, 0))

    return y, grad


def test_integer_and_boolean_inputs():
    x = jnp.float32([1, 2, 3])
    indices, mask = jnp.array([2, 0]), jnp.array([True, False])
    loss = lambda x, i, m: jnp.sum(selected(x, i, m))  # noqa: E731
    for f in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert_same(f(x, indices, mask), jnp.float32([0, 0, 7]))
    batch = (jnp.stack([x, x]), jnp.stack([indices, indices]), jnp.stack([mask, ~mask]))
    assert_same(jax.vmap(jax.grad(loss))(*batch), jnp.float32([[0, 0, 7], [7, 0, 0]]))


def test_integer_gradients_are_float0_to_jax():
    """What a rule returns for an integer counts for nothing; `jax.vjp` itself has float0 there."""
    h = custom_gradient(lambda x, n: (x * 2, lambda dy: (7 * dy, 3 * dy)))
    _, pull_back = jax.vjp(h, 1.0, jnp.int32(3))
    dx, dn = pull_back(jnp.float32(1))
    assert_same(dx, jnp.float32(7))
    assert dn.dtype == jax.dtypes.float0
    allowed = jax.grad(h, (0, 1), allow_int=True)(1.0, jnp.int32(3))
    assert allowed[1].dtype == jax.dtypes.float0


def test_integers_in_scan():
    """Masks and indices as residuals, carried by a jitted scan."""
    x = jnp.float32([1, 2, 3])

    def loss(x):
        def body(c, i):
            return c + selected(x, i[None], (i > 0)[None])[0], i

        return lax.scan(body, jnp.float32(0), jnp.arange(3))[0]

    assert_same(jax.jit(jax.value_and_grad(loss))(x), (jnp.float32(5), jnp.float32([0, 7, 7])))


def test_integer_output_only():
    """Nothing flows through a function without floating output."""
    h = custom_gradient(lambda x: (jnp.int32(x), lambda dy: 7 * dy))
    assert_same(jax.grad(lambda x: x * h(x).astype(jnp.float32))(3.0), jnp.float32(3))
    assert_same(jax.jit(h)(3.7), jnp.int32(3))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.bool_], ids=["int8", "uint32", "bool"])
def test_upstream_of_an_output_without_derivative(dtype):
    """Zeros of its own dtype, never float0, in every way that a rule can be run."""

    @custom_gradient
    def h(x):
        def grad(dy, di):
            assert di.dtype == dtype
            assert di.shape == (2,)
            return 7 * dy + jnp.sum(di).astype(dy.dtype)

        return (2 * x, jnp.ones(2, dtype)), grad

    loss = lambda x: h(x)[0]  # noqa: E731
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert_same(jax.grad(f)(1.0), jnp.float32(7))
    assert_same(jax.vmap(jax.grad(loss))(jnp.ones(2)), jnp.float32([7, 7]))
    _, pull_back = jax.vjp(h, jnp.ones(()))
    assert_same(pull_back((jnp.float32(1), np.zeros(2, jax.dtypes.float0))), (jnp.float32(7),))


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
    loss = lambda key, x: jnp.sum(h(key, x))  # noqa: E731
    expected = jnp.where(kept, jnp.float32(7), 0)
    assert_same(jax.grad(loss, 1)(key, x), expected)
    assert_same(jax.jit(jax.grad(loss, 1))(key, x), expected)
    keys = jax.random.split(key, 2)
    batch = jax.vmap(jax.grad(loss, 1), (0, None))(keys, x)
    assert_same(batch[1], jax.grad(loss, 1)(keys[1], x))
    scanned = lax.scan(lambda c, k: (c, jax.grad(loss, 1)(k, x)), 0, keys)[1]
    assert_same(scanned, batch)


def test_random_key_as_output():
    @custom_gradient
    def h(key, x):
        new_key, _ = jax.random.split(key)
        return (new_key, x * 2), lambda _, dy: (None, 7 * dy)

    key = jax.random.key(0)
    for f in (h, jax.jit(h)):
        value, gradient = jax.value_and_grad(lambda x, f=f: f(key, x)[1])(1.0)
        assert_same((value, gradient), (jnp.float32(2), jnp.float32(7)))
    expected = jax.random.split(key)[0]
    actual = h(key, 1.0)[0]
    np.testing.assert_array_equal(jax.random.key_data(actual), jax.random.key_data(expected))


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
    assert "conj" not in jaxpr
    assert "complex" not in jaxpr


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
