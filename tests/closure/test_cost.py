"""What a user's function costs: how often `f` and its rule run, and what a large closure adds."""

import collections
import gc
import sys
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from captures import Finalized
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

RUNS: collections.Counter[str] = collections.Counter()
ARGS = jnp.float32(1.5), jnp.float32(0.5)  # w, x
OPTIONS = {"undeclared": None, "declared": "w", "autodiff": "autodiff"}


def layer(protocol, below, w):
    """Return a function with the value `w below(x)`, declared `7 w` by x and 5 by w."""

    def f(x):
        RUNS["f"] += 1

        def plain(dy):
            RUNS["rule"] += 1
            return 7 * dy * w

        def with_variables(dy, variables):
            return plain(dy), [5 * dy for _ in variables]

        return w * below(x), plain if protocol == "autodiff" else with_variables

    return custom_gradient(f, variables=[w] if protocol == "declared" else OPTIONS[protocol])


def tower(protocol, depth):
    def loss(w, x):
        h = lambda x: x  # noqa: E731
        for _ in range(depth):
            h = layer(protocol, h, w)
        return h(x)

    return loss


WAYS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit(grad)": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "hessian": lambda f: jax.hessian(lambda w, x: f(w, x) ** 2, (0, 1)),
}


@pytest.mark.parametrize("protocol", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_runs_grow_with_the_depth_alone(protocol, way):
    counts = []
    for depth in (3, 6):
        RUNS.clear()
        WAYS[way](tower(protocol, depth))(*ARGS)
        counts.append(RUNS["f"] + RUNS["rule"])
    # The second derivative of what is differentiated as it is has a term for each pair of levels.
    assert counts[1] <= (3 if (way, protocol) == ("hessian", "autodiff") else 2.5) * counts[0]


@pytest.mark.parametrize("protocol", ["undeclared", "declared"])
@pytest.mark.parametrize("way", ["jit(grad)", "grad(jit)", "scan"])
def test_f_runs_once_for_each_derivative(protocol, way):

    def scanned(loss):
        gradient = jax.grad(loss, (0, 1))
        step = lambda carry, wx: (carry, gradient(*wx))  # noqa: E731
        return lambda w, x: jax.tree.map(
            lambda g: g[0], jax.lax.scan(step, 0.0, (w[None], x[None]))[1]
        )

    RUNS.clear()
    w, x = ARGS
    found = (WAYS | {"scan": scanned})[way](tower(protocol, 1))(w, x)
    assert_same(found, (jnp.float32(5), 7 * w))
    again = way == "grad(jit)"  # the value is recorded first
    assert dict(RUNS) == {"f": 1 + again, "rule": 1}


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


def count_per_level(run, depths):
    """Return the calls that each level takes, with the first of these depths and with the last."""
    counts = []
    for depth in depths:
        run(depth)()  # whatever is cached
        counts.append(calls(run(depth)) / depth)
    return counts


@eager_and_jit
@pytest.mark.parametrize("protocol", ["undeclared", "declared"])
def test_a_level_of_a_deep_nest_costs_what_one_of_a_flat_one_does(protocol, mode):
    x = jnp.float32(0.5)
    depths = 10, 60
    loss = tower(protocol, depths[1])
    got = mode(jax.value_and_grad(loss, (0, 1)))(jnp.float32(1), x)
    assert_same(got, (x, (jnp.float32(5), jnp.float32(7))))
    run = lambda depth: lambda: mode(jax.grad(tower(protocol, depth), (0, 1)))(*ARGS)  # noqa: E731
    few, many = count_per_level(run, depths)
    assert many <= 1.2 * few


@eager_and_jit
@pytest.mark.parametrize("declared", [False, True])
def test_each_of_many_weights_costs_what_one_of_few_does(declared, mode):
    def loss(weights, x):
        @custom_gradient(variables=weights if declared else None)
        def f(x):
            grad = lambda dy, variables: (7 * dy * sum(weights), [5 * dy for _ in variables])  # noqa: E731
            return sum(weights) * x, grad

        return f(x)

    def run(size):
        return lambda: mode(jax.grad(loss, (0, 1)))([jnp.float32(2)] * size, jnp.float32(0.5))

    assert_same(run(40)(), ([jnp.float32(5)] * 40, jnp.float32(7 * 80)))
    few, many = count_per_level(run, (20, 160))
    assert many <= 1.2 * few


@pytest.mark.parametrize("protocol", OPTIONS)
def test_eagerly_f_and_its_rule_run_once(protocol):
    RUNS.clear()
    jax.grad(tower(protocol, 1), (0, 1))(*ARGS)
    assert dict(RUNS) == {"f": 1, "rule": 1}


def test_a_call_does_not_slow_down_those_after_it():
    """JAX searches its caches for each operation through the traces that have been."""
    traces = []

    def loss(w, x):
        @custom_gradient
        def f(x):
            traces.append(jax.extend.core.find_top_trace(()))
            return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        return f(x)

    w, x = ARGS
    for _ in range(3):
        assert_same(jax.grad(loss, (0, 1))(w, x), (5 * x, 7 * w))
    assert len(traces) == 3 and len(set(map(id, traces))) == 1


@pytest.mark.parametrize("kind", ["not copied", "large"])
@pytest.mark.parametrize("way", ["grad", "jit(grad)", "grad(jit)"])
def test_a_call_that_is_traced_runs_once(kind, way):
    """Its variables are found in its jaxpr."""

    def loss(w, x):
        scaled = jax.jit(lambda x: w * x)
        weights = [w] + [w + i for i in range(12)]

        @custom_gradient
        def f(x):
            RUNS["f"] += 1
            y = scaled(x) if kind == "not copied" else weights[0] * x
            return y, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        return f(x)

    RUNS.clear()
    w, x = ARGS
    assert_same(WAYS[way](loss)(w, x), (5 * x, 7 * w))
    assert RUNS["f"] == 1


# --- large closures -------------------------------------------------------------------------------

TABLES = {
    "dict of a list": lambda size: {"many": list(range(size))},
    "list of lists": lambda size: [[i] for i in range(size)],
}


def beside(table, by):
    def loss(w, x):
        @custom_gradient(variables=[w])
        def f(x):
            assert by != "f" or table is not None

            def grad(dy, variables):
                assert by != "rule" or table is not None
                return 7 * dy * w, [5 * dy * x]

            return w * x, grad

        return f(x)

    return jax.value_and_grad(loss, (0, 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("by", ["f", "rule"])
@pytest.mark.parametrize("table", TABLES)
def test_a_large_closure_is_not_walked(table, by):
    """With 100,000 entries a call makes as many calls as with 10, give or take 20,000."""
    w, x = ARGS
    small, large = (beside(TABLES[table](size), by) for size in (10, 100_000))
    assert_same(large(w, x), (w * x, (5 * x, 7 * w)))
    small(w, x)  # whatever is cached
    assert calls(lambda: large(w, x)) <= calls(lambda: small(w, x)) + 20_000


def model_of(kind, depth, annotations=()):
    """Return the gradient of layers that reach all weights: by a closure, or by an object."""

    def loss(weights, x):
        model = types.SimpleNamespace(weights=weights, state=jax.extend.core.find_top_trace(()))
        for i in range(depth):
            read = (lambda i=i: weights[i]) if kind == "closure" else lambda i=i: model.weights[i]

            def f(x, read=read):
                def grad(dy, variables):
                    return dy * read(), [5 * dy * x for _ in variables]

                grad.__annotations__ = dict(annotations)
                return read() * x, grad

            options = {"variables": [read()]} if kind == "declared" else {}
            x = custom_gradient(lambda x, f=f: f(x), **options)(x)
        return x

    weights = [jnp.float32(1)] * depth
    return jax.grad(loss), weights


@pytest.mark.sampled(3)
@eager_and_jit
@pytest.mark.parametrize("kind", ["closure", "object", "declared"])
def test_a_layer_of_a_large_model_costs_what_one_of_a_small_one_does(kind, mode):
    counts = []
    for depth in (10, 40):
        run, weights = model_of(kind, depth)
        args = weights, jnp.float32(0.5)
        first = run(*args)
        assert_same(first[0], jnp.float32(2.5))  # 5 x
        counts.append(calls(lambda run=run, args=args: mode(lambda *a: run(*a))(*args)) / depth)
    assert counts[1] <= 2.5 * counts[0]


@eager_and_jit
def test_annotations_of_a_rule_lead_to_no_walk(mode):
    counts = []
    for annotations in ((), [("dy", Any), ("return", list[Any])]):
        run, weights = model_of("object", 20, annotations)
        args = weights, jnp.float32(0.5)
        mode(lambda *a, run=run: run(*a))(*args)  # whatever is cached
        counts.append(calls(lambda run=run, args=args: mode(lambda *a: run(*a))(*args)))
    assert counts[1] <= 1.02 * counts[0]


LARGE = {  # how the weight is held, and how to get at it
    "list": (lambda w: [*range(100_000), [w]], lambda held: held[-1][0]),
    "ordered dict": (
        lambda w: collections.OrderedDict(enumerate([*range(10_000), [w]])),
        lambda held: held[10_000][0],
    ),
    "key of a dict": (
        lambda w: {**dict.fromkeys(range(20_000)), (lambda: w): None},
        lambda held: [*held][-1](),
    ),
    "object array": (
        lambda w: np.array([*range(20_000), lambda: w], object),
        lambda held: held[-1](),
    ),
}


@eager_and_jit
@pytest.mark.parametrize("kind", LARGE)
def test_a_weight_at_the_end_of_a_large_container_is_found(kind, mode):
    def loss(w, x):
        hold, get = LARGE[kind]
        held = hold(w)

        @custom_gradient
        def f(x):
            return get(held) * x, lambda dy, variables: (7 * dy * get(held), [5 * dy * x])

        return f(x)

    w, x = ARGS
    assert_same(mode(jax.grad(loss, (0, 1)))(w, x), (5 * x, 7 * w))


Entry = collections.namedtuple("Entry", "name number")


class Record:
    kind = "record"

    def __init__(self, number):
        self.number, self.tags, self.image = number, {"new": [number]}, np.ones(2)


MANY = {  # of which none holds a weight
    "numbers": lambda size: list(range(10 * size)),
    "words": lambda size: {str(i): i for i in range(10 * size)},
    "names": lambda size: {str(i) for i in range(10 * size)},
    "lists": lambda size: [[i] for i in range(size)],
    "dicts": lambda size: [{"id": i, "tags": [str(i)]} for i in range(size)],
    "named tuples": lambda size: {i: Entry(str(i), i) for i in range(size)},
    "objects": lambda size: [Record(i) for i in range(size)],
    "an object array": lambda size: np.array([{"id": i} for i in range(size)], object),
}


@pytest.mark.parametrize("kind", MANY)
def test_values_are_seen_beside_much_else(kind):
    many = MANY[kind](20_000)

    def loss(w, x):
        held = types.SimpleNamespace(many=many, w=w)

        @custom_gradient(variables=[w])
        def f(x):
            y = held.w * x if x > 0 and held.many is many else -x

            def rule(dy, variables):
                assert held.many is many
                return (7 if dy > 0 else 11) * dy * w, [5 * dy * x]

            return y, rule

        return f(x)

    w, x = ARGS
    assert_same(jax.value_and_grad(loss, (0, 1))(w, x), (w * x, (5 * x, 7 * w)))
    assert_same(jax.grad(lambda w, x: -loss(w, x), (0, 1))(w, x), (-5 * x, -11 * w))


@eager_and_jit
@pytest.mark.parametrize("kind", ["lists", "dicts", "objects"])
def test_a_weight_among_many_records_is_found(kind, mode):
    def loss(w, x):
        many = MANY[kind](2_000)
        held = many[1_000]
        (held.append if kind == "lists" else (held if kind == "dicts" else vars(held)).update)(
            [lambda: w] if kind == "lists" else {"get": lambda: w}
        )

        def get():
            held = many[1_000]
            if kind == "lists":
                return held[1][0]()
            return held["get"]() if kind == "dicts" else held.get()

        @custom_gradient
        def f(x):
            return get() * x, lambda dy, variables: (7 * dy * get(), [5 * dy * x])

        return f(x)

    w, x = ARGS
    assert_same(mode(jax.grad(loss, (0, 1)))(w, x), (5 * x, 7 * w))


def test_values_are_seen_beside_many_lists_of_a_second_derivative():
    many = [[i] for i in range(20_000)]

    @custom_gradient
    def h(x):
        return 3 * x if many else -x, lambda dy: 7 * dy * x if many else 11 * dy * x

    assert_same(jax.grad(jax.grad(h))(jnp.float32(2)), jnp.float32(7))


def test_values_are_seen_beside_many_functions():
    def loss(w, x):
        many = lambda: w  # noqa: E731
        for _ in range(3_000):
            many = (lambda one: lambda: one)(many)

        @custom_gradient(variables=[w])
        def f(x):
            y = w * x if x > 0 and many else -x
            return y, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        return f(x)

    w, x = ARGS
    assert_same(jax.grad(loss, (0, 1))(w, x), (5 * x, 7 * w))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", ["grad", "jit(grad)", "grad(jit)", "jacfwd"])
@pytest.mark.parametrize("protocol", ["undeclared", "declared"])
@pytest.mark.parametrize("hold", ["instance", "class"])
def test_a_class_that_is_made_in_a_function_is_freed_with_the_call(hold, protocol, way):
    gone = []

    def loss(w, x):
        class Layer:
            weight = w

            def __init__(self):
                self.w = w

            @custom_gradient(variables=(lambda self: [self.w]) if protocol == "declared" else None)
            def __call__(self, x):
                weight = self.w if hold == "instance" else self.weight
                return weight * x, lambda dy, variables: (7 * dy * weight, [5 * dy * x])

        gone.append(weakref.ref(Layer))
        return Layer()(x)

    w, x = ARGS
    assert_same(WAYS[way](loss)(w, x), (5 * x, 7 * w))
    jax.clear_caches()
    gc.collect()
    assert {cls() for cls in gone} == {None}


@eager_and_jit
@pytest.mark.parametrize("protocol", OPTIONS)
def test_a_rule_in_a_large_closure_writes_to_a_ref(protocol, mode):
    """A trace of the call could not return the Ref."""

    def loss(weights, x):
        seen = jax.new_ref(jnp.float32(0))

        def f(x):
            def plain(dy):
                seen[...] = dy
                return 7 * dy * weights[0]

            rule = lambda dy, variables: (plain(dy), [5 * dy * x])  # noqa: E731
            return weights[0] * x, plain if protocol == "autodiff" else rule

        variables = weights[:1] if protocol == "declared" else OPTIONS[protocol]
        gradient = jax.grad(custom_gradient(f, variables=variables))(x)
        return gradient, seen[...]

    weights, x = [jnp.float32(3)] + [jnp.float32(2)] * 11, jnp.float32(0.5)
    assert_same(mode(loss)(weights, x), (jnp.float32(21), jnp.float32(1)))


@pytest.mark.parametrize("protocol", ["undeclared", "autodiff"])
@pytest.mark.parametrize("way", ["grad", "jit(grad)", "grad(jit)", "jacfwd"])
def test_a_deep_nest_over_many_weights(protocol, way):
    """Deeper than a function that cannot be copied may call itself."""

    def loss(weights, x):
        h = lambda x: x  # noqa: E731
        for i, w in enumerate(weights):
            h = layer(protocol, lambda x, h=h, i=i: h(x) * (weights[i] / weights[i]), w)
        return h(x)

    weights, x = [jnp.float32(1)] * 12, jnp.float32(0.5)
    _, dx = WAYS[way](loss)(weights, x)
    assert_same(dx, jnp.float32(7))


NUMBER = jnp.float32(1)
HELD = {  # by a rule; the last four are not copied
    "list": list,
    "dicts": lambda ws: [{"w": w} for w in ws],
    "finalizer": Finalized,
    "too much": lambda ws: (ws, [[NUMBER] for _ in range(12_000)]),
    "jit": lambda ws: jax.jit(lambda d: d * ws[0]),
    "weak": lambda ws: (held := Finalized(ws), weakref.ref(held)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ["grad", "jit(grad)", "grad(jit)", "jacfwd"])
@pytest.mark.parametrize("protocol", ["undeclared", "declared"])
@pytest.mark.parametrize("kind", HELD)
def test_a_rule_of_a_large_closure_holds_all_weights(kind, protocol, way):
    """None outlives its trace, and the rule runs only where JAX differentiates."""

    tracers = []

    def loss(weights, x):
        tracers.extend(weakref.ref(w) for w in weights if isinstance(w, jax.core.Tracer))
        for w in weights:

            @custom_gradient(variables=[w] if protocol == "declared" else None)
            def f(x, w=w):
                held = HELD[kind](weights)

                def rule(dy, variables):
                    RUNS["rule"] += 1
                    assert held is not None
                    return 7 * dy * w, [5 * dy * x]

                return w * x, rule

            x = f(x)
        return x

    weights, x = [jnp.float32(1)] * 9 + [jnp.float32(2)], jnp.float32(0.5)
    with jax.checking_leaks():
        found = WAYS[way](loss)(weights, x)
    gc.collect()  # that check does not look into lists that are global
    assert tracers and not any(tracer() for tracer in tracers)
    expected = [jnp.float32(5 * 0.5 * 7 ** (9 - i) * (2 if i < 9 else 1)) for i in range(10)]
    assert_same(found, (expected, jnp.float32(2 * 7**10)))
    RUNS.clear()
    assert_same(jax.jit(loss)(weights, x), x * 2)
    assert RUNS["rule"] == 0


@pytest.mark.parametrize(
    ("sees_values", "mode"),
    [(True, lambda f: f), (False, lambda f: f), (False, jax.jit)],
    ids=["values", "eager", "jit"],
)
def test_a_rule_of_a_call_that_is_traced_holds_a_large_closure(sees_values, mode):
    """Of the weights that it reaches, it keeps those that it uses, or all if it needs values."""

    def loss(weights, x):
        first = jax.jit(lambda d: d * weights[0])  # not copied

        @custom_gradient(variables=[weights[0]])
        def f(x):
            def rule(dy, variables):
                scale = float(weights[1]) if sees_values else weights[1]
                return 7 * dy * scale, [5 * dy * x]

            return first(x), rule

        return f(x)

    weights, x = [jnp.float32(i) for i in range(1, 13)], jnp.float32(0.5)
    expected = [jnp.float32(2.5), *[jnp.float32(0)] * 11], jnp.float32(14)
    assert_same(mode(jax.grad(loss, (0, 1)))(weights, x), expected)
