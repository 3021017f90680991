"""A tracer is found wherever a function holds it: `HOLDERS` are functions that fetch a weight.

`f`, or its rule, or both call one. The value is `w x**2`; the rules declare `7 w x` for the input
and `5 x**2` for the weight, or leave the weight to autodiff: `x**2`.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from holders import HOLDERS
from ways import (
    FORWARD,
    REVERSE,
    SECOND,
    assert_derivative,
    by,
    gradient,
    hand_written,
    hessian,
    nested_gradient,
)

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

# --- where the holder is used ---------------------------------------------------------------------


def in_both(hold, x, w):
    get = hold(w)

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            (v,) = variables
            assert v is w
            return 7 * dy * get() * x, [5 * dy * x**2]

        return get() * x**2, grad

    return f(x)


def in_f_alone(hold, x, w):
    get = hold(w)

    @custom_gradient
    def f(x):
        kept = get()

        def grad(dy, variables):
            (v,) = variables
            assert v is w
            return 7 * dy * kept * x, [5 * dy * x**2]

        return kept * x**2, grad

    return f(x)


def in_the_rule_alone(hold, x, w):
    """The rule gets the weight from its holder, made in `f`."""

    @custom_gradient
    def f(x, w):
        get = hold(w)
        return w * x**2, lambda dy: (7 * dy * get() * x, 5 * dy * x**2)

    return f(x, w)


def in_the_rule_of_a_closure(hold, x, w):
    get = hold(w)

    @custom_gradient
    def f(x, w):
        return w * x**2, lambda dy: (7 * dy * get() * x, 5 * dy * x**2)

    return f(x, w)


def to_autodiff(hold, x, w):
    get = hold(w)

    @custom_gradient(variables="autodiff")
    def f(x):
        return get() * x**2, lambda dy: 7 * dy * get() * x

    return f(x)


def declared(hold, x, w):
    get = hold(w)

    @custom_gradient(variables=[w])
    def f(x):
        return get() * x**2, lambda dy, variables: (7 * dy * variables[0] * x, [5 * dy * x**2])

    return f(x)


def as_the_rule_itself(hold, x, w):
    """The rule is a `Partial`: its tree definition holds what its function closes over."""

    @custom_gradient
    def f(x, w):
        get = hold(w)
        rule = jax.tree_util.Partial(lambda x, dy: (7 * dy * get() * x, 5 * dy * x**2), x)
        return w * x**2, rule

    return f(x, w)


PLACES = {
    place.__name__: place
    for place in (
        in_both,
        in_f_alone,
        in_the_rule_alone,
        in_the_rule_of_a_closure,
        to_autodiff,
        declared,
        as_the_rule_itself,
    )
}
ordinary = hand_written(lambda x, w: w * x**2, lambda x, w: 7 * w * x, lambda x, w: x**2)
rule = hand_written(lambda x, w: w * x**2, lambda x, w: 7 * w * x, lambda x, w: 5 * x**2)
ARGS = jnp.float32(2), jnp.float32(3)

PAIRS = pytest.mark.parametrize(
    ("name", "place"), list(itertools.product(HOLDERS, PLACES)), ids=lambda v: v
)


def _losses(name, place):
    def loss(x, w):
        return PLACES[place](HOLDERS[name], x, w) ** 2

    oracle = ordinary if place == "to_autodiff" else rule
    return loss, lambda x, w: oracle(x, w) ** 2


@PAIRS
def test_gradient(name, place):
    loss, oracle = _losses(name, place)
    assert_same(gradient(loss)(*ARGS), gradient(oracle)(*ARGS))


@pytest.mark.parametrize("name", HOLDERS)
def test_gradient_under_jit(name):
    for place in PLACES:
        loss, oracle = _losses(name, place)
        assert_same(jax.jit(gradient(loss))(*ARGS), gradient(oracle)(*ARGS))


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("place", ["in_both", "in_the_rule_alone"])
@by({**REVERSE, **FORWARD, **SECOND}, ("jvp",))
def test_transformations(name, place, way):
    loss, oracle = _losses(name, place)
    assert_derivative(way, loss, oracle, *ARGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOLDERS)
def test_second_order(name):
    for place in PLACES:
        loss, oracle = _losses(name, place)
        assert_same(nested_gradient(loss)(*ARGS), hessian(oracle)(*ARGS))


@pytest.mark.parametrize("name", HOLDERS)
def test_error_for_a_lost_weight(name):
    def loss(x, w):
        get = HOLDERS[name](w)

        @custom_gradient
        def f(x):
            return get() * x**2, lambda dy: 7 * dy * get() * x

        return f(x)

    with pytest.raises(TypeError, match=r"float32\[\]"):
        jax.grad(loss, 1)(*ARGS)
    assert_same(jax.grad(loss)(*ARGS), jnp.float32(42))
    assert_same(jax.jit(jax.grad(loss))(*ARGS), jnp.float32(42))
