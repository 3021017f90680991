"""Memos: what `f` or its rule computes once and leaves for others: right, or an error.

A memo of `exp(w)` is filled by `f` or by the rule, and read by `f` in another call, by the rule, or
by the loss. The declared derivatives of `f`, `exp(w) x`, are `7 exp(w)` by `x` and `5 x` by `w`.
"""

import functools
import itertools
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from support.helpers import assert_same, product, sample
from support.ways import WAYS, gradient, hand_written, jvp

from tfgrad_jax import custom_gradient

# --- memos: each takes `w` and returns what computes `exp(w)` at the first call -------------------


class Model:
    def __init__(self, w):
        self.w = w

    @functools.cached_property
    def e(self):
        return jnp.exp(self.w)


def in_a_dict(w):
    table = {}
    return lambda: table["e"] if "e" in table else table.setdefault("e", jnp.exp(w))


def nonlocal_variable(w):
    kept = None

    def e():
        nonlocal kept
        kept = jnp.exp(w) if kept is None else kept
        return kept

    return e


MEMOS = {
    "cached property": lambda w: (lambda held: lambda: held.e)(Model(w)),
    "cached function": lambda w: functools.cache(lambda: jnp.exp(w)),
    "dict": in_a_dict,
    "nonlocal variable": nonlocal_variable,
}


# --- who fills it, and who reads it ---------------------------------------------------------------


def layer(w, in_f, in_rule=None):
    """Return `exp(w) x`: `in_f()` and, if it is there, `in_rule()` give `exp(w)`."""

    @custom_gradient
    def memoized(x):
        e = in_f()

        def grad(dy, variables=()):
            dx = 7 * dy * (in_rule() if in_rule else e)
            return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

        return e * x, grad

    return memoized


def unfilled(w, memo):
    return layer(w, lambda: jnp.exp(w), memo)


H = hand_written(lambda w, x: jnp.exp(w) * x, lambda w, x: 5 * x, lambda w, x: 7 * jnp.exp(w))

OF_THE_MEMO = hand_written(lambda e, x: e * x, lambda e, x: 5 * x, lambda e, x: 7 * e)


# The loss of (w, x, memo), and its oracle.
PROGRAMS = {
    "f, then f": (
        lambda w, x, memo: layer(w, memo)(x) + layer(w, memo)(2 * x),
        lambda w, x: H(w, x) + H(w, 2 * x),
    ),
    "f, then its rule": (lambda w, x, memo: layer(w, memo, memo)(x), H),
    "f, then the loss": (
        lambda w, x, memo: layer(w, memo)(x) + memo(),
        lambda w, x: H(w, x) + jnp.exp(w),
    ),
    "the rule, then the rule": (
        lambda w, x, memo: unfilled(w, memo)(x) + unfilled(w, memo)(2 * x),
        lambda w, x: H(w, x) + H(w, 2 * x),
    ),
    "the rule, then f": (  # of which the memo is a weight, as a value of the loss
        lambda w, x, memo: jax.grad(unfilled(w, memo))(x) + layer(w, memo)(x),
        lambda w, x: 7 * jnp.exp(w) + OF_THE_MEMO(jnp.exp(w), x),
    ),
    "the rule, then the loss": (
        lambda w, x, memo: jax.grad(unfilled(w, memo))(x) + memo(),
        lambda w, x: 8 * jnp.exp(w),
    ),
}
WORLDS = "grad", "jvp", "jit(grad)", "grad(jit)", "vmap(grad)", "grad(scan)", "hessian"
# What must be right, in eager derivatives: another call, and the rule.
RIGHT = "f, then f", "f, then its rule", "the rule, then the rule"
ERRORS = TypeError, ValueError, jax.errors.UnexpectedTracerError


def says_the_remedy(error):
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "memoized" in text and re.search("before|return it", text)


# Not those that only a rule fills, where forward mode runs it on values first: what it leaves in a
# variable or a dict is one of them.
EVERY = [
    (memo, program, world)
    for memo, program, world in itertools.product(MEMOS, PROGRAMS, WORLDS)
    if not (program.startswith("the rule") and world in ("hessian", "jvp"))
]
CORE = [
    *itertools.product(["cached property"], PROGRAMS, WORLDS),
    *itertools.product(MEMOS, PROGRAMS, ["grad", "jit(grad)"]),
]


# In some of these programs only the rule reads `w`, on purpose: a gradient of 0, with a warning.
@pytest.mark.filterwarnings("ignore:.*which only its")
@pytest.mark.parametrize(("memo", "program", "world"), sample(EVERY, 20, dict.fromkeys(CORE)))
def test_a_memo_is_right_or_an_error_with_its_remedy(memo, program, world):
    args = jnp.float32(1.3), jnp.float32(0.5)
    loss, oracle = PROGRAMS[program]
    try:
        got = WAYS[world](lambda w, x: loss(w, x, MEMOS[memo](w)))(*args)
    except ERRORS as error:
        # Elsewhere it is JAX's own tracer, and in a rule of an inner gradient, which is recorded.
        if program != "the rule, then the loss" and world in ("grad", "jvp"):
            assert program not in RIGHT and says_the_remedy(error)
    else:
        assert_same(got, WAYS[world](oracle)(*args))


@pytest.mark.parametrize("way", [gradient, jvp])
def test_after_the_derivative_a_memo_is_an_error_and_not_a_number(way):
    """`f` leaves it, or the rule in forward mode; in reverse mode, that has values."""
    memos = []

    def loss(w, x):
        memos.append(MEMOS["cached property"](w))
        parts = (lambda: jnp.exp(w), memos[-1]) if way is jvp else (memos[-1],)
        return layer(w, *parts)(x)

    w, x = jnp.float32(1), jnp.float32(2)
    assert_same(way(loss)(w, x), (5 * x, 7 * jnp.exp(w)))
    with pytest.raises(ERRORS) as caught:
        memos[0]() + 1
    assert says_the_remedy(caught.value)


@pytest.mark.parametrize("world", ["grad", "jvp", "jit(grad)", "vmap(grad)"])
def test_a_memo_that_is_filled_before_is_right(world):
    """The first remedy."""

    def loss(w, x):
        memo = in_a_dict(w)
        memo()
        return layer(w, memo, memo)(x) + memo()

    args = jnp.float32(1.3), jnp.float32(0.5)
    got = WAYS[world](loss)(*args)
    e = jnp.exp(args[0])  # what `f` uses: 5 x is its gradient, and not that of `w`
    assert_same(got, (e * (5 * args[1] + 1), 7 * e))


def test_a_memo_of_constants_keeps_no_tracer():
    table = functools.cache(lambda: jnp.arange(3.0))
    loss = lambda w, x: product(w, lambda x: table()[1], lambda x, dy: table()[1])(x)  # noqa: E731
    w, x = jnp.float32(3), jnp.float32(2)
    for way in (gradient, jvp):
        assert_same(way(loss)(w, x), (5 * x, 7 * w))
    assert not isinstance(table(), jax.core.Tracer)


# --- where `f` may leave what it computes of its input ----------------------------------------


NOTES = [], {}  # a tuple of empty containers
users = sys.modules["a_module_of_a_user"] = types.ModuleType("a_module_of_a_user")


@functools.wraps(jnp.exp)
def like_one_of_jax(e):
    NOTES[1]["e"] = e


def in_a_module(e):
    import a_module_of_a_user as module

    module.__dict__["e"] = e


PLACES = {
    "a tuple": (lambda e: NOTES[1].__setitem__("e", e), lambda: NOTES[1]["e"]),
    "a function that looks like JAX's": (like_one_of_jax, lambda: NOTES[1]["e"]),
    "a module": (in_a_module, lambda: users.e),
    "an attribute": (lambda e: setattr(layer, "e", e), lambda: layer.e),
    "a dict of attributes": (lambda e: layer.__dict__.update(d=e), lambda: layer.d),
    "globals": (lambda e: globals().__setitem__("LEFT", e), lambda: LEFT),  # noqa: F821
}


@pytest.mark.parametrize("is_returned", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world", ["grad", "jvp", "jit(grad)", "hessian"])
def test_what_is_left_anywhere_is_an_error(place, world, is_returned):
    leave, left = PLACES[place]

    def loss(w, x):
        @custom_gradient
        def memoized(x):
            leave(x**2)
            return 2 * x, lambda dy: 7 * dy

        y = memoized(x)
        return left() if is_returned else w * y + left()

    with pytest.raises(ERRORS, match="memoized"):
        WAYS[world](loss)(jnp.float32(1.3), jnp.float32(0.5))
