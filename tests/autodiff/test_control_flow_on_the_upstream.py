"""Rules that decide by their upstream, and functions that decide by a value.

`lax.cond` and `lax.while_loop` on the upstream are no linear maps; reverse mode runs them as they
are, at every order, also where a `vmap` stands between two gradients. The value is `x**2`.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax
from ways import REVERSE, by, crossed, gradient, nested_gradient

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
SOME = ("grad", "grad(vmap)")


def by_cond(dy):
    return lax.cond(dy > 20.0, lambda dy: 3 * dy, lambda dy: 2 * dy, dy)


def by_switch(dy):
    return lax.switch((dy > 20.0).astype(jnp.int32), [lambda dy: 2 * dy, lambda dy: 3 * dy], dy)


def by_while(dy):
    return lax.while_loop(lambda c: c > 20.0, lambda c: c / 4, dy)


def by_while_of_a_pair(dy):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, 2 * c[1]), (0, dy))[1]


def by_fori(dy):
    return lax.fori_loop(0, 2, lambda _, c: 2 * c, dy)


RULES = [by_cond, by_switch, by_while, by_while_of_a_pair, by_fori]
LOOPS_FORWARD_ALONE = (by_while, by_while_of_a_pair)  # JAX has no reverse mode for these


def decorated(rule):
    @custom_gradient
    def h(x):
        return x**2, lambda dy: rule(7 * dy) * x

    return h


def captured(rule):
    """The same, where the rule holds a tracer that it has from elsewhere."""

    def h(x):
        k = x * 1.0

        @custom_gradient
        def f(x):
            return x**2, lambda dy: rule(7 * dy) * lax.stop_gradient(k)

        return f(x)

    return h


@pytest.mark.parametrize("make", [decorated, captured])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("x", [0.5, 4.0], ids=["below", "beyond"])
@by(REVERSE, SOME)
def test_first_order(rule, make, x, way):
    x = jnp.float32(x)
    got = way(lambda x: make(rule)(x) ** 2)(x)
    assert_same(got, (rule(7 * 2 * x**2) * x,))


TWICE = crossed("grad of grad", nested_gradient)


@pytest.mark.parametrize("rule", [r for r in RULES if r not in LOOPS_FORWARD_ALONE])
@pytest.mark.parametrize("x", [0.5, 4.0], ids=["below", "beyond"])
@by(TWICE, ("grad of grad", "grad of grad(vmap)"))
def test_second_order(rule, x, way):
    """`L' = r(14 h) x`, so `L'' = r(14 h) + r(7 dy) x` with the upstream `dy = 14 r'(14 h) x`."""
    x = jnp.float32(x)
    slope = jax.grad(rule)(14 * x**2)
    expected = rule(14 * x**2) + rule(7 * 14 * slope * x) * x
    assert_same(way(lambda x: decorated(rule)(x) ** 2)(x), ((expected,),))


@MODES
@pytest.mark.parametrize("rule", [by_cond, by_switch, by_fori])
@pytest.mark.parametrize("make", [decorated, captured])
def test_a_vmap_between_two_gradients(rule, make, mode):
    """`grad` of the sum of a mapped `grad`: each row decides for itself."""
    xs = jnp.float32([0.5, 1.0, 4.0])

    def second(xs):
        first = jax.vmap(jax.grad(lambda x: make(rule)(x) ** 2))
        return jax.grad(lambda xs: jnp.sum(first(xs)))(xs)

    slope = jax.vmap(jax.grad(rule))(14 * xs**2)
    ruled = jax.vmap(rule)
    expected = ruled(14 * xs**2) + ruled(7 * 14 * slope * xs) * xs
    if make is captured:  # `x` in the rule is constant
        expected = ruled(7 * 14 * slope * xs) * xs
    assert_same(mode(second)(xs), expected)


@MODES
def test_a_vmap_between_two_gradients_the_other_way_round(mode):
    """`grad` of the `grad` of a mapped function."""
    xs = jnp.float32([0.5, 1.0, 4.0])

    def loss(xs):
        return jnp.sum(jax.vmap(decorated(by_cond))(xs) ** 2)

    def second(xs):
        return jax.grad(lambda xs: jnp.sum(jax.grad(loss)(xs)))(xs)

    ruled = jax.vmap(by_cond)
    slope = jax.vmap(jax.grad(by_cond))(14 * xs**2)
    expected = ruled(14 * xs**2) + ruled(7 * 14 * slope * xs) * xs
    assert_same(mode(second)(xs), expected)


@MODES
def test_a_while_loop_at_second_order_by_the_residual(mode):
    """JAX cannot go backward through a `while_loop`; beside it, the rule is differentiated.

    `h = x**2` with the rule `w(dy) x`, `L = h`: `L' = w(1) x` and `L'' = w(1)`.
    """

    @custom_gradient
    def h(x):
        return x**2, lambda dy: by_while(100 * dy) * x

    x = jnp.float32(2)
    w = by_while(jnp.float32(100))
    assert_same(mode(jax.grad(h))(x), w * x)
    assert_same(mode(jax.grad(jax.grad(h)))(x), w)
    assert_same(mode(jax.vmap(jax.grad(jax.grad(h))))(jnp.stack([x, x])), jnp.stack([w, w]))


@MODES
def test_a_while_loop_on_a_linear_upstream_at_second_order(mode):
    """As a hand-written rule has it: an error of JAX, or the number, but no other number."""

    def attached(x):
        @jax.custom_vjp
        def identity(y, x):
            return y

        identity.defvjp(
            lambda y, x: (identity(y, x), x),
            lambda x, dy: (jnp.zeros_like(dy), by_while_of_a_pair(7 * dy) * x),
        )
        return identity(lax.stop_gradient(x) ** 2, x)

    def second(h):
        return mode(jax.grad(jax.grad(lambda x: h(x) ** 2)))(jnp.float32(2))

    try:
        expected = second(attached)
    except Exception as error:  # of many kinds, by version
        with pytest.raises(type(error)):
            second(decorated(by_while_of_a_pair))
    else:
        assert_same(second(decorated(by_while_of_a_pair)), expected)


# --- Python branches ------------------------------------------------------------------------------


def _autodiff(w, x, seen):
    @custom_gradient(variables="autodiff")
    def f(x):
        seen.append(bool(x > 1))  # `float(x)` is refused by JAX at second order
        y = w * x**2 if x > 1 else w * x
        return y, lambda dy: 7 * dy * w * x

    return f(x)


@pytest.mark.parametrize("x", [0.5, 2.0])
@pytest.mark.parametrize("order", [1, 2])
def test_autodiff_with_a_python_branch(x, order):
    """Eagerly, `f` sees the value: the ordinary derivative of the branch that was taken."""
    w, x = jnp.float32(3), jnp.float32(x)
    seen = []
    h = w * x**2 if x > 1 else w * x
    h_w = x**2 if x > 1 else x
    if order == 1:
        got = jax.grad(lambda w, x: _autodiff(w, x, seen), (0, 1))(w, x)
        assert_same(got, (h_w, 7 * w * x))
    else:
        got = jax.grad(jax.grad(lambda w: _autodiff(w, x, seen) ** 2))(w)
        assert_same(got, 2 * h_w**2 + 0 * h)
        got = jax.grad(jax.grad(lambda x: _autodiff(w, x, seen) ** 2))(x)
        # L' = 2 h 7 w x; L'' = 2 (7 w x)**2 + 14 w h
        assert_same(got, 2 * (7 * w * x) ** 2 + 14 * w * h)
    assert set(seen) == {bool(x > 1)}


def test_autodiff_with_a_python_branch_in_forward_mode():
    w, x = jnp.float32(3), jnp.float32(2)
    got = jax.jacfwd(lambda w, x: _autodiff(w, x, []), (0, 1))(w, x)
    assert_same(got, (jnp.float32(4), jnp.float32(42)))


@pytest.mark.parametrize("branch_on", ["w", "x"])
def test_autodiff_with_a_python_branch_of_the_rule(branch_on):
    def loss(w, x):
        @custom_gradient(variables="autodiff")
        def f(x):
            def grad(dy):
                scale = 7 if (w if branch_on == "w" else x) > 1 else 1000
                return scale * dy * w * x

            return w * x**2, grad

        return f(x)

    assert_same(gradient(loss)(jnp.float32(3), jnp.float32(2)), (jnp.float32(4), jnp.float32(42)))
