"""A rule that reads the output of its function: that has the declared derivative."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same
from support.ways import SECOND, assert_derivative, hand_written, squared

from tfgrad_jax import custom_gradient

X = jnp.float32(2.7)
WAYS = ["grad of grad", "jit(hessian)", "hessian(jit)", "vmap(hessian)", "jacfwd of jacfwd"]


class Holder:
    def __init__(self, w):
        self.w = w


# --- the product of a weight and an input, rounded: its derivatives are 2 y w and 3 y x -----------


def oracle(w, x):
    y = lambda w, x: lax.stop_gradient(jnp.round(w * x))  # noqa: E731
    by_w, by_x = lambda w, x: 3 * oracle(w, x) * x, lambda w, x: 2 * oracle(w, x) * w
    return hand_written(y, by_w, by_x)(w, x)


def rounded(a, b):
    return jnp.round(a * b)


def called_back(a, b):
    product = lambda a, b: np.round(a * b).astype(np.float32)  # noqa: E731
    args = lax.stop_gradient((a, b))
    return jax.pure_callback(product, args[0], *args, vmap_method="sequential")


def layer(declared, product, w, x):
    held = Holder(w)

    @custom_gradient(variables=[w] if declared else None)
    def f(x):
        y = product(held.w, x)
        return y, lambda dy, variables: (dy * 2 * y * held.w, [dy * 3 * y * x for _ in variables])

    return f(x)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("way", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("product", [rounded, called_back])
def test_its_derivative_is_the_declared_one(declared, product, way):
    loss = lambda w, x: layer(declared, product, w, x)  # noqa: E731
    assert_derivative(way, squared(loss), squared(oracle), jnp.float32(1.3), jnp.float32(2.1))


@pytest.mark.parametrize("way", ["grad of grad", "hessian(jit)"])
def test_beside_weights_with_the_ordinary_gradient(way):
    def layer(w, x):
        @custom_gradient(variables="autodiff")
        def f(x):
            y = w**2 * x
            return y, lambda dy: dy * 2 * y

        return f(x)

    def expected(w, x):
        y, by_w = lambda w, x: lax.stop_gradient(w**2 * x), lambda w, x: 2 * w * x
        return hand_written(y, by_w, lambda w, x: 2 * expected(w, x))(w, x)

    assert_derivative(SECOND[way], layer, expected, jnp.float32(3), jnp.float32(2))


# --- y = h(x), rounded to 3: h' = 2 h, so h'' = 2 h' ----------------------------------------------


def stopped(value):
    """Return `value`, whose derivative is declared to be twice its value, as by the book."""

    def h(x):
        return hand_written(lambda x: lax.stop_gradient(value(x)), lambda x: 2 * h(x))(x)

    return h


def twice(y_of, **options):
    @custom_gradient(**options)
    def h(x):
        y = y_of(x)
        return y, lambda dy: dy * 2 * y

    return h


@custom_gradient(convention="jax")
def as_in_jax(x):
    y = jnp.round(x)
    return [y], lambda dys: dys[0] * (2 * y)


@custom_gradient
def beside_an_integer(x):
    y = jnp.round(x)
    return (jnp.int32(7), y), lambda _, dy: dy * 2 * y


@custom_gradient
def inner(x):
    y = jnp.round(x)
    return y, lambda dy: 100 * dy * y  # the word of the outer rule holds


@custom_gradient
def jitted_rule(x):
    y = jnp.round(x)
    return y, jax.jit(lambda dy: dy * (2 * y))


@custom_gradient
def written_to_a_ref(x, ref):
    ref[...] = y = jnp.round(x)
    return y, lambda dy: (dy * 2 * y, None)


class Layer:
    factor = 2

    @custom_gradient
    def __call__(self, x):
        self.last = y = jnp.round(x)
        return y, lambda dy: dy * self.factor * y


ROUNDED = {
    "as in JAX": lambda x: as_in_jax(x)[0],
    "beside an integer": lambda x: beside_an_integer(x)[1],
    "nested": twice(inner),
    "with a primal": twice(jnp.round, primal=jnp.round),
    "jitted rule": jitted_rule,
    "Ref": lambda x: written_to_a_ref(x, jax.new_ref(jnp.float32(0))),
    "method": Layer(),
    "callback": twice(lambda x: called_back(x, np.float32(1))),
}
MADE = {"NumPy number": twice(lambda x: np.float32(3))}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*ROUNDED, *MADE])
def test_wherever_it_comes_from(name, way):
    if (name, way) == ("Ref", "jacfwd of jacfwd"):
        pytest.skip("JAX has no forward mode of a function of Refs that has a rule")
    value = (lambda x: 0 * x + 3) if name in MADE else jnp.round
    h, expected = {**ROUNDED, **MADE}[name], stopped(value)
    assert_derivative(SECOND[way], squared(h), squared(expected), X)


# --- what is not its own output: 5, a constant with the gradient 5 --------------------------------

CONSTANT = jnp.float32(5)


@custom_gradient
def of_a_global(x):
    y = CONSTANT
    return y, lambda dy: dy * y


@custom_gradient
def of_a_number(x):
    y = 5.0  # Python shares equal numbers: to be the same object says nothing
    return y, lambda dy: dy * y


CONSTANTS = {
    "global": of_a_global,
    "Python number": of_a_number,
    "input": lambda x: custom_gradient(lambda x, y: (y, lambda dy: (dy * y, None)))(x, CONSTANT),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_has_no_derivative(name, way):
    expected = hand_written(lambda x: 0 * x + 5, lambda x: 0 * x + 5)
    assert_derivative(SECOND[way], squared(CONSTANTS[name]), squared(expected), X)


@pytest.mark.parametrize("way", WAYS)
def test_an_input_that_the_function_returns_is_the_input(way):
    h = custom_gradient(lambda x: (x, lambda dy: dy * 7 * x))
    assert_derivative(SECOND[way], h, hand_written(lambda x: x, lambda x: 7 * x), X)


@pytest.mark.parametrize("second", [jax.grad, jax.jacfwd])
def test_in_an_object_it_is_right_or_an_error(second):
    @custom_gradient
    def h(x):
        kept = Holder(jnp.round(x))
        return kept.w, lambda dy: dy * (2 * kept.w)

    assert_same(jax.grad(h)(2.7), 6.0)
    with contextlib.suppress(TypeError):
        assert_same(second(jax.grad(h))(2.7), 12.0)
