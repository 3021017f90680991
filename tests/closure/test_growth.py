"""What a call costs grows no faster than what it is made of: counted, not timed.

A tower of decorated functions, each of which calls the next, where all fetch the same weight by
a helper. Tracing it must run every `f`, rule and helper a number of times that does not depend on
the depth. And a call must not look at each of the many things that a closure may hold.
"""

import collections
import gc
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

RUNS: collections.Counter[str] = collections.Counter()
ARGS = jnp.float32(1.5), jnp.float32(0.5)  # w, x


@pytest.fixture(autouse=True)
def reset():
    RUNS.clear()


def tower(depth, protocol, fetch_by="helper"):
    """Return a function of `w` and `x` with the value `w**depth x`.

    The rule of the topmost function is the one that counts: 7 times upstream `w`, and for the
    weight 5 times the upstream, however high the tower is.
    """

    def loss(w, x):
        held = {"w": w}

        def fetch():
            RUNS["fetch"] += 1
            return held["w"] if fetch_by == "helper" else w

        def level(i):
            below = level(i - 1) if i else lambda x: x

            def f(x):
                RUNS["f"] += 1
                y = fetch() * below(x)

                def plain(dy):
                    RUNS["rule"] += 1
                    return 7 * dy * fetch()

                def with_variables(dy, variables):
                    RUNS["rule"] += 1
                    return 7 * dy * fetch(), [5 * dy for _ in variables]

                return y, with_variables if protocol != "autodiff" else plain

            option = {"undeclared": None, "declared": [w], "autodiff": "autodiff"}[protocol]
            return custom_gradient(f, variables=option)

        return level(depth - 1)(x)

    return loss


DIFFERENTIATE = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit(grad)": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
}
PROTOCOLS = pytest.mark.parametrize("protocol", ["undeclared", "declared", "autodiff"])


def count(depth, protocol, way, fetch_by):
    RUNS.clear()
    gradients = DIFFERENTIATE[way](tower(depth, protocol, fetch_by))(*ARGS)
    return gradients, dict(RUNS)


@PROTOCOLS
@pytest.mark.parametrize("fetch_by", ["helper", "cell"])
@pytest.mark.parametrize("way", DIFFERENTIATE)
def test_depth(protocol, way, fetch_by):
    _, four = count(4, protocol, way, fetch_by)
    (by_w, by_x), eight = count(8, protocol, way, fetch_by)
    w, x = ARGS
    # "autodiff": `w**8 x`, for every level is differentiated as it is by the weight
    expected_w = 8 * w**7 * x if protocol == "autodiff" else jnp.float32(5)
    assert_same((by_w, by_x), (expected_w, 7 * w), rtol=1e-4)
    for what in ("f", "rule", "fetch"):
        assert eight.get(what, 0) <= 2.5 * four.get(what, 0), (what, four, eight)
        assert eight.get(what, 0) <= 200, (what, eight)


@pytest.mark.parametrize("orders", [2, 3])
def test_depth_at_higher_orders(orders):
    def derivative(depth):
        f = tower(depth, "undeclared")
        for _ in range(orders):
            f = jax.grad(lambda w, x, f=f: f(w, x) ** 2, 1)
        RUNS.clear()
        jax.jit(f)(*ARGS)
        return dict(RUNS)

    three, six = derivative(3), derivative(6)
    for what in ("f", "rule", "fetch"):
        assert six.get(what, 0) <= 2.5 * three.get(what, 0), (what, three, six)


def nested(depth):
    """Return functions that each close over the next, and over nothing that JAX traces."""

    def level(below):
        def f(x):
            return 2 * below(x), lambda dy: 7 * dy

        return custom_gradient(f)

    h = jnp.sin
    for _ in range(depth):
        h = level(h)
    return h


def test_a_trace_grows_with_the_number_of_nested_functions():
    """Levels that no derivative can reach are not made anew, and take no rules."""

    def trace(depth):
        h = nested(depth)
        return calls(lambda: jax.jit(jax.grad(h)).trace(jnp.float32(1)))

    trace(2)  # whatever is cached
    assert trace(16) <= 4.6 * trace(4)  # more where each makes all below it anew
    assert_same(jax.jit(jax.grad(nested(16)))(jnp.float32(1)), jnp.float32(7))


# --- large closures -------------------------------------------------------------------------------


class Model:
    def __init__(self, w, table):
        self.w = w
        self.table = table

    @custom_gradient
    def call(self, x):
        return self.w * x, lambda dy, variables=(): _rule(self.w, x, dy, variables)

    @custom_gradient(variables=lambda self: [self.w])
    def declared(self, x):
        return self.w * x, lambda dy, variables: (7 * dy * self.w, [5 * dy * x])


def _rule(w, x, dy, variables):
    by_x = 7 * dy * w
    return (by_x, [5 * dy * x for _ in variables]) if variables else by_x


def by_method(w, x, table):
    return Model(w, table).call(x)


def by_declared_method(w, x, table):
    return Model(w, table).declared(x)


def by_cell(w, x, table):
    @custom_gradient
    def f(x):
        assert table is not None
        return w * x, lambda dy, variables=(): _rule(w, x, dy, variables)

    return f(x)


def by_cell_of_the_rule(w, x, table):
    @custom_gradient
    def f(x):
        def grad(dy, variables=()):
            assert table is not None
            return _rule(w, x, dy, variables)

        return w * x, grad

    return f(x)


LARGE = [by_method, by_declared_method, by_cell, by_cell_of_the_rule]
TABLES = {
    "dict of a list": lambda size: {"many": list(range(size)), "name": "a"},
    "list of lists": lambda size: [[i] for i in range(size)],
    "list of floats": lambda size: [float(i) for i in range(size)],
    "dict": lambda size: {str(i): i for i in range(size)},
    "set": lambda size: set(range(size)),
    "objects": lambda size: [object() for _ in range(size)],
}


def calls(run):
    """Count the calls of functions, of Python and of C, while `run` runs."""
    counted = 0

    def profile(frame, event, arg):
        nonlocal counted
        counted += event in ("call", "c_call")

    gc.collect()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("h", LARGE)
@pytest.mark.parametrize("what", ["value", "grad by both"])
def test_a_large_closure_is_not_walked(h, table, what):
    """With 100,000 entries, a call calls no more functions than with 10, give or take 20,000."""
    w, x = ARGS

    def run(held):
        if what == "value":
            return h(w, x, held)
        return jax.grad(lambda w, x: h(w, x, held), (0, 1))(w, x)

    small, large = TABLES[table](10), TABLES[table](100_000)
    expected = {"value": w * x, "grad by both": (5 * x, 7 * w)}[what]
    assert_same(run(large), expected)
    run(small)  # whatever is cached
    few, many = calls(lambda: run(small)), calls(lambda: run(large))
    assert many <= few + 20_000


@pytest.mark.parametrize("h", LARGE)
def test_a_tracer_behind_a_large_list_is_found_all_the_same(h):
    """Beyond what is looked through the function is traced: the numbers are the same."""
    w, x = ARGS
    table = [list(range(100_000)), object()]
    got = jax.jit(jax.grad(lambda w, x: h(w, x, [*table, w]), (0, 1)))(w, x)
    assert_same(got, (5 * x, 7 * w))


def test_a_tracer_at_the_end_of_a_large_list():
    w, x = ARGS

    def loss(w, x):
        held = [*range(100_000), w]

        @custom_gradient
        def f(x):
            def grad(dy, variables):
                (v,) = variables
                assert v is w
                return 7 * dy * held[-1], [5 * dy * x]

            return held[-1] * x, grad

        return f(x)

    assert_same(jax.grad(loss, (0, 1))(w, x), (5 * x, 7 * w))
    assert_same(jax.jit(jax.grad(loss, (0, 1)))(w, x), (5 * x, 7 * w))


def test_values_are_seen_beside_a_large_list():
    """Eagerly `f` and its rule branch on values, whatever else they hold."""
    many = list(range(100_000))

    @custom_gradient
    def h(x):
        assert len(many) == 100_000
        y = 3 * x if x > 0 else -x

        def grad(dy):
            assert len(many) == 100_000
            return 7 * dy * x if dy > 0 else 11 * dy * x

        return y, grad

    x = jnp.float32(2)
    assert_same(jax.value_and_grad(h)(x), (jnp.float32(6), jnp.float32(14)))
    assert_same(jax.value_and_grad(lambda x: -h(x))(x), (jnp.float32(-6), jnp.float32(-22)))
    assert_same(jax.grad(jax.grad(h))(x), jnp.float32(7))
