"""Rules that call their own function, or each other's. The numbers come from analysis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import REVERSE, along

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)
some_ways = pytest.mark.parametrize(
    "way", ["grad", "jit(grad)", "grad(vmap)", "grad(scan)", *sample(["scan(grad)", "jacrev"], 1)]
)


# --- `exp(w x)`, declared 2 w y by x and 5 x y by w -----------------------------------------------


def exponential(w, x, again):
    def grad(dy, variables=()):
        dx = 2 * dy * w * again(x)
        return (dx, [5 * dy * x * again(x)]) if len(variables) else dx

    return jnp.exp(w * x), grad


def by_itself(w):
    exp = custom_gradient(lambda x: exponential(w, x, exp))
    return exp


class Model:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def exp(self, x):
        return exponential(self.w, x, self.exp)


def by_a_jitted_partial(w):
    exp = custom_gradient(lambda x, *, w: exponential(w, x, jax.jit(h)))
    h = functools.partial(exp, w=w)
    return h


MAKERS = {
    "itself": by_itself,
    "a method": lambda w: Model(w).exp,
    "a jitted partial": by_a_jitted_partial,
}


@eager_and_jit
@pytest.mark.parametrize("make", MAKERS)
def test_a_rule_that_calls_its_own_function_has_three_orders(make, mode):
    h = lambda w, x: MAKERS[make](w)(x)  # noqa: E731
    w, x = 1.5, 0.5
    e = np.exp(w * x)
    for n, third in enumerate(((5 * x) ** 3 * e, (2 * w) ** 3 * e)):
        got = mode(jax.grad(jax.grad(jax.grad(h, n), n), n))(w, x)
        assert_same(got, jnp.float32(third))
    # By w, 5 x exp(x) with exp's own derivatives 2 w e and 5 x e; by x, 2 w exp(x).
    expected = (
        (5 * x * 5 * x * e, 5 * e + 5 * x * 2 * w * e),
        (2 * e + 2 * w * 5 * x * e, 2 * w * 2 * w * e),
    )
    got = mode(jax.hessian(h, (0, 1)))(w, x)
    assert_same(got, jax.tree.map(jnp.float32, expected), rtol=1e-4)


class Sine:
    """A rule that reads `self.w`, and calls the next one, which has the same code."""

    def __init__(self, w, below):
        self.w, self.below = w, below

    def __call__(self, x):
        y, w = jnp.sin(self.w * x), self.w
        return y, lambda dy: dy * w * jnp.cos(self.w * x) * (1 + 0 * self.below(x))


MADE = {"an object": lambda h: h, "a partial": lambda h: functools.partial(Sine.__call__, h)}


@pytest.mark.parametrize("kind", MADE)
def test_layers_with_one_code_are_told_apart(kind):
    def top(w, x):
        h = jnp.cos
        for _ in range(6):
            h = custom_gradient(MADE[kind](Sine(w, h)), variables="autodiff")
        return h(x)

    fourth = functools.reduce(lambda f, _: jax.grad(f, 1), range(4), top)
    assert_same(jax.jit(fourth)(W, X), W**4 * jnp.sin(W * X), rtol=1e-3)


# --- an adjoint solver: y' = field(y, *args) by Euler's method ------------------------------------

STEPS = 8


def euler(field, y, *args):
    def step(y, _):
        return jax.tree.map(lambda a, b: a + b / STEPS, y, field(y, *args)), None

    return lax.scan(step, y, None, length=STEPS)[0]


class Slots:
    """The adjoint field, as a callable that holds the field where attributes do not show it."""

    __slots__ = ("field",)

    def __init__(self, field):
        self.field = field

    def __call__(self, state, *args):
        y, adjoint, *_ = state
        by_y, *by_args = jax.vjp(self.field, y, *args)[1](adjoint)
        return jax.tree.map(jnp.negative, self.field(y, *args)), by_y, *by_args


@custom_gradient(convention="jax")
def solve(field, y, *args):
    end = euler(field, y, *args)

    def grad(dy):
        state = (end, jax.tree.map(lambda d: 7 * d, dy), *jax.tree.map(jnp.zeros_like, args))
        _, by_y, *by_args = solve(Slots(field), state, *args)
        return None, by_y, *by_args

    return end, grad


@some_ways
def test_an_adjoint_solver_calls_itself_with_an_opaque_callable(way):
    """The solver is `y -> a y`; its adjoint, solved by itself, `-> 7 a`: of `y**2`, `14 a a y`."""
    rate = jnp.float32(0.5)
    shrink, grow = 1 - rate / STEPS, 1 + rate / STEPS  # of a step, there and back
    a = shrink**STEPS

    def loss(y, rate):
        return solve(lambda y, rate: -rate * y, y, rate) ** 2

    by_rate = -14 * (a * X) ** 2 / STEPS * sum((shrink * grow) ** n for n in range(STEPS))
    assert_same(REVERSE[way](loss)(X, rate), (14 * a * a * X, by_rate))
    constant = lambda y: solve(lambda y: -0.5 * y, y) ** 2  # noqa: E731
    second = REVERSE[way](lambda y: jax.grad(constant)(y))(X)
    assert_same(second, (7 * 7 * 14 * a * a,), rtol=1e-4)


# --- two functions whose rules call each other ----------------------------------------------------


def pair(w):
    """Two functions of a closure: `2 w x**2` with `7 w second`, and `w x**2` with `5 first`."""

    def rule(by_input, by_variable):
        def grad(dy, variables=()):
            dx = dy * by_input()
            return (dx, [dy * by_variable for _ in variables]) if variables else dx

        return grad

    first = custom_gradient(lambda x: (2 * second(x), rule(lambda: 7 * w * second(x), 11 * x**2)))
    second = custom_gradient(lambda x: (w * x**2, rule(lambda: 5 * first(x), 3 * x**2)))
    return first, second


@some_ways
def test_two_functions_whose_rules_call_each_other(way):
    """`first_x = 7 w second`: by `w`, `7 second + 7 w * 3 x**2`; by `x`, `7 w * 5 first`."""
    first, second = (lambda w, x, i=i: pair(w)[i](x) for i in range(2))
    assert_same(REVERSE[way](first)(W, X), (11 * X**2, 7 * W * W * X**2))
    assert_same(REVERSE[way](second)(W, X), (3 * X**2, 5 * 2 * W * X**2))
    twice = REVERSE[way](jax.grad(first, 1))(W, X)
    assert_same(twice, (7 * W * X**2 + 21 * W * X**2, 35 * W * 2 * W * X**2))


@eager_and_jit
def test_a_rule_that_multiplies_by_zero(mode):
    """Zero times an upstream is zero, and still depends on that upstream: `h'' = 7 * 7 h`."""
    h = custom_gradient(lambda x: (3 * x, lambda dy: dy * (h(x) * 0.0) + 7 * dy * h(x)))
    assert_same(mode(jax.grad(jax.grad(h)))(2.0), jnp.float32(294))


STAGES = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda h: lambda x: lax.cond(x > 0, h, h, x),
    "scan": lambda h: lambda x: lax.scan(lambda c, _: (h(c), None), x, None, 1)[0],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_staged_rule_that_reads_its_own_function_keeps_it_in_forward_mode(stage):
    """`h' = 7 h`: where JAX transposes a derivative that holds `h(x)`, that has its rule still."""
    h = custom_gradient(lambda x: (jnp.sin(x), lambda dy: 7 * dy * h(x)))

    def loss(w):
        @custom_gradient(variables="autodiff")
        def f(z):
            return STAGES[stage](h)(w) * z, lambda dy: (None,)

        return f(jnp.float32(1))

    x = jnp.float32(0.3)
    ways = [jax.grad(jax.grad(loss)), jax.jacfwd(jax.grad(loss)), jax.grad(along(loss))]
    if stage != "scan":  # before JAX 0.12, that of a scan raises
        ways.append(jax.jacfwd(along(loss)))
    for way in ways:
        assert_same((way(x), jax.jit(way)(x)), (49 * jnp.sin(x),) * 2)
