"""Inputs of an extended dtype have the gradient of their tangent dtype.

JAX has two kinds: `primal_tangent_dtype` (here integers with bfloat16 gradients) and what flax
keeps the scales of its FP8 layers in (`fp32_max_grad`, whose gradients are joined by `max`).
The value is `s x`; the rules declare `5 x` for the scale `s`, which is 3, and `7 s` for `x`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, sample
from support.ways import REVERSE

from tfgrad_jax import custom_gradient


class Kind(NamedTuple):
    encode: Callable[[Any], Any]  # a float32 as a scale
    decode: Callable[[Any], Any]
    gradient: Callable[[Any], Any]  # a float32 as a gradient of a scale
    dtype: Any  # of the scale


def primal_tangent():
    """Return int8 values with bfloat16 gradients."""
    dtype = jax.experimental.primal_tangent_dtype(jnp.int8, jnp.bfloat16)
    encode = jax.custom_vjp(lambda v: lax.convert_element_type(v.astype(jnp.int8), dtype))
    encode.defvjp(lambda v: (encode(v), None), lambda _, g: (g.astype(jnp.float32),))
    decode = lambda s: lax.convert_element_type(s, jnp.int8).astype(jnp.float32)  # noqa: E731
    return Kind(encode, decode, lambda g: g.astype(jnp.bfloat16), dtype)


def max_grad():
    """Return float32 values with gradients that are joined by `max`."""
    # flax is not installed beside the oldest JAX.
    dtype = pytest.importorskip("flax.linen.fp8_ops").fp32_max_grad
    encode = lambda v: lax.convert_element_type(v, dtype)  # noqa: E731
    return Kind(encode, lambda s: lax.convert_element_type(s, jnp.float32), encode, dtype)


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


ARGS = jnp.float32(3), jnp.float32(2)
PROTOCOLS = {"decorated": decorated, "captured": captured}
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def of_floats(h, kind):
    return lambda v, x: h(kind.encode(v), x)


@every_protocol
@pytest.mark.parametrize("way", ["grad", *sample(REVERSE, 5)])
@pytest.mark.parametrize("kind", (primal_tangent, max_grad))
def test_gradients_under_transformations(kind, protocol, way):
    """Under `jit`, which all but the dtype of flax need."""
    kind = kind()
    gradients = jax.jit(REVERSE[way](of_floats(PROTOCOLS[protocol](kind), kind)))
    assert_same(gradients(*ARGS), (jnp.float32(10), jnp.float32(21)))


@every_protocol
def test_eagerly_the_gradient_itself_has_the_dtype_of_flax(protocol):
    kind = max_grad()
    by_scale, by_x = jax.vjp(PROTOCOLS[protocol](kind), kind.encode(ARGS[0]), ARGS[1])[1](ARGS[0])
    assert by_scale.dtype == kind.dtype
    assert_same((kind.decode(by_scale), by_x), (jnp.float32(30), jnp.float32(63)))


def test_a_float_is_cast_to_the_dtype_of_flax_and_an_integer_is_refused():
    kind = max_grad()

    def pulled(gradient):
        h = custom_gradient(lambda s, x: (kind.decode(s) * x, lambda dy: (gradient, 7 * dy)))
        return kind.decode(jax.vjp(h, kind.encode(ARGS[0]), ARGS[1])[1](jnp.float32(1))[0])

    assert_same(pulled(jnp.float32(10)), jnp.float32(10))
    assert_same(pulled(10.0), jnp.float32(10))
    with pytest.raises(TypeError, match="a gradient of type int32"):
        pulled(jnp.int32(10))


@every_protocol
@pytest.mark.parametrize("kind", (primal_tangent, max_grad))
def test_second_order(kind, protocol):
    """By `x`: `L = h**2` has `L' = 2 h * 7 s` and `L'' = 2 * 7 s * 7 s`."""
    kind = kind()
    h = of_floats(PROTOCOLS[protocol](kind), kind)
    second = jax.jit(jax.grad(jax.grad(lambda v, x: h(v, x) ** 2, 1), 1))
    assert_same(second(*ARGS), jnp.float32(2 * 21 * 21))


@every_protocol
def test_gradients_of_two_uses_are_joined_by_max(protocol):
    kind = max_grad()
    h = PROTOCOLS[protocol](kind)

    def loss(v, x):
        scale = kind.encode(v)
        return h(scale, x) + 3 * h(scale, x)

    assert_same(jax.jit(jax.grad(loss, (0, 1)))(*ARGS), (jnp.float32(30), jnp.float32(4 * 21)))
