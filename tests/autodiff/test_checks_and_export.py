"""`checkify` sees into functions and rules, and `jax.export` takes both to all platforms."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import export
from jax.experimental import checkify
from ways import gradient, hessian

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
X = jnp.float32(2)


@custom_gradient
def checked(x):
    checkify.check(x > 0, "f: not positive")

    def grad(dy):
        checkify.check(dy < 100, "rule: too large")
        return 7 * dy * x

    return x**2, grad


def checked_closure(x):
    w = x * 1.0

    @custom_gradient
    def f(x):
        checkify.check(w > 0, "f: not positive")

        def grad(dy, variables=()):
            checkify.check(dy < 100, "rule: too large")
            by_x = 7 * dy * jax.lax.stop_gradient(x)
            return (by_x, [0 * dy for _ in variables]) if variables else by_x

        return x * jax.lax.stop_gradient(w) + 0 * w, grad

    return f(x)


def by_hand(x):
    h = jax.custom_vjp(lambda x: x**2)

    def forward(x):
        checkify.check(x > 0, "f: not positive")
        return x**2, x

    def backward(x, dy):
        checkify.check(dy < 100, "rule: too large")
        return (7 * dy * x,)

    h.defvjp(forward, backward)
    return h(x)


@MODES
@pytest.mark.parametrize("h", [checked, checked_closure])
def test_value(h, mode):
    error, y = mode(checkify.checkify(h))(X)
    error.throw()
    assert_same(y, jnp.float32(4))
    error, _ = mode(checkify.checkify(h))(-X)
    with pytest.raises(checkify.JaxRuntimeError, match="f: not positive"):
        error.throw()


def _run(h, mode, x, scale):
    error, g = mode(checkify.checkify(jax.grad(lambda x: scale * h(x))))(x)
    return error.get(), g


@MODES
@pytest.mark.parametrize("h", [checked, checked_closure])
@pytest.mark.parametrize(("x", "scale"), [(2.0, 1.0), (-2.0, 1.0), (2.0, 1000.0)])
def test_gradient(h, mode, x, scale):
    """The same errors and numbers as by hand, where JAX checks there."""
    try:
        message, expected = _run(by_hand, mode, jnp.float32(x), scale)
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")
    found, got = _run(h, mode, jnp.float32(x), scale)
    assert (found is None) == (message is None)
    if message is not None:
        assert message.split(" (")[0] in found
    assert_same(got, expected)


@MODES
def test_nan_checks_in_the_rule(mode):
    @custom_gradient
    def h(x):
        return x**2, lambda dy: 7 * dy * jnp.log(x - 3)

    checked = checkify.checkify(jax.grad(h), errors=checkify.nan_checks)
    error, _ = mode(checked)(X)
    assert "nan" in error.get()
    error, got = mode(checked)(jnp.float32(4))
    assert error.get() is None
    assert_same(got, jnp.float32(0))


# --- export ---------------------------------------------------------------------------------------


@custom_gradient
def plain(w, x):
    return w * x**2, lambda dy: (5 * dy * x**2, 7 * dy * w * x)


def captured(w, x):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f(x)


def ignored(w, x):
    @custom_gradient
    def f(w, x, k):
        return w * x**2, lambda dy: (5 * dy * x**2, 7 * dy * k * x, None)

    return f(w, x, jax.lax.stop_gradient(w))


ARGS = jnp.float32(3), jnp.float32(2)
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def exported(f):
    data = export.export(jax.jit(f), platforms=PLATFORMS)(*ARGS).serialize()
    again = export.deserialize(data)
    assert set(again.platforms) == set(PLATFORMS)
    return again.call


@pytest.mark.parametrize("h", [plain, captured, ignored])
def test_export_of_value_and_gradients(h):
    assert_same(exported(h)(*ARGS), jnp.float32(12))
    assert_same(exported(gradient(h))(*ARGS), (jnp.float32(20), jnp.float32(42)))
    forward = jax.jacfwd(h, (0, 1))
    assert_same(exported(forward)(*ARGS), (jnp.float32(20), jnp.float32(42)))


@pytest.mark.parametrize("h", [plain, captured])
def test_export_of_a_hessian(h):
    expected = ((0.0, 20.0), (14.0, 21.0))
    assert_same(exported(hessian(h))(*ARGS), jax.tree.map(jnp.float32, expected))


@pytest.mark.parametrize("h", [plain, captured, ignored])
def test_export_with_its_own_vjp(h):
    """`vjp_order=1`: the exported program carries the declared gradient."""
    data = export.export(jax.jit(h), platforms=PLATFORMS)(*ARGS).serialize(vjp_order=1)
    call = export.deserialize(data).call
    assert_same(gradient(call)(*ARGS), (jnp.float32(20), jnp.float32(42)))


@pytest.mark.parametrize("h", [plain, captured, ignored])
def test_export_with_an_unknown_size(h):
    """A mapped gradient of any number of rows."""
    (n,) = export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    mapped = jax.jit(jax.vmap(gradient(h)))
    call = export.export(mapped, platforms=PLATFORMS)(shape, shape).call
    w, x = jnp.float32([3, 1, 2]), jnp.float32([2, 1, 3])
    assert_same(tuple(call(w, x)), (5 * x**2, 7 * w * x))
