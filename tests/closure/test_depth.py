"""Tracing cost is linear in the depth of nesting, in every protocol."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

RUNS = []


def undeclared(inner, weight):
    @custom_gradient
    def f(x):
        RUNS.append("f")
        y = inner(x) * weight()
        return y, lambda dy, variables: (7 * dy * weight(), [5 * dy * x for _ in variables])

    return f


def declared(inner, weight):
    @custom_gradient(variables={"w": weight()})
    def f(x):
        RUNS.append("f")
        y = inner(x) * weight()
        return y, lambda dy, variables: (7 * dy * variables["w"], {"w": 5 * dy * x})

    return f


def autodiff(inner, weight):
    @custom_gradient(variables="autodiff")
    def f(x):
        RUNS.append("f")
        return inner(x) * weight(), lambda dy: 7 * dy * weight()

    return f


def nested(protocol, depth):
    def h(w, x):
        f = lambda x: x  # noqa: E731
        for _ in range(depth):
            f = protocol(f, lambda: w)  # a helper fetches the weight
        return f(x)

    return h


@eager_and_jit
@pytest.mark.parametrize("protocol", [undeclared, declared, autodiff])
def test_runs_grow_with_the_depth_alone(protocol, mode):
    counts = []
    for depth in (1, 3, 5, 7):
        RUNS.clear()
        by_w, by_x = mode(jax.grad(nested(protocol, depth), (0, 1)))(2.0, 3.0)
        assert_same(by_x, jnp.float32(14))  # the outermost rule hides the others
        # Of `x w**depth`: declared for the outermost, or the ordinary derivative.
        expected = 3 * depth * 2 ** (depth - 1) if protocol is autodiff else 15
        assert_same(by_w, jnp.float32(expected))
        counts.append(len(RUNS))
    growth = [b - a for a, b in itertools.pairwise(counts)]
    assert max(growth) <= 2 * 3, counts  # two levels more


@eager_and_jit
@pytest.mark.parametrize("protocol", [undeclared, declared])
def test_weights_of_all_levels(protocol, mode):
    """The rule of each level is used where it calls the one below by its own derivative."""

    def around(inner, weight):
        @custom_gradient(variables="autodiff")
        def f(x):
            return inner(x), lambda dy: jax.vjp(inner, x)[1](dy)[0]

        return f

    def h(w, x):
        f = protocol(lambda x: x, lambda: w)
        for _ in range(4):
            f = around(f, lambda: w)
        return f(x)

    by_w, by_x = mode(jax.grad(h, (0, 1)))(2.0, 3.0)
    assert_same((by_w, by_x), (jnp.float32(15), jnp.float32(14)))
