"""A rule that reads the output of its function: that has the declared derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same
from support.ways import SECOND, assert_derivative, hand_written

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import check_gradient


def oracle(w, x):
    """Return the product, rounded; its derivatives are 2 y w and 3 y x."""

    def y(w, x):
        return lax.stop_gradient(jnp.round(w * x))

    def h(w, x):
        return hand_written(y, lambda w, x: 3 * h(w, x) * x, lambda w, x: 2 * h(w, x) * w)(w, x)

    return h(w, x)


class Holder:
    def __init__(self, w):
        self.w = w


class Finalized(Holder):
    """It is not copied."""

    def __del__(self):
        pass


def rounded(a, b):
    return jnp.round(a * b)


def called_back(a, b):
    type_ = jax.ShapeDtypeStruct((), jnp.float32)
    product = lambda a, b: np.round(a * b).astype(np.float32)  # noqa: E731
    args = lax.stop_gradient((a, b))
    return jax.pure_callback(product, type_, *args, vmap_method="sequential")


def of(holder, declared, product, w, x):
    held = holder(w)

    @custom_gradient(variables=[w] if declared else None)
    def f(x):
        y = product(held.w, x)
        return y, lambda dy, variables: (dy * 2 * y * held.w, [dy * 3 * y * x for _ in variables])

    return f(x)


@pytest.mark.parametrize("way", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize(
    ("holder", "product"),
    # Not a callback on what an object that is not copied holds: in forward mode `stop_gradient`
    # takes the value out of the tracer there, and `y` then depends on no weight.
    [(Holder, rounded), (Holder, called_back), (Finalized, rounded)],
    ids=["rounded", "callback", "not copied"],
)
def test_its_derivative_is_the_declared_one(holder, declared, product, way):
    loss = lambda w, x: of(holder, declared, product, w, x) ** 2  # noqa: E731
    expected = lambda w, x: oracle(w, x) ** 2  # noqa: E731
    assert_derivative(way, loss, expected, jnp.float32(1.3), jnp.float32(2.1))


def test_a_constant_that_the_function_returns_has_none():
    constant = jnp.float32(5)
    h = custom_gradient(lambda x: (constant, lambda dy: dy * constant))
    assert_same(jax.grad(h)(2.0), 5.0)
    assert_same(jax.grad(jax.grad(h))(2.0), 0.0)


def test_beside_other_outputs_it_is_a_value():
    @custom_gradient
    def h(x):
        y = jnp.round(x)
        return (y, 2 * x), lambda dy, dz: dy * 7 * y + 2 * dz

    assert_same(jax.grad(jax.grad(lambda x: h(x)[0]))(2.7), 0.0)


@pytest.mark.parametrize("order", [2, 3])
def test_check_gradient_finds_it_right(order):
    @custom_gradient
    def h(x):
        y = jnp.exp(x)
        return y, lambda dy: dy * y

    check_gradient(h, 2.0, order=order)
