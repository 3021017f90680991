"""Decorated functions that are written inside a rule, or that one calls."""

import jax
import jax.numpy as jnp
import pytest
from support.helpers import assert_same, eager_and_jit
from support.ways import SECOND, gradient

from tfgrad_jax import custom_gradient

ARGS = W, X = jnp.float32(3), jnp.float32(2)


@custom_gradient
def fused(w, x):
    """TensorFlow's documented nested pattern: the rule declares its own derivative."""

    def grad(dy):
        @custom_gradient
        def by_x(dy, x):
            return 7 * dy * w * x, lambda ddx: (13 * ddx * w * x, 11 * ddx * dy * w)

        return 5 * dy * x**2, by_x(dy, x)

    return w * x**2, grad


# Not those with forward mode, which transposes the rule: what the function inside declares is its
# transpose, and that is another map than its value here.
@pytest.mark.parametrize("way", ["grad of grad", "jacrev of jacrev"])
def test_the_nested_pattern_has_the_second_derivatives_that_it_declares(way):
    """Of `h**2`: `13 w x` by dy and `11 dy w` by x, with dy = 2 h; nothing by w."""
    w, x = ARGS
    h, h_w, h_x = w * x**2, 5 * x**2, 7 * w * x
    expected = (
        (2 * h_w * 5 * x**2, 2 * h_x * 5 * x**2 + 2 * h * 10 * x),
        (2 * h_w * 13 * w * x, 2 * h_x * 13 * w * x + 11 * 2 * h * w),
    )
    assert_same(SECOND[way](lambda w, x: fused(w, x) ** 2)(*ARGS), expected)


def inner(w, **options):
    """Return `7 w x`, declared 11 w by `x`, and 13 x by a variable."""
    rule = lambda x: lambda d: 11 * d * w  # noqa: E731
    if options.pop("takes", False):
        rule = lambda x: lambda d, variables: (11 * d * w, [13 * d * x for _ in variables])  # noqa: E731
    return custom_gradient(lambda x: (7 * w * x, rule(x)), **options)


def by_a_local_function(w, x):
    return lambda dy: (
        5 * dy * x**2,
        dy * custom_gradient(lambda x: (7 * w * x, lambda d: 11 * d * w))(x),
    )


def by_a_function_in_a_helper(w, x):
    def rule(dy):
        def helper():
            return custom_gradient(lambda x: (7 * w * x, lambda d: 11 * d * w))

        return 5 * dy * x**2, dy * helper()(x)

    return rule


# A rule that calls a function written in it, and the derivative of that by `w`.
INSIDE = {
    "a function": (by_a_local_function, 0),
    "a function in a helper": (by_a_function_in_a_helper, 0),
    "autodiff": (
        lambda w, x: lambda dy: (5 * dy * x**2, dy * inner(w, variables="autodiff")(x)),
        14,
    ),
    "variables": (lambda w, x: lambda dy: (5 * dy * x**2, dy * inner(w, takes=True)(x)), 26),
}


@eager_and_jit
@pytest.mark.parametrize("name", INSIDE)
def test_what_a_function_inside_a_rule_captures_is_constant_unless_it_says_so(name, mode):
    rule, by_w = INSIDE[name]
    h = custom_gradient(lambda w, x: (w * x**2, rule(w, x)))
    assert_same(mode(gradient(h))(*ARGS), (jnp.float32(20), jnp.float32(42)))
    second = mode(jax.grad(jax.grad(h, 1), (0, 1)))(*ARGS)
    assert_same(second, (jnp.float32(by_w), jnp.float32(33)))


@eager_and_jit
@pytest.mark.parametrize("is_called", [False, True], ids=["is the rule", "is called by it"])
def test_a_decorated_function_in_f_is_not_inside_the_rule_that_it_is(is_called, mode):
    """At second order it gives what an equal function gives that a plain rule calls."""

    def of(variables):
        @custom_gradient
        def h(x):
            times = custom_gradient(lambda dy: (7 * dy * x, lambda d: 13 * d), variables=variables)
            return x**2, (lambda dy: times(dy)) if is_called else times

        return h

    _, x = ARGS
    assert_same(mode(jax.grad(of(None)))(x), 7 * x)
    with pytest.raises(TypeError, match=r"closes over[^$]*float32\[\]"):
        mode(jax.grad(jax.grad(of(None))))(x)
    assert_same(mode(jax.grad(jax.grad(of("autodiff"))))(x), jnp.float32(7))
    # Of 49 h h: by the upstream 13 * 2 h' = 13 * 14 x, by what it closes over 7 * 2 h = 14 x**2.
    squared = mode(jax.grad(jax.grad(lambda x: of("autodiff")(x) ** 2)))(x)
    assert_same(squared, 13 * 14 * x + 14 * x**2)


@pytest.mark.parametrize("way", ["grad of grad", "hessian", "hessian(jit)", "jacfwd of jacfwd"])
def test_a_rule_calls_a_function_that_has_a_weight_as_a_default(way):
    def loss(w, x):
        @custom_gradient
        def product(x, *, w=w):
            return w * x, lambda dy, variables: (7 * w * dy, [5 * x * dy for _ in variables])

        return custom_gradient(lambda x: (x * x, lambda dy: dy * product(x)))(x)

    zero = jnp.zeros_like(W)
    assert_same(SECOND[way](loss)(*ARGS), ((zero, zero), (5 * X, 7 * W)))
