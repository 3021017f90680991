"""Random rules at every order, against a small algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.slow

#
# An expression in `x` and `u = h(x)` is a polynomial {(i, j): c}, the sum of `c x**i u**j`. Its
# derivative is `d/dx + D d/du`, where `D`, in `x` and `u` itself, is the *declared* gradient.


def derivative(p, declared):
    result = {}
    for (i, j), c in p.items():
        if i:
            result[i - 1, j] = result.get((i - 1, j), 0) + c * i
        if j:
            for (k, m), d in declared.items():
                key = (i + k, j - 1 + m)
                result[key] = result.get(key, 0) + c * j * d
    return result


def evaluate(p, x, u):
    return sum((c * x**i * u**j for (i, j), c in p.items()), 0 * x)


def polynomials(most_x, most_u, size):
    powers = st.tuples(st.integers(0, most_x), st.integers(0, most_u))
    return st.dictionaries(powers, st.integers(-3, 3), min_size=1, max_size=size)


random_rules = given(
    value=polynomials(2, 0, 3),
    declared=polynomials(2, 1, 2),
    loss=polynomials(1, 2, 2),
    x=st.sampled_from([-1.5, -0.5, 0.25, 1.0, 2.0]),
)


def check_orders(value, declared, loss, x, around):
    """Compare with the algebra; the rule is `dy * D(x, h(x))`: it may call the function itself."""

    @custom_gradient
    def h(x):
        def grad(dy):
            return dy * evaluate(declared, x, h(x) if any(j for _, j in declared) else 0)

        return evaluate(value, x, 0 * x), grad

    f = lambda x: evaluate(loss, x, h(x))  # noqa: E731
    u = evaluate(value, x, 0.0)
    expected = loss
    for order in range(4):
        derivative_of_f = functools.reduce(lambda g, _: jax.grad(g), range(order), f)
        actual = around(derivative_of_f)(jnp.float32(x))
        wanted = np.float32(evaluate(expected, x, u))
        scale = evaluate({k: abs(c) for k, c in expected.items()}, abs(x), abs(u)) + 1
        np.testing.assert_allclose(actual, wanted, atol=1e-5 * scale, rtol=1e-5)
        assert actual.dtype == jnp.float32
        expected = derivative(expected, declared)


@random_rules
def test_random_rules_agree_with_algebra(value, declared, loss, x):
    check_orders(value, declared, loss, x, lambda f: f)


@pytest.mark.slow
@random_rules
def test_random_rules_agree_with_algebra_under_jit(value, declared, loss, x):
    check_orders(value, declared, loss, x, jax.jit)


def test_the_algebra_itself():
    """The example of the head, and an undecorated function, whose rule is its derivative."""
    seven_x, u_squared = {(1, 0): 7}, {(0, 2): 1}
    results = []
    p = u_squared
    for _ in range(4):
        results.append(evaluate(p, 2.0, 4.0))
        p = derivative(p, seven_x)
    assert results == [16, 112, 448, 588]
    assert derivative({(3, 1): 2}, {(1, 0): 2}) == {(2, 1): 6, (4, 0): 4}
