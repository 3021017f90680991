"""The rest of JAX around a decorated function: each program gives what a hand-written rule gives.

A program takes a way to make a function of a rule (`pairs.py`), by hand or decorated, and returns
arrays. All rules are wrong by a factor of 7, so equal results prove that the rule ran.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from support.helpers import assert_same
from support.pairs import RULES, by_hand, inputs, squared, undeclared

LAYER = RULES["elementwise"]
W, X = LAYER.arrays
PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def of_product(way, value, slope):
    """Make `value(w x)`, whose declared derivative by the product is `slope(w x, dy)`."""

    def backward(residuals, dy):
        w, x = residuals
        dp = slope(w * x, dy)
        return dp * x, dp * w

    return way(LAYER._replace(forward=lambda w, x: (value(w * x), (w, x)), backward=backward))


@program
def checkpoint_policies(way):
    named = of_product(
        way, lambda p: jnp.sin(checkpoint_name(p, "product")), lambda p, dy: 7 * dy * jnp.cos(p)
    )
    policy = jax.checkpoint_policies.save_any_names_but_these("product")
    kept = jax.checkpoint(named, policy=policy)

    def linear(w):  # `kept` is not in its own gradient, where by hand is wrong
        return jax.grad(lambda x: jnp.sum(kept(w, x)))(X)

    first = squared(lambda w, x: kept(w, jnp.sin(kept(w, x))))
    return jax.jit(first)(W, X), jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(linear(w)))))(W)


@program
def vjp_objects(way):
    """A pullback is a pytree: it leaves one `jit` and enters another."""
    y, pull = jax.jit(lambda w, x: jax.vjp(way(LAYER), w, x))(W, X)
    called = jax.jit(lambda pull, dy: pull(dy))(pull, 2 * y)
    return called, jax.tree.map(lambda leaf: leaf, pull)(y)


@program
def io_callback_in_both(way):
    heard = {}

    def tell(name, x):
        io_callback(lambda x: heard.update({name: np.float32(x)}), None, jnp.sum(x))
        return x

    f = of_product(way, lambda p: tell("value", p), lambda p, dy: 7 * tell("rule", dy))
    got = jax.jit(squared(f))(W, X)
    jax.effects_barrier()
    assert set(heard) == {"value", "rule"}
    return got, heard


@program
def checks_in_both(way):
    def value(p):
        checkify.check(jnp.all(p > 0), "expected a positive product in the function")
        return p

    def slope(p, dy):
        checkify.check(jnp.all(dy < 100), "expected a small upstream in the rule")
        return 7 * dy

    checked = checkify.checkify(squared(of_product(way, value, slope)), errors=checkify.user_checks)
    error, got = checked(W, X)
    assert error.get() is None
    assert "in the function" in checked(W, -X)[0].get()
    assert "in the rule" in checked(1000 * W, X)[0].get()
    return got


@program
def gradients_into_refs(way):
    dw, dx = jax.new_ref(jnp.ones_like(W)), jax.new_ref(jnp.zeros_like(X))
    y, pull = jax.vjp(way(LAYER), W, X)
    pull.with_refs(dw, dx)(2 * y)
    return dw[...], dx[...]


@pytest.mark.parametrize("style", [inputs, undeclared], ids=["inputs", "undeclared"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_by_hand(name, style):
    with jax.numpy_rank_promotion("allow"):  # `vmap` and loops change ranks
        assert_same(PROGRAMS[name](style), PROGRAMS[name](by_hand), rtol=1e-4, atol=1e-4)
