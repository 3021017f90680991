"""The rest of JAX around a decorated function: each program gives what a hand-written rule gives.

A program takes a way to make a function of a rule (`pairs.py`), by hand or decorated, and returns
arrays. All rules are wrong by a factor of 7, so equal results prove that the rule ran.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from support.helpers import assert_same
from support.pairs import RULES, Rule, by_hand, inputs, undeclared

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


def gradients(f):
    return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1))


def _named(w, x):
    product = checkpoint_name(w * x, "product")
    return jnp.sin(product), (x, w, product)


def _named_rule(residuals, dy):
    x, w, product = residuals
    slope = 7 * dy * jnp.cos(product)
    return slope * x, slope * w


@program
def checkpoint_policies(way):
    layer = way(Rule(_named, _named_rule, LAYER.arrays))
    policies = jax.checkpoint_policies
    names = policies.save_only_these_names("product")
    found = []
    for policy in (
        policies.everything_saveable,
        policies.nothing_saveable,
        policies.save_any_names_but_these("product"),
        policies.save_from_both_policies(policies.dots_saveable, names),
    ):
        kept = jax.checkpoint(layer, policy=policy)

        def linear(w, kept=kept):  # `layer` is not in its own gradient, where by hand is wrong
            return jax.grad(lambda x: jnp.sum(kept(w, x)))(X)

        first = gradients(lambda w, x, kept=kept: kept(w, jnp.sin(kept(w, x))))
        second = jax.grad(lambda w, of=linear: jnp.sum(jnp.sin(of(w))))
        found.append((jax.jit(first)(W, X), jax.jit(second)(W)))
    return found


@program
def donation(way):
    step = jax.jit(gradients(way(LAYER)), donate_argnums=0)
    return step(W + 0, X)


@program
def map_with_batch_size(way):
    f = way(LAYER)
    return gradients(lambda w, x: lax.map(lambda wx: f(*wx), (w, x), batch_size=3))(W, X)


@program
def vjp_objects(way):
    """A pullback is a pytree: it leaves one `jit` and enters another."""
    y, pull = jax.jit(lambda w, x: jax.vjp(way(LAYER), w, x))(W, X)
    called = jax.jit(lambda pull, dy: pull(dy))(pull, 2 * y)
    return called, jax.tree.map(lambda leaf: leaf, pull)(y)


@program
def custom_vmap_in_both(way):
    @jax.custom_batching.custom_vmap
    def sine(x):
        return jnp.sin(x)

    @sine.def_vmap
    def _(size, batched, x):
        return 3 * jnp.sin(x), batched[0]  # wrong on purpose: to show that it ran

    f = of_product(way, sine, lambda p, dy: 7 * dy * sine(p))
    return jax.vmap(gradients(f))(W, X), jax.vmap(f)(W, X)


@program
def pure_callback_in_both(way):
    def host(f, x):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return jax.pure_callback(lambda x: f(np.asarray(x)), shape, x, vmap_method="sequential")

    sine = of_product(way, lambda p: host(np.sin, p), lambda p, dy: 7 * dy * host(np.cos, p))
    g = gradients(sine)
    return g(W, X), jax.jit(g)(W, X), jax.vmap(g)(W, X)


@program
def io_callback_in_both(way):
    heard = {}

    def tell(name, x):
        io_callback(lambda x: heard.update({name: np.float32(x)}), None, jnp.sum(x))
        return x

    f = of_product(way, lambda p: tell("value", p), lambda p, dy: 7 * tell("rule", dy))
    got = jax.jit(gradients(f))(W, X)
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

    checked = checkify.checkify(
        gradients(of_product(way, value, slope)), errors=checkify.user_checks
    )
    error, got = checked(W, X)
    assert error.get() is None
    assert "in the function" in checked(W, -X)[0].get()
    assert "in the rule" in checked(1000 * W, X)[0].get()
    return got


@program
def hidden_axis_name(way):
    def center(a):
        return a - lax.pmean(a, "i")

    f = of_product(way, center, lambda p, dy: 7 * center(dy))
    return jax.vmap(gradients(f), axis_name="i")(W, X)


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
