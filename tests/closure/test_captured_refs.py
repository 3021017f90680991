"""Refs (`jax.new_ref`) that are tracers are captured like any other value.

Made where JAX traces, read or written by a function or a rule that closes over them. The value
is `r[...] x` or `x**2`; the rules declare 7 times the plausible. A Ref that is merely state has no
gradient and needs none.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.deep,
]  # a linearity check that never ends would be found here
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
X = jnp.float32(2)


def three():
    return jax.new_ref(jnp.float32(3))


@MODES
def test_read_by_f(mode):
    """Made outside of what is differentiated (`tests/limits.py` has it made inside)."""

    def gradient(x):
        r = three()

        @custom_gradient
        def f(x):
            kept = r[...]
            return kept * x, lambda dy: 7 * dy * kept

        return jax.grad(f)(x)

    assert_same(mode(gradient)(X), jnp.float32(21))


@MODES
def test_read_by_the_rule(mode):
    def gradient(x):
        r = three()

        @custom_gradient
        def f(x):
            return x**2, lambda dy: 7 * dy * x * r[...]

        g = jax.grad(f)(x)
        r[...] = 5 * x
        return g, jax.grad(f)(x)

    assert_same(mode(gradient)(X), (jnp.float32(42), jnp.float32(140)))


@MODES
def test_read_by_the_rule_of_a_global_ref(mode):
    r = three()

    @custom_gradient
    def f(x):
        return x**2, lambda dy: 7 * dy * x * r[...]

    assert_same(mode(jax.grad(f))(X), jnp.float32(42))
    r[...] = jnp.float32(5)
    assert_same(mode(jax.grad(f))(X), jnp.float32(70))
    assert_same(mode(lambda x: jax.grad(f)(x) + f(x))(X), jnp.float32(74))


def test_forward_mode_of_a_rule_that_reads_a_ref():
    """The rule is linear in its upstream, whatever the Ref holds.

    Eagerly: in a compiled program a tangent is pushed when JAX lowers it, which has no Refs.
    """
    r = three()

    @custom_gradient
    def f(x):
        return x**2, lambda dy: 7 * dy * x * r[...]

    assert_same(jax.jvp(f, (X,), (X,)), (jnp.float32(4), jnp.float32(84)))


@MODES
def test_written_by_f(mode):
    def gradient(x):
        r = three()

        @custom_gradient
        def f(x):
            r[...] = r[...] + x
            kept = r[...]
            return kept * x, lambda dy: 7 * dy * kept

        g = jax.grad(lambda x: f(x) + f(x))(x)
        return g, r[...]

    assert_same(mode(gradient)(X), (jnp.float32(84), jnp.float32(7)))


@MODES
def test_written_by_the_rule(mode):
    """How a gradient is logged: what was stored is the upstream."""

    def gradient(x):
        r = three()

        @custom_gradient
        def f(x):
            def grad(dy):
                r[...] = dy
                return 7 * dy * x

            return x**2, grad

        return jax.grad(lambda x: 11 * f(x))(x), r[...]

    assert_same(mode(gradient)(X), (jnp.float32(154), jnp.float32(11)))


@MODES
def test_counted_by_f_without_differentiation(mode):
    def value(x):
        r = three()

        @custom_gradient
        def f(x):
            r[...] += x
            return x**2, lambda dy: 7 * dy * x

        return f(x) + f(x), r[...]

    assert_same(mode(value)(X), (jnp.float32(8), jnp.float32(7)))


@MODES
def test_read_by_the_rule_in_a_scan(mode):
    def loss(x):
        r = three()

        @custom_gradient
        def f(x):
            return 3 * x, lambda dy: 7 * dy * r[...]

        return lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=3)[0]

    by_hand = jax.custom_vjp(lambda r, x: r[...] * x)
    by_hand.defvjp(
        lambda r, x: (3 * x, (r, x)),
        lambda res, g: (None, 7 * g * res[0][...]),
    )

    def hand(x):
        r = three()
        return lax.scan(lambda c, _: (c + by_hand(r, x), None), 0.0, None, length=3)[0]

    assert_same(mode(jax.grad(hand))(X), jnp.float32(63))
    assert_same(mode(jax.grad(loss))(X), jnp.float32(63))


@MODES
def test_a_function_in_a_function(mode):
    def gradient(x):
        r = three()

        @custom_gradient
        def inner(x):
            return r[...] * x, lambda dy: 7 * dy * r[...]

        @custom_gradient
        def outer(x):
            y, pull = jax.vjp(inner, x)
            return y, lambda dy: 11 * pull(dy)[0]

        return jax.grad(outer)(x)

    assert_same(mode(gradient)(X), jnp.float32(11 * 21))


@MODES
def test_beside_a_differentiated_weight(mode):
    """The Ref is no variable: it is not differentiated, and the weight is."""

    def gradient(w, x):
        r = three()

        def loss(w, x):
            @custom_gradient
            def f(x):
                kept = r[...]

                def grad(dy, variables):
                    assert any(v is w for v in variables)
                    grads = [5 * dy * x if v is w else None for v in variables]
                    return 7 * dy * kept * w, grads

                return w * kept * x, grad

            return f(x)

        return jax.grad(loss, (0, 1))(w, x)

    w = jnp.float32(1.5)
    assert_same(mode(gradient)(w, X), (jnp.float32(10), jnp.float32(31.5)))
