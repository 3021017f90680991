"""Random compositions of decorated functions, in both modes and one over the other."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from mode_cases import loss, seven

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.slow

UNARY = {"sin": jnp.sin, "tanh": jnp.tanh, "square": lambda x: x * x, "sigmoid": jax.nn.sigmoid}


def _random_functions(choices):
    """Return a composition of decorated functions, and the same of plain ones."""

    def compose(decorated):
        def f(x):
            for name, matrix in choices:
                matrix = jnp.asarray(matrix, x.dtype).reshape(2, 2)
                g = UNARY[name]
                if decorated:

                    def pair(x, m, g=g):
                        y, pull_back = jax.vjp(lambda x, m: g(m @ x), x, m)
                        return y, lambda dy: jax.tree.map(lambda c: 7 * c, pull_back(dy))

                    x = custom_gradient(pair)(x, matrix)
                else:
                    x = seven(lambda x, m, g=g: g(m @ x))(x, matrix)
            return x

        return f

    return compose(True), compose(False)


numbers = st.floats(-1, 1, width=32)


pairs = st.tuples(numbers, numbers)
layers = st.tuples(st.sampled_from(sorted(UNARY)), st.tuples(*[numbers] * 4))


def check_random_function(choices, x, t):
    h, plain = _random_functions(choices)
    x, t = jnp.asarray(x, jnp.float32), jnp.asarray(t, jnp.float32)
    expected = jax.jacrev(plain)(x)
    assert_same(jax.jacfwd(h)(x), expected, rtol=1e-3, atol=1e-3)
    assert_same(jax.jacrev(h)(x), expected, rtol=1e-3, atol=1e-3)
    hessian = jax.hessian(loss(plain))(x)
    scale = 1e-4 * (1 + float(jnp.max(jnp.abs(hessian))))
    assert_same(jax.hessian(loss(h))(x), hessian, rtol=1e-3, atol=scale)
    product = hessian @ t
    assert_same(jax.jvp(jax.grad(loss(h)), (x,), (t,))[1], product, rtol=1e-3, atol=scale)
    by_forward = jax.grad(lambda x: jax.jvp(loss(h), (x,), (t,))[1])(x)
    assert_same(by_forward, product, rtol=1e-3, atol=scale)


@hypothesis.settings(max_examples=3)
@hypothesis.given(st.lists(layers, min_size=1, max_size=2), pairs, pairs)
def test_random_functions(choices, x, t):
    check_random_function(choices, x, t)


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(st.lists(layers, min_size=1, max_size=4), pairs, pairs)
def test_many_random_functions(choices, x, t):
    check_random_function(choices, x, t)
