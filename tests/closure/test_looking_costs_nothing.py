"""What is looked through for tracers does not grow with what was called or registered before."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient

X = jnp.float32(2.0)


@functools.cache
def _cached(n):
    return [n]


def _fill_cache():
    for n in range(6000):
        _cached(n)


def _register_types():
    for i in range(1500):
        jax.tree_util.register_pytree_node(
            type(f"T{i}", (), {}), lambda t: ((), None), lambda *_: 0
        )


@pytest.mark.parametrize(
    ("held", "grow"), [(_cached, _fill_cache), (jax.jit(jnp.sin), _register_types)]
)
def test_a_rule_still_runs_only_backwards(held, grow):
    grow()
    calls = []

    @custom_gradient
    def h(x):
        calls.append("forward")

        def grad_fn(dy):
            calls.append("backward")
            return dy * 3, held  # for the closure to hold it

        return x * x, lambda dy: grad_fn(dy)[0]

    y, pull_back = jax.vjp(h, X)
    assert_same(y, 4.0)
    assert calls == ["forward"]
    assert_same(pull_back(jnp.float32(1.0))[0], 3.0)
    assert calls == ["forward", "backward"]


def test_a_weight_in_a_tree_is_found_among_many_types():
    """The function is made anew around the weight, and sees values: it is not traced."""
    _register_types()
    seen = []

    def loss(w, x):
        params = {"w": w}

        @custom_gradient(variables=params)
        def h(x):
            seen.append(bool(x > 1))
            return params["w"] * x, lambda dy, variables: (7 * dy, {"w": 5 * dy})

        return h(x)

    got = jax.grad(loss, (0, 1))(jnp.float32(3), X)
    assert_same(got, (jnp.float32(5), jnp.float32(7)))
    assert seen == [True]
