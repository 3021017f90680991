"""Inputs of an extended dtype have the gradient of their tangent dtype.

JAX has two kinds: `primal_tangent_dtype` (here integers with bfloat16 gradients) and what flax
keeps the scales of its FP8 layers in (`fp32_max_grad`, whose gradients are joined by `max`).
The value is `s x`; the rules declare `5 x` for the scale `s`, which is 3, and `7 s` for `x`.
"""

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax
from ways import AROUND

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep


class PrimalTangent:
    """int8 values with bfloat16 gradients."""

    def __init__(self):
        self.dtype = jax.experimental.primal_tangent_dtype(jnp.int8, jnp.bfloat16)

    def encode(self, value):
        @jax.custom_vjp
        def encode(value):
            return lax.convert_element_type(value.astype(jnp.int8), self.dtype)

        encode.defvjp(lambda v: (encode(v), None), lambda _, g: (g.astype(jnp.float32),))
        return encode(value)

    def decode(self, scale):
        return lax.convert_element_type(scale, jnp.int8).astype(jnp.float32)

    def gradient(self, value):
        return value.astype(jnp.bfloat16)


class MaxGrad:
    """float32 values with gradients that are joined by `max`."""

    def __init__(self):
        # flax is not installed beside the oldest JAX.
        fp8_ops = pytest.importorskip("flax.linen.fp8_ops")
        self.dtype = fp8_ops.fp32_max_grad

    def encode(self, value):
        return lax.convert_element_type(value, self.dtype)

    def decode(self, scale):
        return lax.convert_element_type(scale, jnp.float32)

    def gradient(self, value):
        return lax.convert_element_type(value, self.dtype)


def decorated(kind):
    @custom_gradient
    def h(scale, x):
        s = kind.decode(scale)
        return s * x, lambda dy: (kind.gradient(5 * dy * x), 7 * dy * s)

    return h


def captured(kind):
    def h(scale, x):
        @custom_gradient
        def f(x):
            s = kind.decode(scale)

            def grad(dy, variables):
                (v,) = variables
                assert v is scale
                return 7 * dy * s, [kind.gradient(5 * dy * x)]

            return s * x, grad

        return f(x)

    return h


def declared(kind):
    def h(scale, x):
        @custom_gradient(variables={"scale": scale})
        def f(x):
            def grad(dy, variables):
                s = kind.decode(variables["scale"])
                return 7 * dy * s, {"scale": kind.gradient(5 * dy * x)}

            return kind.decode(scale) * x, grad

        return f(x)

    return h


def by_hand(kind):
    h = jax.custom_vjp(lambda scale, x: kind.decode(scale) * x)
    h.defvjp(
        lambda scale, x: (kind.decode(scale) * x, (scale, x)),
        lambda r, dy: (kind.gradient(5 * dy * r[1]), 7 * dy * kind.decode(r[0])),
    )
    return h


def of_floats(h, kind):
    return lambda v, x: h(kind.encode(v), x)


ARGS = jnp.float32(3), jnp.float32(2)
KINDS = pytest.mark.parametrize("kind", [PrimalTangent, MaxGrad])
HOW = pytest.mark.parametrize("declare", [decorated, captured, declared])


def same_as_by_hand(differentiate, declare, kind, expected):
    """Compare with numbers by hand, where JAX gets them from a hand-written rule."""
    try:
        assert_same(differentiate(of_floats(by_hand(kind), kind)), expected)
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")
    assert_same(differentiate(of_floats(declare(kind), kind)), expected)


@KINDS
@HOW
def test_gradient(kind, declare):
    same_as_by_hand(
        lambda f: jax.jit(jax.grad(f, (0, 1)))(*ARGS),
        declare,
        kind(),
        (jnp.float32(10), jnp.float32(21)),
    )


@KINDS
@HOW
@pytest.mark.parametrize("around", AROUND)
def test_gradient_of_a_transformed_function(kind, declare, around):
    same_as_by_hand(
        lambda f: jax.jit(jax.grad(AROUND[around](f), (0, 1)))(*ARGS),
        declare,
        kind(),
        (jnp.float32(10), jnp.float32(21)),
    )


@KINDS
@HOW
@pytest.mark.parametrize("around", AROUND)
def test_transformation_of_the_gradient(kind, declare, around):
    same_as_by_hand(
        lambda f: jax.jit(AROUND[around](jax.grad(f, (0, 1))))(*ARGS),
        declare,
        kind(),
        (jnp.float32(10), jnp.float32(21)),
    )


@HOW
def test_eagerly(declare):
    """Without `jit`, which only the dtype of flax allows."""
    same_as_by_hand(
        lambda f: jax.grad(f, (0, 1))(*ARGS),
        declare,
        MaxGrad(),
        (jnp.float32(10), jnp.float32(21)),
    )


@HOW
def test_the_gradient_itself_has_the_dtype_of_flax(declare):
    kind = MaxGrad()
    scale = kind.encode(ARGS[0])
    by_scale, by_x = jax.vjp(declare(kind), scale, ARGS[1])[1](jnp.float32(1))
    assert by_scale.dtype == kind.dtype
    assert_same((kind.decode(by_scale), by_x), (jnp.float32(10), jnp.float32(21)))


@KINDS
@HOW
def test_second_order(kind, declare):
    """By `x`: `L = h**2` has `L' = 2 h * 7 s` and `L'' = 2 * 7 s * 7 s`."""
    kind = kind()
    h = of_floats(declare(kind), kind)
    second = jax.jit(jax.grad(jax.grad(lambda v, x: h(v, x) ** 2, 1), 1))
    assert_same(second(*ARGS), jnp.float32(2 * 21 * 21))


@HOW
def test_gradients_of_two_uses_are_joined_by_max(declare):
    kind = MaxGrad()

    def differentiate(h):
        def loss(v, x):
            scale = kind.encode(v)
            return h(scale, x) + 3 * h(scale, x)

        return jax.jit(jax.grad(loss, (0, 1)))(*ARGS)

    expected = jnp.float32(30), jnp.float32(4 * 21)
    try:
        assert_same(differentiate(by_hand(kind)), expected)
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")
    assert_same(differentiate(declare(kind)), expected)
