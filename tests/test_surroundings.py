"""The rest of JAX around a decorated function: each program gives what a hand-written rule gives.

A program takes a way to make a function of a rule (`pairs.py`), by hand or decorated, and returns
arrays. All rules are wrong by a factor of 7, so equal results prove that the rule ran.
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, sample
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from pairs import RULES, STYLES, Rule, by_hand, inputs, undeclared

W, X = RULES["elementwise"].arrays
PROGRAMS = {}
STYLES_HERE = {"inputs": inputs, "undeclared": undeclared}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def of(way, name="elementwise"):
    return way(RULES[name])


def gradients(f):
    return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1))


def rule(forward, backward):
    return Rule(forward, backward, (W, X))


# --- what is saved ------------------------------------------------------------------------------

POLICIES = jax.checkpoint_policies
CHECKPOINTS = {
    "everything": POLICIES.everything_saveable,
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_with_no_batch_dims_saveable,
    "names": POLICIES.save_only_these_names("product"),
    "any but": POLICIES.save_any_names_but_these("product"),
    "both": POLICIES.save_from_both_policies(
        POLICIES.dots_saveable, POLICIES.save_only_these_names("product")
    ),
}


def _named(w, x):
    product = checkpoint_name(w * x, "product")
    return jnp.sin(product), (x, w, product)


def _named_rule(residuals, dy):
    x, w, product = residuals
    slope = 7 * dy * jnp.cos(product)
    return slope * x, slope * w


@pytest.mark.parametrize(
    ("order", "policy", "style"), sample(itertools.product((1, 2), CHECKPOINTS, STYLES_HERE), 8)
)
def test_remat(order, policy, style):
    def run(way):
        layer = jax.checkpoint(way(rule(_named, _named_rule)), policy=CHECKPOINTS[policy])
        first = gradients(lambda w, x: layer(w, jnp.sin(layer(w, x))))
        if order == 1:
            return jax.jit(first)(W, X)
        return jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(linear(layer, w)))))(W)

    def linear(layer, w):  # `layer` is not in its own gradient, where by hand is wrong
        return jax.grad(lambda x: jnp.sum(layer(w, x)))(X)

    assert_same(run(STYLES_HERE[style]), run(by_hand))


# --- programs around it -------------------------------------------------------------------------


@program
def donation(way):
    step = jax.jit(gradients(of(way)), donate_argnums=0)
    return step(W + 0, X)


@program
def map_with_batch_size(way):
    f = of(way)
    return gradients(lambda w, x: lax.map(lambda wx: f(*wx), (w, x), batch_size=3))(W, X)


@program
def custom_vmap_in_both(way):
    @jax.custom_batching.custom_vmap
    def sine(x):
        return jnp.sin(x)

    @sine.def_vmap
    def _(size, batched, x):
        return 3 * jnp.sin(x), batched[0]  # wrong on purpose: to show that it ran

    def forward(w, x):
        return sine(w * x), (w, x)

    def backward(residuals, dy):
        w, x = residuals
        slope = 7 * dy * sine(w * x)
        return slope * x, slope * w

    f = way(rule(forward, backward))
    return jax.vmap(gradients(f))(W, X), jax.vmap(f)(W, X)


@program
def pure_callback_in_both(way):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def host(f, x):
        return jax.pure_callback(
            lambda x: f(np.asarray(x)), shape(x.shape), x, vmap_method="sequential"
        )

    def forward(w, x):
        return host(np.sin, w * x), (w, x)

    def backward(residuals, dy):
        w, x = residuals
        slope = 7 * dy * host(np.cos, w * x)
        return slope * x, slope * w

    g = gradients(way(rule(forward, backward)))
    return g(W, X), jax.jit(g)(W, X), jax.vmap(g)(W, X)


@program
def io_callback_in_both(way):
    heard = {}

    def tell(name, x):
        io_callback(lambda x: heard.update({name: np.float32(x)}), None, jnp.sum(x))

    def forward(w, x):
        tell("value", x)
        return w * x, (w, x)

    def backward(residuals, dy):
        w, x = residuals
        tell("rule", dy)
        return 7 * dy * x, 7 * dy * w

    got = jax.jit(gradients(way(rule(forward, backward))))(W, X)
    jax.effects_barrier()
    assert set(heard) == {"value", "rule"}
    return got, heard


@program
def keys(way):
    """A key is an input without a gradient, and a residual."""

    def forward(w, key):
        return w * jax.random.normal(key, w.shape), (w, key)

    def backward(residuals, dy):
        w, key = residuals
        return 7 * dy * jax.random.normal(key, w.shape), None

    h = way(rule(forward, backward))
    loss = jax.grad(lambda w, key: jnp.sum(h(w, key) ** 2))
    each = jax.random.split(jax.random.key(1), 8)
    return loss(W, each[0]), jax.jit(loss)(W, each[0]), jax.vmap(loss)(W, each)


@program
def vjp_objects(way):
    """A pullback is a pytree: it leaves one `jit` and enters another."""

    @jax.jit
    def forward(w, x):
        return jax.vjp(of(way), w, x)

    @jax.jit
    def backward(pull, dy):
        return pull(dy)

    y, pull = forward(W, X)
    return backward(pull, 2 * y), jax.tree.map(lambda leaf: leaf, pull)(y)


@program
def checks_in_both(way):
    def forward(w, x):
        checkify.check(jnp.all(x > 0), "expected x > 0 in the function")
        return w * x, (w, x)

    def backward(residuals, dy):
        w, x = residuals
        checkify.check(jnp.all(w > 0), "expected w > 0 in the rule")
        return 7 * dy * x, 7 * dy * w

    g = gradients(way(rule(forward, backward)))
    checked = checkify.checkify(g, errors=checkify.user_checks)
    error, got = checked(W, X)
    assert error.get() is None
    assert "in the function" in checked(W, -X)[0].get()
    assert "in the rule" in checked(-W, X)[0].get()
    return got


@program
def hidden_axis_name(way):
    def forward(w, x):
        return w * x - lax.pmean(w * x, "i"), (w, x)

    def backward(residuals, dy):
        w, x = residuals
        dz = 7 * (dy - lax.pmean(dy, "i"))
        return dz * x, dz * w

    return jax.vmap(gradients(way(rule(forward, backward))), axis_name="i")(W, X)


# --- Refs: arrays that are written to -----------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(jax.vjp(jnp.sin, 1.0)[1], "with_refs"), reason="this JAX has no `with_refs`"
)
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_gradients_into_refs(style):
    def run(way):
        dw, dx = jax.new_ref(jnp.ones_like(W)), jax.new_ref(jnp.zeros_like(X))
        y, pull = jax.vjp(of(way), W, X)
        pull.with_refs(dw, dx)(2 * y)
        return dw[...], dx[...]

    assert_same(run(style), run(by_hand))


@pytest.mark.skipif(
    "saveable_args" not in inspect.signature(jax.vjp).parameters,
    reason="this JAX has no `saveable_args`",
)
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_arguments_that_are_not_saved(style):
    def run(way):
        y, pull = jax.vjp(of(way), W, X, saveable_args=(False, True))
        missing = [type(r).__name__ for r in pull.args_res]
        pull.args_res = [W, X]
        return pull(2 * y), missing

    (ours, ours_missing), (hand, hand_missing) = run(style), run(by_hand)
    assert_same(ours, hand)
    assert ours_missing[0] == hand_missing[0] == "NotSaveable"


# --- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES_HERE.values(), ids=STYLES_HERE)
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_by_hand(name, style):
    with jax.numpy_rank_promotion("allow"):  # `vmap` and loops change ranks
        assert_same(PROGRAMS[name](style), PROGRAMS[name](by_hand), rtol=1e-4, atol=1e-4)
