"""Decorated functions that have no name to be found by are cloudpickled by value."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient

cloudpickle = pytest.importorskip("cloudpickle")
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


def copied(h):
    return pickle.loads(cloudpickle.dumps(h))


def local(scale):
    @custom_gradient
    def h(x):
        return scale * x**2, lambda dy: 7 * dy * scale * x

    return h


def local_class(scale):
    class Model:
        def __init__(self, w):
            self.w = w

        @custom_gradient
        def call(self, x):
            return self.w * x**2, lambda dy: 7 * dy * self.w * x * scale

    return Model


@MODES
def test_a_local_function(mode):
    h = copied(local(3.0))
    assert h.__name__ == "h"
    assert_same(mode(jax.value_and_grad(h))(2.0), (jnp.float32(12), jnp.float32(42)))
    assert_same(mode(jax.hessian(h))(2.0), jnp.float32(21))


@MODES
def test_after_it_was_used(mode):
    """Nothing that a call leaves behind is in the way."""
    h = local(3.0)
    jax.jit(jax.grad(h))(2.0)
    jax.jvp(h, (2.0,), (1.0,))
    again = copied(copied(h))
    assert_same(mode(jax.value_and_grad(again))(2.0), (jnp.float32(12), jnp.float32(42)))
    assert_same(mode(jax.value_and_grad(h))(2.0), (jnp.float32(12), jnp.float32(42)))


@pytest.mark.parametrize("copied", [copied, copy.copy, copy.deepcopy])
def test_attributes(copied):
    h = local(3.0)
    h.units = ["m"]
    again = copied(h)
    assert again is not h
    assert again.units == ["m"]
    assert_same(jax.grad(again)(2.0), jnp.float32(42))


@MODES
def test_a_lambda_and_options(mode):
    h = copied(custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x), convention="jax"))
    assert_same(mode(jax.value_and_grad(h))(2.0), (jnp.float32(4), jnp.float32(14)))

    def of(w, x):
        declared = {"w": w}
        f = custom_gradient(
            lambda x: (
                declared["w"] * x**2,
                lambda dy, variables: (7 * dy * x, {"w": 5 * dy * x}),
            ),
            variables=declared,
        )
        return f(x)

    assert_same(mode(jax.grad(copied(of), (0, 1)))(3.0, 2.0), (jnp.float32(10), jnp.float32(14)))


@MODES
def test_a_method_of_a_local_class(mode):
    model = copied(local_class(1.0)(3.0))
    assert_same(mode(jax.value_and_grad(model.call))(2.0), (jnp.float32(12), jnp.float32(42)))
    model = copied(local_class(1.0))(5.0)
    assert_same(mode(jax.value_and_grad(model.call))(2.0), (jnp.float32(20), jnp.float32(70)))


@MODES
def test_a_function_that_closes_over_a_decorated_one(mode):
    inner = local(3.0)
    outer = copied(lambda x: 2 * inner(x))
    assert_same(mode(jax.value_and_grad(outer))(2.0), (jnp.float32(24), jnp.float32(84)))


@MODES
def test_a_rule_that_calls_its_own_function(mode):
    def make():
        @custom_gradient
        def exponential(x):
            return jnp.exp(x), lambda dy: 7 * dy * exponential(x)

        return exponential

    h = copied(make())
    assert_same(mode(jax.grad(h))(0.0), jnp.float32(7))
    assert_same(mode(jax.grad(jax.grad(h)))(0.0), jnp.float32(49))
