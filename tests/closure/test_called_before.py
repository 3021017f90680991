"""Nothing depends on what was called before: every pair of calls, on fresh functions.

Caches of `jax.jit` outlive the call that filled them. The value is `x**2` (or `w x**2`), the
declared derivatives are `7 x` (or `7 w x` and `5 x**2`).
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

X = jnp.float32(2.0)
ONE = jnp.float32(1.0)


def fresh():
    @custom_gradient
    def h(x):
        return x**2, lambda dy: 7 * dy * x

    return jax.jit(h)


def _in_a_rule(h):
    """Call it where the rule of another function runs; `h` is not declared there."""

    @custom_gradient
    def outer(x):
        return 3 * x, lambda dy: dy * h(x)

    return outer


# Each with its number at x = 2, by hand: h = 4, h' = 7 x = 14, h'' = 7; L = h**2 has L'' = 448.
CALLS = {
    "value": (lambda h: h(X), 4.0),
    "grad": (lambda h: jax.grad(h)(X), 14.0),
    "jit of grad": (lambda h: jax.jit(jax.grad(h))(X), 14.0),
    "grad of grad": (lambda h: jax.grad(jax.grad(lambda x: h(x) ** 2))(X), 448.0),
    "vmap": (lambda h: jax.vmap(h)(X[None])[0], 4.0),
    "jvp": (lambda h: jax.jvp(h, (X,), (ONE,))[1], 14.0),
    "jacfwd of jacfwd": (lambda h: jax.jacfwd(jax.jacfwd(lambda x: h(x) ** 2))(X), 448.0),
    "hessian": (lambda h: jax.hessian(lambda x: h(x) ** 2)(X), 448.0),
    "in a rule": (lambda h: jax.grad(_in_a_rule(h))(X), 4.0),
    "in a rule, twice": (lambda h: jax.grad(jax.grad(_in_a_rule(h)))(X), 14.0),
    "in a rule, jvp": (lambda h: jax.jvp(jax.grad(_in_a_rule(h)), (X,), (ONE,))[1], 14.0),
    "in a jvp of a rule": (lambda h: jax.jvp(_in_a_rule(h), (X,), (ONE,))[1], 4.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("first", CALLS)
def test_every_pair_of_calls(first):
    for second in CALLS:
        h = fresh()
        for name in (first, second, first):
            call, expected = CALLS[name]
            assert_same(jnp.asarray(call(h), jnp.float32), jnp.float32(expected))


def test_all_in_one_row():
    h = fresh()
    for name in (*CALLS, *reversed(CALLS)):
        call, expected = CALLS[name]
        assert_same(jnp.asarray(call(h), jnp.float32), jnp.float32(expected))


# --- closures, made outside of the rule that calls them -------------------------------------------


def _closure(variables, jit):
    """Return a function of `w` and `x` that calls, in turn, what it is told to."""

    def made(w):
        def f(x):
            if variables == "taken":
                return w * x**2, lambda dy, variables: (
                    7 * dy * w * x,
                    [5 * dy * x**2 for _ in variables],
                )
            return w * x**2, lambda dy: 7 * dy * w * x

        option = "autodiff" if variables == "autodiff" else None
        g = custom_gradient(f, variables=option)
        return jax.jit(g) if jit else g

    return made


def _warm(g, where):
    """Run what may leave something behind."""
    if where == "rule":
        jax.grad(_in_a_rule(g))(X)
    elif where == "rule, twice":
        jax.grad(jax.grad(_in_a_rule(g)))(X)
    elif where == "jvp of a rule":
        jax.jvp(_in_a_rule(g), (X,), (ONE,))
    elif where == "outside":
        g(X)
    elif where == "grad":
        jax.grad(g)(X)


WARM = ["nothing", "rule", "rule, twice", "jvp of a rule", "outside", "grad"]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("where", WARM)
@pytest.mark.parametrize(("variables", "by_w"), [("taken", 20.0), ("autodiff", 4.0)])
def test_a_closure_keeps_its_gradients(variables, by_w, where, jit):
    made = _closure(variables, jit)

    def loss(w, x):
        g = made(w)
        _warm(g, where)
        return g(x)

    expected = jnp.float32(by_w), jnp.float32(42)
    assert_same(jax.grad(loss, (0, 1))(jnp.float32(3), X), expected)
    assert_same(jax.jit(jax.grad(loss, (0, 1)))(jnp.float32(3), X), expected)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("where", WARM)
def test_a_lost_weight_is_an_error_before_and_after(where, jit):
    made = _closure("refused", jit)

    def loss(w, x):
        g = made(w)
        _warm(g, where)
        return g(x)

    with pytest.raises(TypeError, match=r"float32\[\]"):
        jax.grad(loss)(jnp.float32(3), X)
    assert_same(jax.grad(loss, 1)(jnp.float32(3), X), jnp.float32(42))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("order", list(itertools.permutations(["rule", "outside"])))
def test_called_in_a_rule_and_outside_in_one_loss(order, jit):
    """In either order; by `w` where the rule calls it is second order."""
    made = _closure("taken", jit)

    def loss(w, x):
        g = made(w)
        outer = _in_a_rule(g)
        results = {}
        for name in order:
            results[name] = jax.grad(outer)(x) if name == "rule" else g(x)
        return results["rule"] + 10 * results["outside"]

    # Both are g(x): 11 times its gradients.
    assert_same(
        jax.grad(loss, (0, 1))(jnp.float32(3), X), (jnp.float32(11 * 20), jnp.float32(11 * 42))
    )
