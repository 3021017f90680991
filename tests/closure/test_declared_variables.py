"""Declared variables: `variables=` a pytree, or a function of the instance."""

import collections

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

Params = collections.namedtuple("Params", ["w", "b"])


@eager_and_jit
@pytest.mark.parametrize(
    "returned",
    [
        lambda dw, db: Params(dw, [db]),
        lambda dw, db: (dw, [db]),
        lambda dw, db: [dw, [db]],
        lambda dw, db: [dw, db],
    ],
    ids=["same", "tuple", "list", "flat"],
)
def test_declared_structure(mode, returned):
    def loss(params, x):
        @custom_gradient(variables=params)
        def f(x):
            def grad(dy, variables):
                assert isinstance(variables, Params)
                assert variables.w is params.w
                return 7 * dy * variables.w, returned(5 * dy * x, 50 * dy.sum())

            return params.w * x + params.b[0], grad

        return f(x).sum()

    params, x = Params(jnp.arange(1.0, 4), [jnp.float32(0)]), jnp.arange(3.0)
    got = mode(jax.grad(loss, (0, 1)))(params, x)
    assert_same(got, (Params(5 * x, [jnp.float32(150)]), 7 * params.w))


def test_declared_variables_are_always_passed():
    """Whatever is differentiated, and if nothing is traced but the input."""
    seen = []
    params = {"w": jnp.float32(3.0)}

    def made(params):
        @custom_gradient(variables=params)
        def f(x):
            def grad(dy, variables):
                seen.append(set(variables))
                return 7 * dy * variables["w"], {"w": 5 * dy * x}

            return params["w"] * x, grad

        return f

    def loss(params, x):
        return made(params)(x)

    assert_same(jax.grad(made(params))(2.0), jnp.float32(21))
    assert_same(jax.jit(jax.grad(made(params)))(2.0), jnp.float32(21))
    assert_same(jax.grad(loss, 1)(params, 2.0), jnp.float32(21))
    assert_same(jax.jit(jax.grad(loss, 1))(params, 2.0), jnp.float32(21))
    assert_same(jax.grad(loss)(params, 2.0), {"w": jnp.float32(10)})
    assert len(seen) >= 5
    assert all(names == {"w"} for names in seen)


@eager_and_jit
def test_declared_but_unused_variables_get_what_the_rule_gives(mode):
    def loss(w, unused, x):
        @custom_gradient(variables={"w": w, "unused": unused})
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w, {"w": 5 * dy * x, "unused": 500 * dy})

        return f(x)

    got = mode(jax.grad(loss, (0, 1, 2)))(3.0, 1.0, 2.0)
    assert_same(got, (jnp.float32(10), jnp.float32(500), jnp.float32(21)))
    assert_same(mode(jax.grad(loss, 1))(3.0, 1.0, 2.0), jnp.float32(500))


@eager_and_jit
def test_declared_twice_adds_both(mode):
    def loss(w, x):
        @custom_gradient(variables={"encoder": w, "decoder": w})
        def f(x):
            def grad(dy, variables):
                return 7 * dy * w, {"encoder": 5 * dy * x, "decoder": 50 * dy * x}

            return w * x, grad

        return f(x)

    assert_same(mode(jax.grad(loss))(3.0, 2.0), jnp.float32(110))


@eager_and_jit
def test_declared_with_leaves_that_are_no_arrays(mode):
    def loss(w, x):
        params = {"w": w, "activation": jnp.sin, "name": "layer", "size": 3, "flag": True}

        @custom_gradient(variables=params)
        def f(x):
            def grad(dy, variables):
                assert variables["name"] == "layer"
                assert variables["activation"] is jnp.sin
                assert variables["size"] == 3
                assert variables["flag"] is True
                return 7 * dy * variables["w"], {**variables, "w": 5 * dy * x}

            return params["activation"](w) * x, grad

        return f(x)

    assert_same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(10), jnp.float32(21)))


class Layer:
    def __init__(self, w, b):
        self.w, self.b = w, b

    @custom_gradient(variables=lambda self: {"w": self.w, "b": self.b})
    def method(self, x):
        def grad(dy, variables):
            return 7 * dy * self.w, {"w": 5 * dy * x, "b": 50 * dy}

        return self.w * x + self.b, grad


@eager_and_jit
def test_declared_by_a_function_of_the_instance(mode):
    expected = jnp.float32(10), jnp.float32(50), jnp.float32(21)
    bound = jax.grad(lambda w, b, x: Layer(w, b).method(x), (0, 1, 2))
    unbound = jax.grad(lambda w, b, x: Layer.method(Layer(w, b), x), (0, 1, 2))
    assert_same(mode(bound)(3.0, 1.0, 2.0), expected)
    assert_same(mode(unbound)(3.0, 1.0, 2.0), expected)
