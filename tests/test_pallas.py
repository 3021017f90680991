"""Decorated functions inside Pallas kernels, lowered for TPU and GPU, and interpreted.

What stands in a kernel must lower there: nothing of the decorator may stay in it where nothing is
differentiated. The value is `x sigmoid(x)`; the rules declare 7 where it is not.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.nn import sigmoid
from limits import drops_in_scan
from support.helpers import assert_same, lowered_for_gpu

from tfgrad_jax import custom_gradient

SHAPE = (8, 128)
X = jnp.linspace(-1, 1, 8 * 128, dtype=jnp.float32).reshape(SHAPE)
Y = X + 0.5


@custom_gradient
def one(x):
    s = sigmoid(x)
    return x * s, lambda dy: 7 * dy * s


@custom_gradient
def two(x, y):
    return x * y, lambda dy: (7 * dy * y, 5 * dy * x)


@custom_gradient
def ignored_by_y(x, k):
    """Only the rule uses `k`."""
    return x + x, lambda dy: (7 * dy * k, None)


def captured(x, y):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * y, [5 * dy * x for _ in variables]

        return x * y, grad

    return f(x)


def autodiff(x, y):
    @custom_gradient(variables="autodiff")
    def f(x):
        return x * y, lambda dy: 7 * dy * y

    return f(x)


@custom_gradient
def nested(x, y):
    return two(one(x), y), lambda dy: (7 * dy * one(y), 5 * dy)


# name: function of x and y, its value, and its gradients for the upstream 1
FUNCTIONS = {
    "two": (two, X * Y, (7 * Y, 5 * X)),
    "ignored": (ignored_by_y, X + X, (7 * Y, jnp.zeros(SHAPE))),
    "captured": (captured, X * Y, (7 * Y, 5 * X)),
    "autodiff": (autodiff, X * Y, (7 * Y, X)),
    "nested": (nested, X * sigmoid(X) * Y, (7 * Y * sigmoid(Y), jnp.full(SHAPE, 5.0))),
}
BY_HAND = jax.custom_vjp(lambda x, y: x * y)
BY_HAND.defvjp(lambda x, y: (x * y, (x, y)), lambda r, dy: (7 * dy * r[1], 5 * dy * r[0]))


def kernel_of(f, **options):
    """Return a kernel that calls `f` on two blocks and writes all that it returns."""
    return pl.pallas_call(body_of(f), out_shape=jax.eval_shape(f, X, Y), **options)


def body_of(f):
    def kernel(x_ref, y_ref, *out_refs):
        for ref, result in zip(out_refs, f(x_ref[...], y_ref[...]), strict=True):
            ref[...] = result

    return kernel


def value(h):
    return lambda x, y: (h(x, y),)


def gradients(h):
    return jax.grad(lambda x, y: jnp.sum(h(x, y)), (0, 1))


def pushed(h):
    """Return the derivative along both inputs: the sum of the declared gradients."""
    return lambda x, y: (jax.jvp(h, (x, y), (jnp.ones_like(x), jnp.ones_like(y)))[1],)


def lower(platform, f):
    """Lower a kernel, and return whether it is one of the platform."""
    if platform == "tpu":
        lowered = jax.jit(kernel_of(f)).trace(X, Y).lower(lowering_platforms=("tpu",))
        return "tpu_custom_call" in lowered.as_text()
    kernel = kernel_of(f, compiler_params=triton.CompilerParams())
    return "xla.gpu.triton" in lowered_for_gpu(kernel, X, Y)


def lowers_by_hand(platform, derivative):
    try:
        return lower(platform, derivative(BY_HAND))
    except Exception:  # of many kinds, by version: no rule can do what JAX cannot
        return False


@pytest.mark.parametrize("name", FUNCTIONS)
def test_interpreted(name):
    """The value, the gradient and forward mode, inside of a kernel."""
    h, expected, (by_x, by_y) = FUNCTIONS[name]
    for f, right in (
        (value(h), (expected,)),
        (gradients(h), (by_x, by_y)),
        (pushed(h), (by_x + by_y,)),
    ):
        assert_same(tuple(jax.jit(kernel_of(f, interpret=True))(X, Y)), right)


# JAX 0.12 advises against Triton, the one backend for GPUs that lowers without one.
lowered = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
# Triton knows no custom_vjp, and before JAX 0.12 a scan needs one below the custom_jvp.
BELOW = "there is a custom_vjp below the custom_jvp: a limit"


@lowered
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_value_lowers(name, platform):
    if platform == "gpu" and drops_in_scan():
        pytest.skip(BELOW)
    if platform != "gpu" and not lowers_by_hand(platform, value):
        pytest.skip("JAX lowers no hand-written rule there")
    f = value(FUNCTIONS[name][0])
    # Mapped, its value must be; or it asks which variables are differentiated.
    if name == "ignored" or (name == "captured" and platform == "tpu"):
        with pytest.raises(NotImplementedError, match="depend" if name == "ignored" else None):
            lower(platform, f)
    else:
        assert lower(platform, f)


@lowered
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_lowers(name, platform):
    if not lowers_by_hand(platform, gradients):
        pytest.skip("JAX lowers no hand-written rule there")
    if platform == "gpu" and name == "nested" and drops_in_scan():
        pytest.skip(BELOW)
    assert lower(platform, gradients(FUNCTIONS[name][0]))


def test_a_primal_in_a_kernel():
    """Its value is laid out as that of the function, by what a kernel knows."""
    h = custom_gradient(lambda x: (x * 1.0, lambda dy: 7 * dy * x), primal=lambda x: x * 3.0)

    def kernel(i, o):
        o[...] = h(i[...])

    shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    jax.jit(pl.pallas_call(kernel, shape)).trace(X).lower(lowering_platforms=("tpu",))
    assert_same(pl.pallas_call(kernel, shape, interpret=True)(X), X * 3)
