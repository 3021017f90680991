"""What a function that is written inside a rule closes over is constant for it.

"Inside" is a matter of where it is written, not of when it is called: its code is among the
constants of the rule's code. It gets gradients if its own rule takes `variables` or asks for
"autodiff". The first-order rule is `7 w x`; what it calls is declared with 11.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from ways import SECOND, every, gradient

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

ARGS = jnp.float32(3), jnp.float32(2)  # w, x
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
# Not those with forward mode first, which transposes the rule: it would have to be linear in `dy`
# with the derivative that it has, where here another one is declared on purpose.
TWICE = {name: way for name, way in SECOND.items() if not name.endswith("of jacfwd")}


def fused(w, x):
    """The nested pattern of TensorFlow's documentation: the rule declares its own derivative."""

    @custom_gradient
    def f(w, x):
        def grad(dy):
            @custom_gradient
            def by_x(dy, x):
                return 7 * dy * w * x, lambda ddx: (13 * ddx * w * x, 11 * ddx * dy * w)

            return 5 * dy * x**2, by_x(dy, x)

        return w * x**2, grad

    return f(w, x)


@MODES
def test_first_order(mode):
    assert_same(mode(gradient(fused))(*ARGS), (jnp.float32(20), jnp.float32(42)))


@MODES
def test_what_it_closes_over_is_constant(mode):
    """`h_x = 7 w x` depends on `w` only through a closure, so its derivative by `w` is 0."""
    by_x = jax.grad(fused, 1)
    second = mode(jax.grad(by_x, (0, 1)))(*ARGS)
    assert_same(second, (jnp.float32(0), jnp.float32(33)))  # 11 w, by the rule inside


@MODES
@pytest.mark.parametrize(("variables", "by_w"), [("taken", 13 * 2), ("autodiff", 7 * 2)])
def test_unless_it_says_so(mode, variables, by_w):
    def f(w, x):
        def grad(dy):
            if variables == "taken":

                @custom_gradient
                def by_x(dy, x):
                    def inner(ddx, variables):
                        return (0.0 * ddx, 11 * ddx * dy * w), [13 * ddx * x for _ in variables]

                    return 7 * dy * w * x, inner
            else:

                @custom_gradient(variables="autodiff")
                def by_x(dy, x):
                    return 7 * dy * w * x, lambda ddx: (0.0 * ddx, 11 * ddx * dy * w)

            return 5 * dy * x**2, by_x(dy, x)

        return w * x**2, grad

    h = custom_gradient(f)
    second = mode(jax.grad(jax.grad(h, 1), (0, 1)))(*ARGS)
    assert_same(second, (jnp.float32(by_w), jnp.float32(33)))


@MODES
@pytest.mark.parametrize("depth", ["helper", "lambda", "class", "comprehension"])
def test_inside_is_recursive(mode, depth):
    """A function in a function of the rule is inside the rule as well."""

    @custom_gradient
    def f(w, x):
        def grad(dy):
            def helper():
                @custom_gradient
                def by_x(x):
                    return 7 * w * x, lambda ddx: 11 * ddx * w

                return by_x

            class Helper:
                @staticmethod
                @custom_gradient
                def by_x(x):
                    return 7 * w * x, lambda ddx: 11 * ddx * w

            by_lambda = custom_gradient(lambda x: (7 * w * x, lambda ddx: 11 * ddx * w))
            many = [custom_gradient(lambda x: (7 * w * x, lambda d: 11 * d * w)) for _ in range(1)]
            chosen = {
                "helper": helper(),
                "lambda": by_lambda,
                "class": Helper.by_x,
                "comprehension": many[0],
            }[depth]
            return 5 * dy * x**2, dy * chosen(x)

        return w * x**2, grad

    second = mode(jax.grad(jax.grad(f, 1), (0, 1)))(*ARGS)
    assert_same(second, (jnp.float32(0), jnp.float32(33)))


@MODES
@pytest.mark.parametrize("where", ["in f", "beside f"])
def test_a_function_written_outside_of_the_rule_is_not_inside(mode, where):
    """Wherever it is called: a lost weight is an error, as it is outside of a rule."""

    def loss(w, x):
        @custom_gradient
        def beside(x):
            return 7 * w * x, lambda ddx: 11 * ddx * w

        @custom_gradient
        def f(x, w):
            @custom_gradient
            def in_f(x):
                return 7 * w * x, lambda ddx: 11 * ddx * w

            called = in_f if where == "in f" else beside
            return w * x**2, lambda dy: (dy * called(x), 5 * dy * x**2)

        return f(x, w)

    by_x = jax.grad(loss, 1)
    assert_same(mode(by_x)(*ARGS), jnp.float32(42))
    assert_same(mode(jax.grad(by_x, 1))(*ARGS), jnp.float32(33))
    with pytest.raises(TypeError, match=r"float32\[\]"):
        mode(jax.grad(by_x, 0))(*ARGS)


@MODES
def test_a_rule_that_is_called_outside_of_differentiation(mode):
    """The rule of `f` called as a function: what is inside stays inside."""

    def f(x, w):
        def grad(dy):
            @custom_gradient
            def by_x(x):
                return 7 * dy * w * x, lambda ddx: 11 * ddx * dy * w

            return by_x(x), None

        return w * x**2, grad

    def loss(w, x):
        return f(x, w)[1](jnp.float32(1))[0]

    assert_same(mode(jax.value_and_grad(loss, 1))(*ARGS), (jnp.float32(42), jnp.float32(33)))


@every(TWICE)
def test_second_derivatives_of_the_nested_pattern(way):
    """Of `L = h**2`, by hand: `L_w = dy 5 x**2` is ordinary code, and `L_x` the function inside.

    That declares `13 w x` by `dy` and `11 dy w` by `x`, where `dy = 2 h`; nothing by `w`.
    """
    w, x = ARGS
    h, h_w, h_x = w * x**2, 5 * x**2, 7 * w * x
    expected = (
        (2 * h_w * 5 * x**2, 2 * h_x * 5 * x**2 + 2 * h * 10 * x),
        (2 * h_w * 13 * w * x, 2 * h_x * 13 * w * x + 11 * 2 * h * w),
    )
    assert_same(way(lambda w, x: fused(w, x) ** 2)(*ARGS), expected)
