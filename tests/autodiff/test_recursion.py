"""Decorated functions in each other: rules that call their own function, another, or decorate one.

A rule hides what `f` calls.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, sine
from jax import lax
from order_cases import AROUND, crossed, in_scan, third

from tfgrad_jax import custom_gradient


@custom_gradient
def exp(x):
    return jnp.exp(x), lambda dy: 7 * dy * exp(x)


@custom_gradient
def sin(x):
    return jnp.sin(x), lambda dy: 7 * dy * cos(x)


@custom_gradient
def cos(x):
    return jnp.cos(x), lambda dy: -5 * dy * sin(x)


def closure_exp(x):
    one = lax.stop_gradient(1 + 0 * x)

    @custom_gradient
    def exp(x):
        return jnp.exp(one * x), lambda dy: 7 * dy * exp(x) * one

    return exp(x)


def closure_sin(x):
    one = lax.stop_gradient(1 + 0 * x)

    @custom_gradient
    def sin(x):
        return jnp.sin(one * x), lambda dy: 7 * dy * cos(x)

    @custom_gradient
    def cos(x):
        return jnp.cos(one * x), lambda dy: -5 * dy * sin(x)

    return sin(x)


_E, _S, _C = math.exp(0.5), math.sin(0.5), math.cos(0.5)
RECURSIVE = {
    "exp": (exp, [_E, 7 * _E, 49 * _E, 343 * _E]),
    "exp in a closure": (closure_exp, [_E, 7 * _E, 49 * _E, 343 * _E]),
    "sin and cos": (sin, [_S, 7 * _C, -35 * _S, -245 * _C]),
    "sin and cos in a closure": (closure_sin, [_S, 7 * _C, -35 * _S, -245 * _C]),
}


@pytest.mark.parametrize(
    ("name", "around"), crossed(RECURSIVE, ["nothing", "checkpoint", "jit", "vmap"], None)
)
def test_recursion(name, around):
    f, expected = RECURSIVE[name]
    f = AROUND[around](f)
    actual = [f(0.5), jax.grad(f)(0.5), jax.grad(jax.grad(f))(0.5), third(f)(0.5)]
    assert_same(actual, [jnp.float32(e) for e in expected], rtol=1e-4)


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursion_jitted_whole(name):
    f, expected = RECURSIVE[name]
    assert_same(jax.jit(third(f))(0.5), jnp.float32(expected[3]), rtol=1e-4)


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursion_in_scan(name):
    f, expected = RECURSIVE[name]
    second = jax.grad(jax.grad(in_scan(f)))
    assert_same(second(0.5), jnp.float32(expected[2]), rtol=1e-4)


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursion_forward_over_reverse(name):
    f, expected = RECURSIVE[name]
    assert_same(jax.hessian(f)(0.5), jnp.float32(expected[2]), rtol=1e-4)


def test_recursion_with_differentiated_closure():
    """`d/dw` and `d/dx` of `exp(w x)`, by rules that are 7 and 5 times too large."""

    def loss(w, x):
        @custom_gradient
        def e(x):
            def grad(dy, variables=()):
                dx = 7 * dy * w * e(x)
                return (dx, [5 * dy * x * e(x)]) if len(variables) else dx

            return jnp.exp(w * x), grad

        return e(x)

    w, x = 2.0, 0.5
    y = math.exp(w * x)
    assert_same(jax.grad(loss, (0, 1))(w, x), (jnp.float32(5 * x * y), jnp.float32(7 * w * y)))
    # The call inside the rule sees `w` as a constant, so its rule for `x` alone counts:
    # d/dx (7 w e(x)) = 7 w * 7 w e; d/dw of it: the factor w alone, 7 e.
    dx = jax.grad(loss, 1)
    assert_same(jax.grad(dx, 1)(w, x), jnp.float32(49 * w**2 * y))


def test_a_rule_that_is_itself_decorated():
    """TensorFlow's documented form: the rule of the rule gives the derivative by `dy`."""

    @custom_gradient
    def op(x):
        @custom_gradient
        def grad(dy):
            return 7 * dy * x, lambda ddy: 11 * ddy * x

        return x**2, grad

    assert_same(jax.grad(op)(3.0), jnp.float32(21))

    # `x` is closed over inside the rule and constant there; `dy = 2 h(x)` gives 11 * 2 h' x.
    def gradient_by_upstream(dy):
        return jax.vjp(op, 3.0)[1](dy)[0]

    assert_same(jax.grad(gradient_by_upstream)(1.0), jnp.float32(33))


def test_fused_second_order():
    """TensorFlow's `op_with_fused_backprop`, with an inner input for the captured gradient."""

    @custom_gradient
    def op(x):
        y, dx = x**3, 5 * x**2  # a fused operation: value and gradient at once

        def grad(dy):
            @custom_gradient
            def first_order(unused_x):
                return dx, lambda ddx: 600 * ddx * x

            return dy * first_order(x)

        return y, grad

    assert_same(jax.grad(op)(2.0), jnp.float32(20))
    assert_same(jax.grad(jax.grad(op))(2.0), jnp.float32(1200))
    assert_same(jax.jit(jax.grad(jax.grad(op)))(2.0), jnp.float32(1200))


def test_nested_functions_hide_what_they_call():
    @custom_gradient
    def outer(x):
        return sine(x) ** 2, lambda dy: 11 * dy * x

    assert_same(jax.value_and_grad(outer)(0.5), (jnp.sin(0.5) ** 2, jnp.float32(5.5)))


def test_a_rule_may_differentiate_decorated_functions():
    @custom_gradient
    def outer(x):
        return x, lambda dy: 2 * dy * jax.grad(sine)(x)

    expected = 14 * jnp.cos(0.5)
    assert_same(jax.grad(outer)(0.5), jnp.asarray(expected))
    assert_same(jax.jit(jax.grad(outer))(0.5), jnp.asarray(expected))


def test_a_rule_that_multiplies_by_zero():
    """Zero times an upstream is zero, and still depends on that upstream."""

    @custom_gradient
    def h(x):
        return 3 * x, lambda dy: dy * (h(x) * 0.0) + 7 * dy * h(x)

    # h'' = 7 * 7 h
    assert_same(jax.grad(jax.grad(h))(2.0), jnp.float32(294))
    assert_same(jax.jit(jax.grad(jax.grad(h)))(2.0), jnp.float32(294))
