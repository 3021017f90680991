"""Rules that call their own decorated function, with callables that cannot be looked into.

Every test has an end: the functions count how often they run, and stop a recursion that has
none. What is expected comes from analysis or from a hand-written `jax.custom_vjp`.
"""

import types

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax
from ways import REVERSE, by, gradient, nested_gradient

from tfgrad_jax import custom_gradient

pytestmark = [pytest.mark.timeout(120), pytest.mark.deep]
SOME = ("grad", "jit(grad)", "grad(vmap)", "grad(scan)")
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
LIMIT = 500


class Endless(Exception):  # noqa: N818
    """A function was run far more often than any correct program would."""


class Runs:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        if self.count > LIMIT:
            raise Endless


# --- an adjoint solver: y' = field(y, *args), solved by Euler's method with STEPS steps -----------

STEPS = 8


def _euler(field, y, *args):
    def step(y, _):
        return jax.tree.map(lambda a, b: a + b / STEPS, y, field(y, *args)), None

    return lax.scan(step, y, None, length=STEPS)[0]


def _seven(tree):
    return jax.tree.map(lambda a: 7 * a, tree)


class Slots:
    """A callable that holds a field where it cannot be looked into by its attributes."""

    __slots__ = ("field",)

    def __init__(self, field):
        self.field = field

    def __call__(self, state, *args):
        y, adjoint, *_ = state
        _, pull = jax.vjp(self.field, y, *args)
        by_y, *by_args = pull(adjoint)
        minus = jax.tree.map(jnp.negative, self.field(y, *args))
        return minus, by_y, *by_args


def _adjoint_field(kind, field):
    if kind == "slots":
        return Slots(field)
    if kind == "partial":
        return jax.tree_util.Partial(Slots(field))
    return lambda *values: Slots(field)(*values)


def solver(kind, runs):
    @custom_gradient(convention="jax")
    def solve(field, y, *args):
        runs()
        end = _euler(field, y, *args)

        def grad(dy):
            state = (end, _seven(dy), *jax.tree.map(jnp.zeros_like, args))
            _, by_y, *by_args = solve(_adjoint_field(kind, field), state, *args)
            return None, by_y, *by_args

        return end, grad

    def odeint(field, y, *args):
        if kind == "closure_convert":
            field, consts = jax.closure_convert(field, y, *args)
            return solve(field, y, *args, *consts)
        return solve(field, y, *args)

    return odeint


def _adjoint_by_hand(field, y, *args):
    """The continuous adjoint with the same steps: what the rule above computes at first order."""

    @jax.custom_vjp
    def solve(y, *args):
        return _euler(field, y, *args)

    def forward(y, *args):
        end = _euler(field, y, *args)
        return end, (end, args)

    def backward(residuals, dy):
        end, args = residuals
        state = (end, _seven(dy), *jax.tree.map(jnp.zeros_like, args))
        return tuple(_euler(Slots(field), state, *args)[1:])

    solve.defvjp(forward, backward)
    return solve(y, *args)


KINDS = ["closure_convert", "slots", "partial", "function"]


@pytest.mark.parametrize("kind", KINDS)
@by(REVERSE, SOME)
def test_adjoint_solver(kind, way):
    """The field is a closure over a traced value; its derivatives are 7 times the adjoint's."""
    runs = Runs()

    def loss(solve):
        return lambda y, rate: solve(lambda y, rate: -rate * y, y, rate) ** 2

    args = jnp.float32(2), jnp.float32(0.5)
    expected = gradient(loss(_adjoint_by_hand))(*args)
    assert_same(way(loss(solver(kind, runs)))(*args), expected)
    assert runs.count < 60


@pytest.mark.parametrize("kind", ["closure_convert"])
@by(REVERSE, SOME)
def test_adjoint_solver_of_a_closure(kind, way):
    """`rate` is closed over by the field; `closure_convert` makes it an argument."""
    runs = Runs()
    args = jnp.float32(2), jnp.float32(0.5)

    def loss(y, rate):
        scale = rate * 1.0
        return solver(kind, runs)(lambda y: -scale * y, y) ** 2

    def oracle(y, rate):
        return _adjoint_by_hand(lambda y, rate: -rate * y, y, rate) ** 2

    assert_same(way(loss)(*args), gradient(oracle)(*args))
    assert runs.count < 60


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_adjoint_solver_at_second_order(kind, mode):
    """The rule calls the solver, whose rule is its derivative: by the orders of `STEPS` Euler.

    For `y' = -r y` the solver is `y -> a y` with `a = (1 - r / n)**n`, and the adjoint
    `dy -> 7 c dy` with `c = (1 - r / n)**n` too, solved by the function itself.
    """
    runs = Runs()
    rate = 0.5
    a = (1 - rate / STEPS) ** STEPS

    def loss(y):
        return solver(kind, runs)(lambda y: -rate * y, y) ** 2

    # L' = 7 a * 2 h; the derivative of the adjoint by its state is again 7 times its own adjoint.
    got = mode(jax.grad(jax.grad(loss)))(jnp.float32(2))
    assert_same(got, jnp.float32(7 * a * 7 * 2 * a * 7), rtol=1e-4)
    assert runs.count < 200


# --- a rule that calls its maker ------------------------------------------------------------------


def power(holder, runs):
    """Make `x**3` with the derivative `7 w x h`, by a maker that the rule calls again."""

    def make(w):
        held = holder(w)

        @custom_gradient
        def h(x):
            runs()
            return x**3, lambda dy: 7 * dy * held.w * x * make(w)(x)

        return h

    return make


class SlotsOfW:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


@pytest.mark.parametrize(
    "holder", [lambda w: types.SimpleNamespace(w=w), SlotsOfW], ids=["namespace", "slots"]
)
@by(REVERSE, SOME)
def test_a_rule_that_calls_its_maker(holder, way):
    runs = Runs()
    got = way(lambda w, x: power(holder, runs)(w)(x))(jnp.float32(3), jnp.float32(2))
    assert_same(got, (jnp.float32(0), jnp.float32(7 * 3 * 2 * 8)))
    assert runs.count < 60


@pytest.mark.parametrize(
    "holder", [lambda w: types.SimpleNamespace(w=w), SlotsOfW], ids=["namespace", "slots"]
)
@MODES
def test_a_rule_that_calls_its_maker_at_second_order(holder, mode):
    """`h' = 7 w x h`, so `h'' = 7 w h + 7 w x h'`; and by `w`: `7 x h`."""
    runs = Runs()
    w, x = jnp.float32(3), jnp.float32(2)

    def by_x(w, x):
        return jax.grad(lambda x: power(holder, runs)(w)(x))(x)

    h, first = x**3, 7 * w * x * x**3
    expected = 7 * x * h, 7 * w * h + 7 * w * x * first
    assert_same(mode(gradient(by_x))(w, x), expected)
    assert runs.count < 100


# --- two functions whose rules call each other ----------------------------------------------------


def pair(runs):
    """`f` of `first` calls `second`; each rule calls the other; both close over `w`."""

    def make(w):
        @custom_gradient
        def first(x):
            runs()
            return 2 * second(x), lambda dy: 7 * dy * w * second(x)

        @custom_gradient
        def second(x):
            runs()
            return w * x**2, lambda dy, variables=(): _with(
                variables, 5 * dy * first(x), 3 * dy * x**2
            )

        return first, second

    return make


def _with(variables, by_input, by_variable):
    return (by_input, [by_variable for _ in variables]) if variables else by_input


def pair_with_variables(runs):
    def make(w):
        @custom_gradient
        def first(x):
            runs()

            def grad(dy, variables=()):
                return _with(variables, 7 * dy * w * second(x), 11 * dy * x**2)

            return 2 * second(x), grad

        @custom_gradient
        def second(x):
            runs()

            def grad(dy, variables=()):
                return _with(variables, 5 * dy * first(x), 3 * dy * x**2)

            return w * x**2, grad

        return first, second

    return make


@by(REVERSE, SOME)
@pytest.mark.parametrize("made", [pair, pair_with_variables])
def test_two_functions_by_their_input(made, way):
    """`first = 2 w x**2` with `7 w second`, `second = w x**2` with `5 first`."""
    w, x = 3.0, 2.0
    runs = Runs()
    got = way(lambda x: made(runs)(jnp.float32(w))[0](x))(jnp.float32(x))
    assert_same(got, (jnp.float32(7 * w * w * x**2),))
    got = way(lambda x: made(runs)(jnp.float32(w))[1](x))(jnp.float32(x))
    assert_same(got, (jnp.float32(5 * 2 * w * x**2),))
    assert runs.count < 200


@by(REVERSE, SOME)
def test_two_functions_by_the_weight_that_they_close_over(way):
    w, x = jnp.float32(3), jnp.float32(2)
    runs = Runs()
    first = way(lambda w, x: pair_with_variables(runs)(w)[0](x))(w, x)
    assert_same(first, (11 * x**2, 7 * w * w * x**2))
    second = way(lambda w, x: pair_with_variables(runs)(w)[1](x))(w, x)
    assert_same(second, (3 * x**2, 5 * 2 * w * x**2))
    assert runs.count < 200


@MODES
def test_two_functions_at_second_order(mode):
    """`first_x = 7 w second`: by `w`, `7 second + 7 w * 3 x**2`; by `x`, `7 w * 5 first`."""
    w, x = jnp.float32(3), jnp.float32(2)
    runs = Runs()
    matrix = mode(nested_gradient(lambda w, x: pair_with_variables(runs)(w)[0](x)))(w, x)
    second, first = w * x**2, 2 * w * x**2
    expected = (
        (jnp.float32(0), 22 * x),
        (7 * second + 21 * w * x**2, 35 * w * first),
    )
    assert_same(matrix, expected)
    assert runs.count < 300
