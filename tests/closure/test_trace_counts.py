"""How often user code runs, against a hand-written `jax.custom_vjp`; and what it compiles to.

`f` may be traced once more than by hand, which happens where the rule is an object that cannot
be seen through; the compiled program is that of weights that are passed by hand.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tfgrad_jax import custom_gradient

RUNS: collections.Counter[str] = collections.Counter()


@pytest.fixture(autouse=True)
def reset():
    RUNS.clear()


def by_hand(w, x):
    """Pass the weight explicitly; made anew at each call, as the closures below are."""

    @jax.custom_vjp
    def f(w, x):
        RUNS["f"] += 1
        return w * x**2

    def forward(w, x):
        RUNS["f"] += 1
        return w * x**2, (w, x)

    def backward(residuals, dy):
        RUNS["rule"] += 1
        w, x = residuals
        return 5 * dy * x**2, 7 * dy * w * x

    f.defvjp(forward, backward)
    return f(w, x)


def explicit(w, x):
    @custom_gradient
    def f(w, x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 5 * dy * x**2, 7 * dy * w * x

        return w * x**2, grad

    return f(w, x)


def undeclared(w, x):
    @custom_gradient
    def f(x):
        RUNS["f"] += 1

        def grad(dy, variables):
            RUNS["rule"] += 1
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f(x)


def declared(w, x):
    @custom_gradient(variables={"w": w})
    def f(x):
        RUNS["f"] += 1

        def grad(dy, variables):
            RUNS["rule"] += 1
            return 7 * dy * variables["w"] * x, {"w": 5 * dy * x**2}

        return w * x**2, grad

    return f(x)


def autodiff(w, x):
    @custom_gradient(variables="autodiff")
    def f(x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 7 * dy * w * x

        return w * x**2, grad

    return f(x)


class Opaque:
    """A rule that must be traced to know what it holds."""

    def __init__(self, w, x):
        self.w, self.x = w, x

    def __call__(self, dy, variables):
        RUNS["rule"] += 1
        return 7 * dy * self.w * self.x, [5 * dy * self.x**2 for _ in variables]


def opaque(w, x):
    @custom_gradient
    def f(x):
        RUNS["f"] += 1
        return w * x**2, Opaque(w, x)

    return f(x)


BOTH = (0, 1)
PAIR = jnp.array([3.0, 2.0])

TRANSFORMATIONS = {
    "call": lambda f: f(3.0, 2.0),
    "jit": lambda f: jax.jit(f)(3.0, 2.0),
    "vmap": lambda f: jax.vmap(f)(PAIR, PAIR),
    "grad": lambda f: jax.grad(f, BOTH)(3.0, 2.0),
    "grad by inputs": lambda f: jax.grad(f, 1)(3.0, 2.0),
    "grad by weights": lambda f: jax.grad(f)(3.0, 2.0),
    "jit of grad": lambda f: jax.jit(jax.grad(f, BOTH))(3.0, 2.0),
    "grad of jit": lambda f: jax.grad(jax.jit(f), BOTH)(3.0, 2.0),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f, BOTH))(PAIR, PAIR),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jax.vmap(f)(w, x).sum(), BOTH)(PAIR, PAIR),
    "scan": lambda f: jax.grad(
        lambda w, x: jax.lax.scan(lambda sum_, x: (sum_ + f(w, x), None), 0.0, x)[0], BOTH
    )(3.0, PAIR),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), BOTH)(3.0, 2.0),
    "cond": lambda f: jax.grad(lambda w, x: jax.lax.cond(x > 0, f, lambda w, x: w * x, w, x), BOTH)(
        3.0, 2.0
    ),
    "hessian": lambda f: jax.hessian(f, BOTH)(3.0, 2.0),
}


def counted(transformation: Any, f: Any) -> collections.Counter[str]:
    RUNS.clear()
    transformation(f)
    return collections.Counter(RUNS)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_against_by_hand(name):
    transformation = TRANSFORMATIONS[name]
    hand = counted(transformation, by_hand)
    for f in (explicit, undeclared, declared, autodiff, opaque):
        runs = counted(transformation, f)
        assert runs["f"] <= hand["f"] + 1, (f.__name__, runs, hand)
        # A second derivative runs the rule once more: the declared one holds there too.
        assert runs["rule"] <= hand["rule"] + 1, (f.__name__, runs, hand)
        if f in (undeclared, declared, autodiff):  # `f` is not even traced once more
            assert runs["f"] <= hand["f"], (f.__name__, runs, hand)


@custom_gradient
def module_level(x):
    RUNS["f"] += 1

    def grad(dy):
        RUNS["rule"] += 1
        return 7 * dy * x

    return x**2, grad


class Layer:
    w = jnp.float32(3.0)

    @custom_gradient
    def method(self, x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 7 * dy * self.w * x

        return self.w * x**2, grad


def closure_of_arrays():
    w = jnp.float32(3.0)

    @custom_gradient
    def f(x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 7 * dy * w * x

        return w * x**2, grad

    return f


@pytest.mark.parametrize(
    "f", [module_level, Layer().method, closure_of_arrays()], ids=["module", "method", "closure"]
)
def test_once_per_eager_call_when_nothing_is_captured(f):
    for _ in range(2):
        assert counted(lambda f: f(2.0), f) == {"f": 1}
        assert counted(lambda f: f(jnp.float32(2.0)), f) == {"f": 1}
        assert counted(lambda f: jax.grad(f)(2.0), f) == {"f": 1, "rule": 1}
        twice = counted(lambda f: jax.grad(lambda x: f(f(x)))(2.0), f)
        assert twice == {"f": 2, "rule": 2}


def test_not_traced_again_by_a_compiled_function():
    f = jax.jit(jax.grad(undeclared, BOTH))
    f(3.0, 2.0)
    assert RUNS == {"f": 1, "rule": 1}
    f(4.0, 5.0)
    assert RUNS == {"f": 1, "rule": 1}


def test_a_rule_that_calls_its_own_function_is_traced_a_few_times_at_any_depth():
    def loss(w, x):
        @custom_gradient
        def exp(x):
            RUNS["f"] += 1
            return jnp.exp(w * x), lambda dy: dy * w * exp(x)

        return exp(x)

    counts = []
    differentiated = loss
    for _ in range(4):
        differentiated = jax.grad(differentiated, 1)
        counts.append(counted(lambda f: jax.jit(f)(1.0, 1.0), differentiated)["f"])
    assert max(counts) <= 8, counts
