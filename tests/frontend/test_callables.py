"""What may be decorated, and what may be a rule, besides a plain function."""

import functools
import operator

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


def _scaled(scale, x):
    return scale * x, lambda dy: 7 * dy * scale


def _scaled_by(x, scale):
    return scale * x, lambda dy: 7 * dy * scale


def _two_gradients(scale, x):
    return scale * x, lambda dy: (None, 7 * dy * scale)


class CallableObject:
    def __call__(self, x):
        return 2 * x, lambda dy: 14 * dy


@pytest.mark.parametrize(
    "f",
    [
        functools.partial(_scaled, 2.0),
        functools.partial(_scaled_by, scale=2.0),
        lambda x: (2 * x, lambda dy: 14 * dy),
        CallableObject(),
        CallableObject().__call__,
    ],
    ids=["partial", "partial by name", "lambda", "callable object", "bound method"],
)
def test_callable(f):
    h = custom_gradient(f)
    expected = (jnp.float32(6), jnp.float32(14))
    assert_same(jax.value_and_grad(h)(3.0), expected)
    assert_same(jax.jit(jax.value_and_grad(h))(3.0), expected)


def test_partial_of_a_decorated_function():
    h = functools.partial(custom_gradient(_two_gradients), 2.0)
    assert_same(jax.value_and_grad(h)(3.0), (jnp.float32(6), jnp.float32(14)))


def _module_rule(dy):
    return 14 * dy


class _Rule:
    def __call__(self, dy):
        return 14 * dy

    def method(self, dy):
        return 14 * dy


@pytest.mark.parametrize(
    "grad_fn",
    [
        _module_rule,
        functools.partial(jnp.multiply, 14),
        _Rule(),
        _Rule().method,
        jax.jit(_module_rule),
        jax.checkpoint(_module_rule),
        custom_gradient(lambda dy: (14 * dy, lambda ddy: 14 * ddy)),
    ],
    ids=["function", "partial", "object", "method", "jit", "checkpoint", "decorated"],
)
def test_kinds_of_rules(grad_fn):
    h = custom_gradient(lambda x: (2 * x, grad_fn))
    for grad in (jax.grad(h), jax.jit(jax.grad(h)), jax.grad(jax.jit(h))):
        assert_same(grad(3.0), jnp.float32(14))
    assert_same(jax.vmap(jax.grad(h))(jnp.ones(2)), jnp.float32([14, 14]))


def test_builtin_rules():
    """Builtins tell nothing of their parameters."""
    negated = custom_gradient(lambda x: (x, operator.neg))
    assert_same(jax.grad(negated)(3.0), jnp.float32(-1))
    assert_same(jax.jit(jax.grad(negated))(3.0), jnp.float32(-1))
    larger = custom_gradient(lambda x: ((x, x), max))
    assert_same(jax.grad(lambda x: 3 * larger(x)[0] + 7 * larger(x)[1])(1.0), jnp.float32(10))


def test_builtin_function():
    """`itemgetter` as `f`: the pair is among its arguments, the rule a static one."""
    h = custom_gradient(operator.itemgetter(0))
    rule = lambda dy: [7 * dy]  # noqa: E731
    assert_same(jax.grad(lambda x: h([(x, rule)]))(1.0), jnp.float32(7))
    assert h([(2.0, rule)]) == 2.0


def test_decorating_a_jitted_part():
    """The decorator is outermost; what it calls may be jitted."""
    body = jax.jit(lambda x: x**2)
    h = custom_gradient(lambda x: (body(x), lambda dy: 7 * dy * x))
    assert_same(jax.grad(jax.jit(h))(3.0), jnp.float32(21))
