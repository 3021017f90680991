"""Inputs of an extended dtype have the gradient of their tangent dtype.

JAX has two kinds: `primal_tangent_dtype` (here integers with bfloat16 gradients) and what flax
keeps the scales of its FP8 layers in (`fp32_max_grad`, whose gradients are joined by `max`).
The value is `s x`; the rules declare `5 x` for the scale `s`, which is 3, and `7 s` for `x`.
"""

import itertools

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, sample
from support.ways import REVERSE

from tfgrad_jax import custom_gradient


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
                assert all(v is scale for v in variables)  # none, where only `x` is differentiated
                return 7 * dy * s, [kind.gradient(5 * dy * x)] * len(variables)

            return s * x, grad

        return f(x)

    return h


def by_hand(kind):
    h = jax.custom_vjp(lambda scale, x: kind.decode(scale) * x)
    h.defvjp(
        lambda scale, x: (kind.decode(scale) * x, (scale, x)),
        lambda r, dy: (kind.gradient(5 * dy * r[1]), 7 * dy * kind.decode(r[0])),
    )
    return h


ARGS = jnp.float32(3), jnp.float32(2)
WAYS = decorated, captured
every_way = pytest.mark.parametrize("declare", WAYS)
MANY = sample(itertools.product((PrimalTangent, MaxGrad), WAYS, REVERSE), 16)


def of_floats(h, kind):
    return lambda v, x: h(kind.encode(v), x)


def check(differentiate, declare, kind, *expected):
    """Compare with known numbers, where JAX gets them from a hand-written rule."""
    expected = tuple(map(jnp.float32, expected))
    try:
        assert_same(differentiate(by_hand(kind)), expected)
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")
    assert_same(differentiate(declare(kind)), expected)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("kind", "declare", "way"), MANY)
def test_gradients_under_transformations(kind, declare, way):
    """Under `jit`, which all but the dtype of flax need."""
    kind = kind()
    check(lambda h: jax.jit(REVERSE[way](of_floats(h, kind)))(*ARGS), declare, kind, 10, 21)


@every_way
def test_eagerly_the_gradient_itself_has_the_dtype_of_flax(declare):
    kind = MaxGrad()
    check(lambda h: jax.grad(of_floats(h, kind), (0, 1))(*ARGS), declare, kind, 10, 21)
    scale = kind.encode(ARGS[0])
    by_scale, by_x = jax.vjp(declare(kind), scale, ARGS[1])[1](jnp.float32(1))
    assert by_scale.dtype == kind.dtype
    assert_same((kind.decode(by_scale), by_x), (jnp.float32(10), jnp.float32(21)))


def test_a_float_is_cast_to_the_dtype_of_flax_and_an_integer_is_refused():
    kind = MaxGrad()

    def pulled(gradient):
        h = custom_gradient(lambda s, x: (kind.decode(s) * x, lambda dy: (gradient, 7 * dy)))
        return kind.decode(jax.vjp(h, kind.encode(ARGS[0]), ARGS[1])[1](jnp.float32(1))[0])

    assert_same(pulled(jnp.float32(10)), jnp.float32(10))
    assert_same(pulled(10.0), jnp.float32(10))
    with pytest.raises(TypeError, match="a gradient of type int32"):
        pulled(jnp.int32(10))


@every_way
@pytest.mark.parametrize("kind", (PrimalTangent, MaxGrad))
def test_second_order(kind, declare):
    """By `x`: `L = h**2` has `L' = 2 h * 7 s` and `L'' = 2 * 7 s * 7 s`."""
    kind = kind()
    h = of_floats(declare(kind), kind)
    second = jax.jit(jax.grad(jax.grad(lambda v, x: h(v, x) ** 2, 1), 1))
    assert_same(second(*ARGS), jnp.float32(2 * 21 * 21))


@every_way
def test_gradients_of_two_uses_are_joined_by_max(declare):
    kind = MaxGrad()

    def differentiate(h):
        def loss(v, x):
            scale = kind.encode(v)
            return h(scale, x) + 3 * h(scale, x)

        return jax.jit(jax.grad(loss, (0, 1)))(*ARGS)

    check(differentiate, declare, kind, 30, 4 * 21)
