"""`jax.checkpoint` of decorated functions, also with the experimental flags of newer JAX.

The flags choose other implementations of `custom_vjp`, `custom_jvp` and `checkpoint`. The value is
`w x**2`; the rules declare `7 w x` for the input and `5 x**2` for the weight.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax
from ways import by_hand as hand
from ways import gradient, hand_written, hessian, jvp, nested_gradient

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

NAMES = ["jax_custom_vjp3", "jax_remat3", "jax_custom_jvp3"]
if not all(hasattr(jax.config, name) for name in NAMES):
    NAMES = []  # of a JAX that tries some of them out for the first time
FLAGS = [  # all at once; the others, and none, are slow
    pytest.param(
        combination,
        id="+".join(combination) or "none",
        marks=() if combination == tuple(NAMES) else pytest.mark.slow,
    )
    for count in range(len(NAMES) + 1)
    for combination in itertools.combinations(NAMES, count)
]


@pytest.fixture(params=FLAGS)
def flags(request):
    """Set these flags and no others for the length of a test."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.clear_caches()
    try:
        for name in NAMES:
            jax.config.update(name, name in request.param)
        yield request.param
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.clear_caches()


@custom_gradient
def explicit(w, x):
    return w * x**2, lambda dy: (5 * dy * x**2, 7 * dy * w * x)


def captured(w, x):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f(x)


def declared(w, x):
    @custom_gradient(variables=[w])
    def f(x):
        return w * x**2, lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

    return f(x)


class Rule:
    def __init__(self, w, x):
        self.w, self.x = w, x

    def __call__(self, dy):
        return 5 * dy * self.x**2, 7 * dy * self.w * self.x


@custom_gradient
def by_an_object(w, x):
    return w * x**2, Rule(w, x)


def used_by_the_rule_alone(w, x):
    """Value `w x**2`, by a residual that the value does not use."""

    @custom_gradient
    def f(w, x):
        slope = 7 * w * x
        return w * x**2, lambda dy: (5 * dy * x**2, dy * slope)

    return f(w, x)


FUNCTIONS = [explicit, captured, declared, by_an_object, used_by_the_rule_alone]
GRADIENTS = (lambda w, x: 5 * x**2, lambda w, x: 7 * w * x)
oracle = hand_written(lambda w, x: w * x**2, *GRADIENTS)
ARGS = jnp.float32(3), jnp.float32(2)

LOSSES = {
    "checkpoint": lambda h: jax.checkpoint(lambda w, x: h(w, x) ** 2),
    "everything saved": lambda h: jax.checkpoint(
        lambda w, x: h(w, x) ** 2, policy=jax.checkpoint_policies.everything_saveable
    ),
    "nothing saved": lambda h: jax.checkpoint(
        lambda w, x: h(w, x) ** 2, policy=jax.checkpoint_policies.nothing_saveable
    ),
    "of itself": lambda h: jax.checkpoint(jax.checkpoint(lambda w, x: h(w, x) ** 2)),
    "twice the function": lambda h: jax.checkpoint(lambda w, x: h(w, h(w, x) / 8) ** 2),
    "in scan": lambda h: (
        lambda w, x: lax.scan(
            lambda c, _: (c + jax.checkpoint(h)(w, x) ** 2, None), 0.0, None, length=1
        )[0]
    ),
    "of scan": lambda h: jax.checkpoint(
        lambda w, x: lax.scan(lambda c, _: (c + h(w, x) ** 2, None), 0.0, None, length=1)[0]
    ),
    "of vmap": lambda h: jax.checkpoint(
        lambda w, x: jax.vmap(h, (None, 0))(w, jnp.stack([x, x])).sum() ** 2 / 4
    ),
}
ORDERS = {
    "grad": (gradient, gradient),
    "jit of grad": (lambda f: jax.jit(gradient(f)), gradient),
    "grad of grad": (nested_gradient, hessian),
    "jvp": (jvp, gradient),
    "hessian": (hessian, hessian),
}
SOME = {("grad", "checkpoint"), ("grad", "of scan")}


@pytest.mark.parametrize(
    ("order", "loss"),
    [
        pytest.param(order, loss, marks=() if (order, loss) in SOME else pytest.mark.slow)
        for order in ORDERS
        for loss in LOSSES
    ],
)
@pytest.mark.parametrize("h", FUNCTIONS)
def test_gradient(h, loss, order, flags):
    """By the oracle without a checkpoint, which changes no number."""
    derivative, plain = ORDERS[order]
    expected = plain(_without_checkpoint(loss))(*ARGS)
    by_jax = LOSSES[loss](hand(gradient if order in ("grad", "jit of grad") else jvp, *_VALUE))
    try:
        assert_same(derivative(by_jax)(*ARGS), expected)
    except Exception as error:  # of many kinds, by version and flag
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")
    assert_same(derivative(LOSSES[loss](h))(*ARGS), expected)


_VALUE = (lambda w, x: w * x**2, *GRADIENTS)


def _without_checkpoint(loss):
    if loss == "twice the function":
        return lambda w, x: oracle(w, oracle(w, x) / 8) ** 2
    return lambda w, x: oracle(w, x) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("h", FUNCTIONS)
def test_other_transformations(h, flags):
    """Without a checkpoint, under the same flags."""
    expected = gradient(lambda w, x: oracle(w, x) ** 2)(*ARGS)

    def loss(w, x):
        return h(w, x) ** 2

    assert_same(gradient(loss)(*ARGS), expected)
    assert_same(jax.jit(gradient(jax.jit(loss)))(*ARGS), expected)
    assert_same(jvp(loss)(*ARGS), expected)
    pairs = jax.tree.map(lambda a: jnp.stack([a, a]), ARGS)
    assert_same(
        jax.vmap(gradient(loss))(*pairs), jax.tree.map(lambda e: jnp.stack([e, e]), expected)
    )
    assert_same(nested_gradient(loss)(*ARGS), hessian(lambda w, x: oracle(w, x) ** 2)(*ARGS))
