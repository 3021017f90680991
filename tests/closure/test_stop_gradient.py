"""`lax.stop_gradient` of a captured weight: `y` depends on it, in both modes alike.

JAX's `stop_gradient` looks behind the tracers of `jvp`, and so a trace of `f` does not show which
weight it read.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

X = 3.0
WEIGHTS = [jnp.float32(2), jnp.float32([2, 4])]


class Box:
    def __init__(self, w):
        self.w = w


def loss(holder, uses, **options):
    """Return a function of `w`: the sum of `3 w`, whose declared derivative is `15 w`."""

    def of(w):
        held = {"box": Box(w), "cell": {"w": w}}[holder]

        def read():
            return held["w"] if holder == "cell" else held.w

        @custom_gradient(**{k: v(w) for k, v in options.items()})
        def f(x):
            y = lax.stop_gradient(read()) * x
            if uses == "stopped and not":
                y += 0 * read()

            def grad(dy, variables):
                assert all(v is read() for v in variables)
                return 7 * dy * read(), [5 * dy * read() * x for _ in variables]

            return y, grad

        return jnp.sum(f(jnp.full(jnp.shape(w), X, jnp.float32)))

    return of


def summed(f):
    return lambda w: jnp.sum(f(w))


WAYS = {  # with the derivative of `3 w` as it is declared, `15 w`, and its derivative, 15
    "grad": (jax.grad, lambda w: 15 * w),
    "jacfwd": (jax.jacfwd, lambda w: 15 * w),
    "jit of jacfwd": (lambda f: jax.jit(jax.jacfwd(f)), lambda w: 15 * w),
    "grad of jacfwd": (lambda f: jax.grad(summed(jax.jacfwd(f))), lambda w: 15 + 0 * w),
    "jacfwd of jacfwd": (lambda f: jax.jacfwd(summed(jax.jacfwd(f))), lambda w: 15 + 0 * w),
    "jacfwd of grad": (lambda f: jax.jacfwd(summed(jax.grad(f))), lambda w: 15 + 0 * w),
}


@pytest.mark.parametrize("w", WEIGHTS, ids=["number", "vector"])
@pytest.mark.parametrize("uses", ["stopped", "stopped and not"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("holder", ["cell", "box"])
def test_both_modes_ask_the_rule(holder, way, uses, w):
    differentiate, expected = WAYS[way]
    f = loss(holder, uses)
    if holder == "box" and uses == "stopped" and way in ("jacfwd", "jacfwd of jacfwd"):
        # Behind the tracers is a number that says nothing: an error, and not zero.
        with pytest.raises(TypeError, match=r"straight to `lax.stop_gradient`.*Declare"):
            differentiate(f)(w)
        f = loss(holder, uses, variables=lambda w: [w])
    assert_same(differentiate(f)(w), expected(w))


@pytest.mark.parametrize("holder", ["cell", "box"])
@pytest.mark.parametrize("uses", ["stopped", "stopped and not"])
def test_a_weight_counts_once(holder, uses):
    """In `d/dw (2 h(w) h'(w))` with `h = 3 w` and `h' = 15 w`: `2 h'**2 + 2 h 15`."""
    f = loss(holder, uses)
    for w in (2.0, 4.0):
        got = jax.grad(jax.jacfwd(lambda w: f(w) ** 2))(jnp.float32(w))
        assert_same(got, jnp.float32(2 * (15 * w) ** 2 + 2 * 3 * w * 15), rtol=1e-6)


DIFFERENTIATE = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jacfwd": jax.jacfwd,
    "grad of jacfwd": lambda f: jax.grad(lambda w: jax.jacfwd(f)(w) * w),
}


@pytest.mark.parametrize("way", DIFFERENTIATE)
def test_a_constant_that_is_stopped_is_no_weight(way):
    """A number that the function stops is not taken for a weight that its rule alone reads."""
    box = Box(None)

    @custom_gradient
    def f(x):
        y = lax.stop_gradient(jnp.float32(4)) * x
        return y, lambda dy, variables=(): dy * box.w

    def of(w):
        box.w = w
        return f(jnp.float32(X)) + w

    # For `jvp` at 4 the two cannot be told apart, and it is an error.
    for w in (2.0, 4.0) if "jacfwd" not in way else (2.0,):
        assert_same(DIFFERENTIATE[way](of)(jnp.float32(w)), jnp.float32(1))
