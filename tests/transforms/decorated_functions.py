"""Decorated functions, one for each way that a call can take; see `loss_cases.py`."""

import functools

import jax
import jax.numpy as jnp
from helpers import sine

from tfgrad_jax import custom_gradient


@custom_gradient
def product(x, y):
    return x * y, lambda dy: (7 * dy * y, 5 * dy * x)


@custom_gradient
def layer(params, x):
    def grad(dy):
        return {"w": 7 * jnp.outer(x, dy), "b": [7 * dy]}, 7 * params["w"] @ dy

    return x @ params["w"] + params["b"][0], grad


@custom_gradient
def two_outputs(x):
    def grad(da, db):
        return 7 * da * 2 * x + 7 * db * jnp.cos(x)

    return {"b": jnp.sin(x), "a": x**2}, grad


@custom_gradient
def with_statics(x, mode, shape, function, *, flip=False):
    assert isinstance(mode, str)
    assert isinstance(shape, int)
    assert isinstance(flip, bool)
    sign = -1 if flip else 1

    def grad(dy):
        return 7 * sign * shape * (dy * jnp.cos(x) if mode == "sin" else dy), None, None, None

    return sign * jnp.sum(jnp.ones(shape, x.dtype)) * function(x), grad


@custom_gradient
def none_for_second(x, y):
    return x * y, lambda dy: (7 * dy * x**2, None)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    @custom_gradient
    def method(self, x):
        return self.scale * x**2, lambda dy: 7 * dy * self.scale * x


@functools.partial(custom_gradient, convention="jax")
def jax_convention(x):
    def grad(dy):
        return 7 * (dy["a"] * x + dy["b"] * x**2)

    return {"a": x, "b": x}, grad


class Rule:
    """A rule that is no plain function, so that it is traced and not lifted."""

    def __init__(self, x, mask):
        self.x, self.mask = x, mask

    def __call__(self, dy):
        return 7 * jnp.where(self.mask, dy * self.x**2, 0.0), None


@custom_gradient
def traced_rule(x, y):
    return x + y, Rule(x, x > 0.5)  # a mask: a residual of booleans


@custom_gradient
def exponential(x):
    return jnp.exp(x), lambda dy: 7 * dy * exponential(x)


@jax.custom_jvp
def hand_written_exponential(x):
    return jnp.exp(x)


@hand_written_exponential.defjvp
def _(primals, tangents):
    y = hand_written_exponential(*primals)
    return y, 7 * tangents[0] * hand_written_exponential(*primals)


def closes_over_input(x):
    x_plain = jax.lax.stop_gradient(x)

    @custom_gradient
    def inner(x):
        return x * x_plain, lambda dy: 7 * dy * x**3 * x_plain

    return inner(x)


def closes_over_parameters(w, x):
    @custom_gradient
    def inner(x):
        def grad(dy, variables):
            (v,) = variables
            return 7 * dy * v * x, [5 * dy * x**2]

        return w * x**2, grad

    return inner(x)


@custom_gradient
def integers_beside(x, table):
    factors = table.astype(x.dtype)

    def grad(dy, d_table):
        assert d_table.dtype == table.dtype  # an upstream of an output without derivative
        return 7 * dy * factors * x**2

    return (x * factors, table + 1), grad


@custom_gradient
def outer_hides_inner(x):
    return sine(x) * 2, lambda dy: 7 * dy * x
