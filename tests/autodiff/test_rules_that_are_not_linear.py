"""A rule may be any function of its upstream: reverse mode runs it, forward mode refuses it.

The value is `x**2` and the rule `r(7 dy) x`. What is expected follows from `r` by hand at the
first and second order, and from a hand-written `jax.custom_vjp` at the third.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax
from ways import REVERSE, SECOND, by, crossed

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep


def quantized(dy):
    """Round to a multiple of 1/8 by way of int8: no derivative, and no linear map."""
    return jnp.clip(dy * 8, -127, 127).astype(jnp.int8).astype(jnp.float32) / 8


def integer(dy):
    return dy.astype(jnp.int32).astype(jnp.float32)


def beyond(dy):
    """Linear, except where hardly any test would look."""
    return jnp.where(jnp.abs(dy) > 1234.5, 1234.5 * jnp.sign(dy), dy)


def beyond_by_cond(dy):
    return lax.cond(jnp.abs(dy) > 1234.5, lambda dy: 3 * dy, lambda dy: dy, dy)


def near_zero(dy):
    return jnp.where(jnp.abs(dy) < 1e-12, 0 * dy, dy)


def above_a_bound(dy):
    return jnp.minimum(dy, 1e6)


def rounded(dy):
    return jnp.round(dy)


def by_while(dy):
    return lax.while_loop(lambda c: jnp.abs(c) > 2000.0, lambda c: c / 2, dy)


def by_sort(dy):
    return jnp.sort(jnp.stack([dy, 2 * dy]))[0]


RULES = [quantized, integer, beyond, beyond_by_cond, near_zero, above_a_bound, rounded]
RULES += [by_while, by_sort]


def decorated(rule):
    @custom_gradient
    def f(x):
        return x**2, lambda dy: rule(7 * dy) * x

    return f


def by_hand(rule):
    """An identity on `x**2` that has the rule as its derivative, and itself in its forward pass."""

    @jax.custom_vjp
    def attached(y, x):
        return y

    def backward(x, dy):
        return jnp.zeros_like(dy), rule(7 * dy) * x

    attached.defvjp(lambda y, x: (attached(y, x), x), backward)
    return lambda x: attached(lax.stop_gradient(x**2), x)


def loss(h):
    def of(x):
        y = h(x)
        return 1.5 * y**2 + y

    return of


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("x", [0.7, 6.0])
@by(REVERSE, ("grad", "jit(grad)", "grad(vmap)"))
def test_first_order(rule, x, way):
    x = jnp.float32(x)
    upstream = 3 * x**2 + 1
    assert_same(way(loss(decorated(rule)))(x), (rule(7 * upstream) * x,))


# Of the second derivatives only those by reverse mode alone: the others transpose the rule.
TWICE = {
    **crossed("grad of grad", SECOND["grad of grad"]),
    "jacrev of jacrev": SECOND["jacrev of jacrev"],
}


@pytest.mark.parametrize("rule", [r for r in RULES if r is not by_while])
@pytest.mark.parametrize("x", [0.7, 6.0])
@by(TWICE, ("grad of grad", "jit(grad of grad)"))
def test_second_order(rule, x, way):
    """The derivative of the rule at the upstream `3 h + 1`, where `h` has the rule again."""
    x = jnp.float32(x)

    def first(x, y):
        return rule(7 * (3 * y + 1)) * x

    by_x, by_y = jax.grad(first, (0, 1))(x, x**2)
    expected = by_x + rule(7 * by_y) * x
    assert_same(way(loss(decorated(rule)))(x), ((expected,),))


def test_second_order_of_a_conversion_by_hand():
    """`q(14 h) x` has the derivative `q(14 h)`, for `q` is flat."""
    x = jnp.float32(0.7)
    second = jax.grad(jax.grad(lambda x: decorated(integer)(x) ** 2))
    assert_same(second(x), jnp.float32(6))  # 14 * 0.49 = 6.86
    assert_same(jax.jit(second)(x), jnp.float32(6))


@pytest.mark.parametrize("rule", [integer, beyond, rounded])
def test_third_order(rule):
    """Against the derivative declared by hand, again at each order."""
    x = jnp.float32(0.7)

    def third(h):
        return jax.grad(jax.grad(jax.grad(loss(h))))

    assert_same(third(decorated(rule))(x), third(by_hand(rule))(x))


FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (jnp.ones_like(x),)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](jnp.ones_like(x)),
    "jit(jvp)": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)))(x),
    "jvp(jit)": lambda f, x: jax.jvp(jax.jit(f), (x,), (jnp.ones_like(x),)),
    "vmap(jvp)": lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)))(x[None]),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x) ** 2)(x),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("forward", FORWARD)
def test_forward_mode_refuses(rule, forward):
    """No number, rather than that of a map which the rule is not."""
    with pytest.raises(TypeError, match="linear"):
        FORWARD[forward](decorated(rule), jnp.float32(0.7))


@pytest.mark.parametrize(
    ("rule", "operation"),
    [(quantized, "convert_element_type|clamp|max|min"), (integer, "convert_element_type")],
)
def test_the_error_says_which_operation(rule, operation):
    with pytest.raises(TypeError, match=operation):
        jax.jvp(decorated(rule), (jnp.float32(0.7),), (jnp.float32(1),))


def test_conversions_that_are_linear_are_transposed():
    """Between floating dtypes: no reason to refuse."""

    @custom_gradient
    def f(x):
        def grad(dy):
            return (dy.astype(jnp.bfloat16).astype(jnp.float32) * 7) * x

        return x**2, grad

    x = jnp.float32(2)
    assert_same(jax.jvp(f, (x,), (jnp.float32(1),)), (jnp.float32(4), jnp.float32(14)))
    assert_same(jax.jit(jax.jacfwd(f))(x), jnp.float32(14))


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_conversions_of_what_is_not_the_upstream(mode):
    """A conversion to int8 and back of a residual leaves the rule linear."""

    @custom_gradient
    def f(x):
        scale = (x * 2).astype(jnp.int8).astype(x.dtype)
        return x**2, lambda dy: 7 * dy * scale

    x = jnp.float32(2.3)
    derivative = mode(jax.jacfwd(f))(x)
    assert_same(derivative, jnp.float32(28))
    assert_same(mode(jax.grad(f))(x), jnp.float32(28))
