"""Rules that call their own function from a closure over a weight, at every order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient


def exponential(w):
    """`exp(w x)` whose rule calls itself; declared: 2 w y for x and 5 x y for w."""

    @custom_gradient
    def exp(x):
        def grad(dy, variables=()):
            dx = 2 * dy * w * exp(x)
            return (dx, [5 * dy * x * exp(x)]) if len(variables) else dx

        return jnp.exp(w * x), grad

    return exp


def waves(w):
    """sin and cos of `w x`, each with the other in its rule."""

    @custom_gradient
    def sin(x):
        def grad(dy, variables=()):
            dx = 7 * dy * w * cos(x)
            return (dx, [5 * dy * x * cos(x)]) if len(variables) else dx

        return jnp.sin(w * x), grad

    @custom_gradient
    def cos(x):
        def grad(dy, variables=()):
            dx = -7 * dy * w * sin(x)
            return (dx, [-5 * dy * x * sin(x)]) if len(variables) else dx

        return jnp.cos(w * x), grad

    return sin


def derivatives(h, count):
    """Return the derivatives of `h` by x of the orders 0 to `count`."""
    functions = [h]
    for _ in range(count):
        functions.append(jax.grad(functions[-1], 1))
    return lambda w, x: [f(w, x) for f in functions]


@eager_and_jit
def test_a_rule_that_calls_its_own_function(mode):
    w, x = 1.5, 0.5
    got = mode(derivatives(lambda w, x: exponential(w)(x), 3))(w, x)
    assert_same(got, [jnp.float32((2 * w) ** n * np.exp(w * x)) for n in range(4)])


@eager_and_jit
def test_two_rules_that_call_each_other(mode):
    w, x = 1.5, 0.5
    got = mode(derivatives(lambda w, x: waves(w)(x), 3))(w, x)
    s, c = np.sin(w * x), np.cos(w * x)
    assert_same(
        got, [jnp.float32(v) for v in (s, 7 * w * c, -((7 * w) ** 2) * s, -((7 * w) ** 3) * c)]
    )


@eager_and_jit
@pytest.mark.parametrize("made", [exponential, waves])
def test_recursion_without_captured_tracers(mode, made):
    w, x = 1.5, 0.5
    h = made(w)
    got = mode(lambda x: derivatives(lambda _, x: h(x), 3)(w, x))(x)
    s, c, e = np.sin(w * x), np.cos(w * x), np.exp(w * x)
    expected = (
        [(2 * w) ** n * e for n in range(4)]
        if made is exponential
        else [s, 7 * w * c, -((7 * w) ** 2) * s, -((7 * w) ** 3) * c]
    )
    assert_same(got, [jnp.float32(v) for v in expected])


@eager_and_jit
def test_recursion_with_respect_to_the_captured_weight(mode):
    """The second derivatives of a rule that calls its own function, by w and by x.

    In a rule, what the inner call closes over has a derivative, as its rule takes variables.
    """
    w, x = 1.5, 0.5

    def h(w, x):
        return exponential(w)(x)

    e = np.exp(w * x)
    # d/dx = 2 w exp(x) and d/dw = 5 x exp(x), where exp has the derivatives 2 w e and 5 x e.
    expected = (
        (5 * x * 5 * x * e, 5 * e + 5 * x * 2 * w * e),
        (2 * e + 2 * w * 5 * x * e, 2 * w * 2 * w * e),
    )
    got = mode(jax.jacrev(jax.grad(h, (0, 1)), (0, 1)))(w, x)
    assert_same(got, jax.tree.map(jnp.float32, expected))
    third = mode(jax.grad(jax.grad(jax.grad(h))))(w, x)
    assert_same(third, jnp.float32((5 * x) ** 3 * e))


@eager_and_jit
def test_hessian_of_a_rule_that_calls_its_own_function(mode):
    w, x = 1.5, 0.5
    e = np.exp(w * x)
    got = mode(jax.hessian(lambda x: exponential(w)(x)))(x)
    assert_same(got, jnp.float32((2 * w) ** 2 * e))


@pytest.mark.slow
def test_no_tracer_outlives_its_trace():
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda w, x: exponential(w)(x), (0, 1)))(1.5, 0.5)


def test_in_a_rule_captured_values_are_constant_unless_it_takes_variables():
    """As in TensorFlow's `op_with_fused_backprop`: no error, and no derivative."""

    def loss(takes_variables):
        def of(w, x):
            @custom_gradient
            def f(x):
                def grad(dy):
                    @custom_gradient
                    def slope(x):
                        if takes_variables:
                            return w * x, lambda dy, variables: (3 * dy * w, [11 * dy * x])
                        return w * x, lambda dy: 3 * dy * w

                    return 7 * dy * slope(x)

                return x**2, grad

            return f(x)

        return of

    for takes_variables, by_w in [(True, 7 * 11 * 2.0), (False, 0.0)]:
        second = jax.grad(jax.grad(loss(takes_variables), 1), (0, 1))
        for mode in (lambda f: f, jax.jit):
            assert_same(mode(second)(3.0, 2.0), (jnp.float32(by_w), jnp.float32(7 * 3 * 3)))


@eager_and_jit
def test_a_rule_that_calls_its_own_function_through_a_partial(mode):
    """By a keyword-only weight that is traced; the rule compiles the call."""

    def value(x):
        @custom_gradient
        def exp(x, *, w):
            def grad(dy, variables):
                return 2 * dy * w * jax.jit(h)(x), [5 * dy * x * h(x)]

            return jnp.exp(w * x), grad

        h = functools.partial(exp, w=1.5 + 0 * x)
        return h(x)

    functions = [value]
    for _ in range(3):
        functions.append(jax.grad(functions[-1]))
    got = mode(lambda x: [f(x) for f in functions])(0.5)
    assert_same(got, [jnp.float32(3.0**n * np.exp(0.75)) for n in range(4)], rtol=1e-6)
