"""The declared gradient is the derivative at every order, and in both modes."""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from order_cases import AROUND, FUNCTIONS, crossed, h, in_scan, third

from tfgrad_jax import custom_gradient


@pytest.mark.parametrize(
    ("function", "around"),
    crossed(FUNCTIONS, ["nothing", "jit", "vmap", "cond", "switch", "checkpoint"], "lifted"),
)
def test_reverse_over_reverse(function, around):
    loss = AROUND[around](lambda x: FUNCTIONS[function](x) ** 2)
    assert_same(jax.value_and_grad(loss)(2.0), (jnp.float32(16), jnp.float32(112)))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_third_order(function):
    assert_same(third(lambda x: FUNCTIONS[function](x) ** 2)(2.0), jnp.float32(588))


@pytest.mark.parametrize("around", ["jit", "vmap", "checkpoint"])
def test_third_order_under_transformations(around):
    assert_same(third(AROUND[around](lambda x: h(x) ** 2))(2.0), jnp.float32(588))


@pytest.mark.parametrize(
    ("function", "around"),
    crossed(FUNCTIONS, ["nothing", "jit", "vmap", "cond", "checkpoint"], "lifted"),
)
def test_hessian_is_forward_over_reverse(function, around):
    loss = AROUND[around](lambda x: FUNCTIONS[function](x) ** 2)
    assert_same(jax.hessian(loss)(2.0), jnp.float32(448))


def test_transformations_of_the_derivative():
    second = jax.grad(jax.grad(lambda x: h(x) ** 2))
    assert_same(jax.jit(second)(2.0), jnp.float32(448))
    assert_same(jax.vmap(second)(jnp.float32([2, 1])), jnp.float32([448, 112]))
    assert_same(jax.checkpoint(second)(2.0), jnp.float32(448))
    assert_same(in_scan(second)(2.0), jnp.float32(448))
    assert_same(jax.grad(jax.jit(jax.grad(lambda x: h(x) ** 2)))(2.0), jnp.float32(448))
    assert_same(jax.grad(jax.checkpoint(jax.grad(lambda x: h(x) ** 2)))(2.0), jnp.float32(448))


def test_what_jax_custom_gradient_does_instead():
    """The number that this package exists to put right; see the module's head."""
    theirs = jax.custom_gradient(h.__wrapped__)
    assert_same(jax.grad(lambda x: theirs(x) ** 2)(2.0), jnp.float32(112))
    assert_same(jax.grad(jax.grad(lambda x: theirs(x) ** 2))(2.0), jnp.float32(168))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_mode_of_first_order(function):
    f, seven_x = FUNCTIONS[function], jnp.float32(14)
    assert_same(jax.jvp(f, (2.0,), (1.0,)), (jnp.float32(4), seven_x))
    assert_same(jax.jacfwd(f)(2.0), seven_x)
    assert_same(jax.jit(jax.jacfwd(f))(2.0), seven_x)
    assert_same(jax.linearize(f, 2.0)[1](1.0), seven_x)


def test_composition():
    # h(h(x)) = x**4; L' = 7 h * 7 x = 49 x h; L'' = 49 h + 49 x * 7 x = 49 * 4 + 343 * 4
    assert_same(jax.grad(lambda x: h(h(x)))(2.0), jnp.float32(392))
    assert_same(jax.grad(jax.grad(lambda x: h(h(x))))(2.0), jnp.float32(1568))


def test_what_a_rule_captured_of_f_is_plain():
    """`y` inside the rule is `f`'s own: its derivative is the ordinary one."""

    @custom_gradient
    def with_inner_y(x):
        y = x**2
        return y, lambda dy: 7 * dy * y

    # h' = 7 x**2; h'' = 14 x, not 7 * 7 x**2
    assert_same(jax.grad(jax.grad(with_inner_y))(3.0), jnp.float32(42))
    assert_same(jax.jit(jax.grad(jax.grad(with_inner_y)))(3.0), jnp.float32(42))


def test_hessian_of_two_inputs():
    """Value `x**2 y`, declared gradient `(7 x y, 5 x)`: the Hessian of `h` is not symmetric."""

    @custom_gradient
    def two(x, y):
        return x**2 * y, lambda dy: (7 * dy * x * y, 5 * dy * x)

    expected = (
        (jnp.float32(7 * 3), jnp.float32(7 * 2)),
        (jnp.float32(5), jnp.float32(0)),
    )
    assert_same(jax.hessian(two, (0, 1))(2.0, 3.0), expected)
    assert_same(jax.jacrev(jax.grad(two, (0, 1)), (0, 1))(2.0, 3.0), expected)


def test_second_order_with_several_outputs():
    @custom_gradient
    def pair(x):
        return {"a": x**2, "b": x**3}, lambda da, db: 7 * da * x + 11 * db * x

    def loss(x):
        y = pair(x)
        return y["a"] * y["b"]

    # L' = 7 b x + 11 a x; L'' = 7 (11 x x + b) + 11 (7 x x + a) = 154 x**2 + 7 b + 11 a
    x = 2.0
    second = 154 * x**2 + 7 * x**3 + 11 * x**2
    assert_same(jax.grad(jax.grad(loss))(x), jnp.float32(second))
    assert_same(jax.jit(jax.hessian(loss))(x), jnp.float32(second))


def test_declaring_an_undecorated_name_twice_is_independent():
    """Two functions made by one factory keep their own rules at every order."""

    def make(factor):
        return custom_gradient(lambda x: (x**2, lambda dy: factor * dy * x))

    seven, three = make(7), make(3)
    # d/dx (7 x three + seven 3 x) = 7 three + 7 x 3 x + 7 x 3 x + 3 seven
    second = jax.grad(jax.grad(lambda x: seven(x) * three(x)))
    assert_same(second(2.0), jnp.float32(7 * 4 + 42 * 4 + 3 * 4))
    assert re.match("<custom_gradient of", repr(seven))
