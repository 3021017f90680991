"""Refs (`jax.new_ref`) that a function or its rule closes over: state, which has no gradient."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, product
from support.ways import gradient

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)
PROGRAMS = {}


def program(*expected):
    def register(f):
        PROGRAMS[f.__name__] = f, tuple(map(jnp.float32, expected))
        return f

    return register


@program(84, 7)
def written_by_f(r, x):
    @custom_gradient
    def f(x):
        r[...] += x
        kept = r[...]
        return kept * x, lambda dy: 7 * dy * kept

    return jax.grad(lambda x: f(x) + f(x))(x), r[...]


@program(154, 11)
def written_by_the_rule(r, x):
    """How a gradient is logged: the Ref has the upstream."""
    f = custom_gradient(lambda x: (x**2, lambda dy: (r.__setitem__(..., dy), 7 * dy * x)[1]))
    return jax.grad(lambda x: 11 * f(x))(x), r[...]


@program(20, 42)
def of_a_weight(_, x):
    """Written by `f` from its weight, in a loop and a `jit`, and read: as good as the weight."""

    def loss(w, x):
        @custom_gradient
        def f(x):
            first, second = jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros_like(x))
            lax.fori_loop(0, 4, lambda i, _: first.__setitem__(..., first[...] + w * x / 4), None)
            jax.jit(lambda a, b: a.__setitem__(..., b[...] * x))(second, first)
            return jax.freeze(second), lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

        return f(x)

    return gradient(loss)(W, x)


@program(10, 42, 2)
def counted_beside_a_weight(_, x):
    r = jax.new_ref(jnp.float32(1))
    note = lambda *_: (r.__setitem__(..., r[...] + 1), 1)[1]  # noqa: E731
    loss = lambda w, x: product(w, note, lambda *_: r[...])(x)  # noqa: E731
    return *gradient(loss)(W, x), r[...]


@eager_and_jit
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_ref_is_state(name, mode):
    run, expected = PROGRAMS[name]
    assert_same(mode(lambda x: run(jax.new_ref(jnp.float32(3)), x))(X), expected)


def test_eagerly_forward_mode_takes_a_rule_that_reads_a_ref():
    r = jax.new_ref(jnp.float32(3))
    f = custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x * r[...]))
    assert_same(jax.jvp(f, (X,), (X,)), (jnp.float32(4), jnp.float32(84)))


@eager_and_jit
@pytest.mark.parametrize("variables", [None, "autodiff"])
def test_a_weight_in_a_captured_ref_is_an_error(variables, mode):
    """No gradient goes through it; zero would be wrong."""

    def loss(w, x):
        r = jax.new_ref(w * 1.0)
        f = lambda x: (lambda kept: (kept * x, lambda dy: 7 * dy * kept))(r[...])  # noqa: E731
        return custom_gradient(f, variables=variables)(x)

    with pytest.raises(TypeError, match="closes over"):
        mode(gradient(loss))(W, X)
