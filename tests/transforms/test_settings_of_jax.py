"""Under each of JAX's settings a rule gives what the same rule gives by hand: value and type.

`conftest.py` has strict promotion of dtypes and ranks for all tests. A setting that refuses the
rule by hand has nothing to say here, and is not among these.
"""

import contextlib
import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit, sample
from pairs import STYLES, Rule

from tfgrad_jax import custom_gradient

W = jnp.float32([[0.5, -0.25], [0.125, 1.0]])
X = jnp.float32([1.0, 2.0])


@contextlib.contextmanager
def updated(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


SETTINGS = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "enable_checks": lambda: updated("jax_enable_checks", True),
    "checking_leaks": jax.checking_leaks,
    "x64": lambda: updated("jax_enable_x64", True),
    "matmul precision": lambda: jax.default_matmul_precision("float32"),
    "disable_jit": jax.disable_jit,
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "warnings are errors": warnings_are_errors,
}


def forward(w, x):
    y = jnp.tanh(x @ w)
    return y, (w, x, y)


def backward(residuals, dy):
    w, x, y = residuals
    d = jnp.float32(7) * dy * (jnp.float32(1) - y * y)
    return jnp.outer(x, d), w @ d


RULE = Rule(forward, backward, (W, X))


def every_order(rule):
    """Return the rule by hand, right at every order: its forward pass calls the function."""
    h = jax.custom_vjp(lambda *args: rule.forward(*args)[0])
    h.defvjp(
        lambda *args: (h(*args), args),
        lambda args, dy: rule.backward(rule.forward(*args)[1], dy),
    )
    return h


def loss_of(h):
    return lambda w, x: jnp.sum(h(w, x))


TAKEN = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit": lambda f: jax.jit(jax.value_and_grad(f, (0, 1))),
    "grad of jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f, 1), (None, 0))(w, jnp.stack([x, x + x])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "second order": lambda f: jax.jacrev(jax.grad(f, 1), 1),
}


@pytest.mark.parametrize(
    ("setting", "style", "taken"), sample(itertools.product(SETTINGS, STYLES, TAKEN), 40)
)
def test_same_as_by_hand(setting, style, taken):
    with SETTINGS[setting]():
        expected = TAKEN[taken](loss_of(every_order(RULE)))(W, X)
        got = TAKEN[taken](loss_of(STYLES[style](RULE)))(W, X)
    assert_same(got, expected)


@eager_and_jit
def test_the_nan_of_a_rule_is_found(mode):
    """`debug_nans` stops in the rule, where it is; and not before it."""

    @custom_gradient
    def f(x):
        return x * x, lambda dy: dy * jnp.log(-x)

    x = jnp.float32(2)
    with jax.debug_nans(True):
        assert_same(mode(f)(x), jnp.float32(4))
        with pytest.raises(FloatingPointError, match="nan"):
            mode(jax.grad(f))(x)
    assert jnp.isnan(mode(jax.grad(f))(x))


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_compiled_gradient_transfers_nothing(style):
    """Eagerly JAX transfers zeros of its own, by hand too."""
    step = jax.jit(jax.value_and_grad(loss_of(style(RULE)), (0, 1)))
    expected = step(W, X)
    with jax.transfer_guard("disallow"):
        got = step(W, X)
    assert_same(got, expected)
