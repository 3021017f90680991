"""The forms in which a rule may return its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_checks import F3, F5, F7, ZERO, Point, check_gradients
from helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

ONE_INPUT = {
    "bare": lambda g: g,
    "tuple": lambda g: (g,),
    "list": lambda g: [g],
    "NumPy array": lambda g: np.float32(7),
    "Python float": lambda g: 7.0,
    "Python int": lambda g: 7,
    "wrapped Python float": lambda g: [7.0],
    "NumPy of higher precision": lambda g: np.float64(7),
}


@pytest.mark.parametrize("form", ONE_INPUT)
def test_one_input(form):
    check_gradients(
        custom_gradient(lambda x: (2 * x, lambda dy: ONE_INPUT[form](7 * dy))), (1.0,), (F7,)
    )


NOTHING = {
    "None": None,
    "tuple": (None,),
    "list": [None],
}


@pytest.mark.parametrize("form", NOTHING)
def test_no_gradient_for_one_input(form):
    h = custom_gradient(lambda x: (2 * x, lambda dy: NOTHING[form]))
    check_gradients(h, (1.0,), (ZERO,))
    assert_same(jax.grad(lambda x: h(x) + 3 * x)(1.0), F3)  # elsewhere it still counts


TWO_INPUTS = {
    "tuple": (lambda a, b: (a, b), (F7, F5)),
    "list": (lambda a, b: [a, b], (F7, F5)),
    "None first": (lambda a, b: (None, b), (ZERO, F5)),
    "None second": (lambda a, b: [a, None], (F7, ZERO)),
    "Nones": (lambda a, b: (None, None), (ZERO, ZERO)),
    "namedtuple": (lambda a, b: Point(a, b), (F7, F5)),
    "mixed kinds": (lambda a, b: (a, 5), (F7, F5)),
}


@pytest.mark.parametrize("form", TWO_INPUTS)
def test_two_inputs(form):
    answer, expected = TWO_INPUTS[form]
    check_gradients(
        custom_gradient(lambda x, y: (x * y, lambda dy: answer(7 * dy, 5 * dy))),
        (1.0, 1.0),
        expected,
    )


@pytest.mark.parametrize("form", TWO_INPUTS)
def test_two_inputs_by_a_rule_that_is_traced(form):
    """A jaxpr drops `None`; its place among the gradients must survive."""
    answer, expected = TWO_INPUTS[form]
    rule = lambda x, dy: answer(7 * dy + 0 * x, 5 * dy)  # noqa: E731
    h = custom_gradient(lambda x, y: (x * y, functools.partial(rule, x)))
    check_gradients(h, (1.0, 1.0), expected)
    second = jax.grad(lambda x, y: h(x, y) * h(x, y))
    assert_same(jax.jit(second)(1.0, 1.0), 2 * expected[0])


@eager_and_jit
def test_a_bare_none_for_two_inputs_is_a_forgotten_return(mode):
    h = custom_gradient(lambda x, y: (x * y, lambda dy: None))
    with pytest.raises((TypeError, ValueError), match=r"forg[eo]t.*return"):
        mode(jax.grad(h))(jnp.float32(1), jnp.float32(1))


def test_one_list_is_not_mistaken_for_the_tuple_of_inputs():
    """A list of one array: its gradient is a list of one, with or without a tuple around it."""
    for answer in (lambda g: [g], lambda g: ([g],), lambda g: [[g]], lambda g: g):
        h = custom_gradient(lambda xs, a=answer: (2 * xs[0], lambda dy: a(7 * dy)))
        check_gradients(h, ([1.0],), ([F7],))


def test_two_lists_of_one():
    h = custom_gradient(lambda xs, ys: (xs[0] * ys[0], lambda dy: ([7 * dy], [5 * dy])))
    check_gradients(h, ([1.0], [1.0]), ([F7], [F5]))


STATIC_LEAVES = {
    "left out": lambda a, b: (a, b),
    "None": lambda a, b: (None, a, None, b),
    "anything": lambda a, b: ("mode", a, 3, b),
    "arrays": lambda a, b: (jnp.zeros(2), a, jnp.int32(1), b),
    "objects": lambda a, b: [object(), a, (1, 2), b],
}


@pytest.mark.parametrize("form", STATIC_LEAVES)
def test_leaves_without_gradient_may_be_left_out(form):
    @custom_gradient
    def h(mode, x, indices, y):
        return x * y, lambda dy: STATIC_LEAVES[form](7 * dy, 5 * dy)

    loss = lambda x, y: h("mode", x, jnp.int32(2), y)  # noqa: E731
    check_gradients(loss, (1.0, 1.0), (F7, F5))


def test_static_leaves_within_a_tree():
    for answer in (lambda g: {"mode": None, "w": g}, lambda g: [g], lambda g: [None, g]):
        h = custom_gradient(lambda p, a=answer: (p["w"] * 2, lambda dy: a(7 * dy)))
        loss = lambda w, h=h: h({"w": w, "mode": "m"})  # noqa: E731
        check_gradients(loss, (1.0,), (F7,))


def test_gradient_of_another_precision_is_cast():
    h = custom_gradient(lambda x, w: (x * w, lambda dy: (np.float64(7), jnp.bfloat16(5))))
    check_gradients(h, (jnp.float16(1), jnp.float16(1)), (jnp.float16(7), jnp.float16(5)))


def test_number_for_a_scalar_only():
    h = custom_gradient(lambda x: (x.sum(), lambda dy: 7.0))
    with pytest.raises(ValueError, match=r"shape \(\)"):
        jax.grad(h)(jnp.ones(3))


def test_empty_arrays():
    h = custom_gradient(lambda x: (x.sum(), lambda dy: 7 * dy * jnp.ones_like(x)))
    check_gradients(h, (jnp.zeros((0, 3)),), (jnp.zeros((0, 3)),))


def test_same_input_twice():
    h = custom_gradient(lambda x, y: (x * y, lambda dy: (7 * dy, 5 * dy)))
    check_gradients(lambda x: h(x, x), (1.0,), (jnp.float32(12),))


def test_a_flat_list_beside_a_callable():
    """Three gradients for three arrays, where the inputs are a pair, an array and a callable."""

    @custom_gradient
    def f(pair, x, fetch):
        return fetch() * x * pair[0], lambda dy: [None, 5 * dy, 7 * dy]

    def loss(pair, x):
        return f(pair, x, lambda: 3.0)

    a, b, x = jnp.float32(2), jnp.float32(3), jnp.float32(4)
    expected = ((jnp.float32(0), jnp.float32(5)), jnp.float32(7))
    for mode in (lambda f: f, jax.jit):
        assert_same(mode(jax.grad(loss, (0, 1)))((a, b), x), expected)
