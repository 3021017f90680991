"""What a function costs: how often and when `f` and its rule run, and what a large closure adds."""

import collections
import gc
import itertools
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample

from tfgrad_jax import custom_gradient

W, X = ARGS = jnp.float32(1.5), jnp.float32(0.5)
RUNS: collections.Counter[str] = collections.Counter()


def counted(w, read, **options):
    """Return a function with the value `read() x`, declared `7 w` by x and 5 by w."""

    def f(x):
        RUNS["f"] += 1

        def rule(dy, variables=()):
            RUNS["rule"] += 1
            dx = 7 * dy * read()
            return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

        return read() * x, rule

    return custom_gradient(f, **options)


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def __call__(self, x):
        return counted(self.w, lambda: self.w).__wrapped__(x)


CALLERS = {
    "closure": lambda w, x: counted(w, lambda: w)(x),
    "declared": lambda w, x: counted(w, lambda: w, variables=[w])(x),
    "autodiff": lambda w, x: counted(w, lambda: w, variables="autodiff")(x),
    "method": lambda w, x: Layer(w)(x),
    "constants": lambda w, x: counted(1.5, lambda: 1.5)(x),
}


def pulled(times):
    def run(loss):
        _, pull = jax.vjp(loss, *ARGS)
        for _ in range(times):
            pull(jnp.float32(1))

    return run


def mapped(loss):
    return jax.vmap(jax.grad(loss, (0, 1)))(W[None], X[None])


def scanned(loss):
    return lax.scan(lambda c, a: (c, jax.grad(loss, (0, 1))(*a)), 0, (W[None], X[None]))


# What runs, and how often `f` and its rule do: eagerly, once for each pull-back.
WORLDS = {
    "value": (lambda loss: loss(*ARGS), 1, 0),
    "grad": (lambda loss: jax.grad(loss, (0, 1))(*ARGS), 1, 1),
    "never pulled back": (pulled(0), 1, 0),
    "pulled back twice": (pulled(2), 1, 2),
    "jit of the value": (lambda loss: jax.jit(loss)(*ARGS), 1, 0),
    "jit(grad)": (lambda loss: jax.jit(jax.grad(loss, (0, 1)))(*ARGS), 1, 1),
    "grad(jit)": (lambda loss: jax.grad(jax.jit(loss), (0, 1))(*ARGS), 1, 1),
    "vmap(grad)": (mapped, 1, 1),
    "scan(grad)": (scanned, 1, 1),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("caller", CALLERS)
def test_how_often_f_and_its_rule_run(caller, world):
    run, f, rule = WORLDS[world]
    RUNS.clear()
    run(lambda *args: CALLERS[caller](*args))  # a new function, which JAX has not compiled
    traced = "jit" in world or world in ("vmap(grad)", "scan(grad)")
    # A rule of an object is recorded once where JAX traces; a value may be recorded before.
    rules = {1, rule} if caller == "method" and traced else {rule}
    runs = {f, f + 1} if world == "grad(jit)" else {f}
    assert RUNS["f"] in runs and RUNS["rule"] in rules, dict(RUNS)


@pytest.mark.parametrize("caller", CALLERS)
def test_eagerly_a_rule_runs_in_the_backward_pass(caller):
    RUNS.clear()
    y, pull = jax.vjp(CALLERS[caller], *ARGS)
    assert_same(y, W * X)
    assert RUNS["rule"] == 0
    pull(jnp.float32(1))
    assert RUNS["rule"] == 1


# --- growth: counted in calls of functions, of Python and of C ------------------------------------


def tower(declared, depth):
    def loss(w, x):
        h = lambda x: x  # noqa: E731
        for _ in range(depth):
            below = h

            def f(x, below=below):
                rule = lambda dy, variables: (7 * dy * w, [5 * dy for _ in variables])  # noqa: E731
                return w * below(x), rule

            h = custom_gradient(lambda x, f=f: f(x), variables=[w] if declared else None)
        return h(x)

    return loss


def calls(run):
    """Count the calls while `run` runs; whatever is cached is there from a run before."""
    counted = 0

    def profile(frame, event, arg):
        nonlocal counted
        counted += event in ("call", "c_call")

    run()
    gc.collect()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


MODES = {"eager": lambda f: f, "jit(grad)": lambda f: lambda *args: jax.jit(f)(*args)}


@pytest.mark.parametrize("mode", ["eager", "jit(grad)", "grad(jit)"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_level_of_a_deep_nest_costs_what_one_of_a_flat_one_does(declared, mode):
    def gradient(depth):
        loss = tower(declared, depth)
        if mode == "grad(jit)":
            return jax.grad(jax.jit(loss), (0, 1))(*ARGS)
        return MODES[mode](jax.grad(loss, (0, 1)))(*ARGS)

    assert_same(gradient(40), (jnp.float32(5), 7 * W))
    assert calls(lambda: gradient(40)) <= 4.6 * calls(lambda: gradient(10))


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
        return mode(lambda *a: jax.grad(loss, (0, 1))(*a))([jnp.float32(2)] * size, X)

    assert_same(run(40), ([jnp.float32(5)] * 40, jnp.float32(7 * 80)))
    assert calls(lambda: run(160)) <= 9 * calls(lambda: run(20))


def model_of(kind, depth):
    """Return the gradient of layers that reach all weights: by a closure, or by an object."""

    def loss(weights, x):
        model = types.SimpleNamespace(weights=weights)
        for i in range(depth):
            read = (lambda i=i: weights[i]) if kind == "closure" else lambda i=i: model.weights[i]

            def f(x, read=read):
                rule = lambda dy, variables: (dy * read(), [5 * dy * x for _ in variables])  # noqa: E731
                return read() * x, rule

            options = {"variables": [read()]} if kind == "declared" else {}
            x = custom_gradient(lambda x, f=f: f(x), **options)(x)
        return x

    return lambda: jax.grad(loss)([jnp.float32(1)] * depth, X)


@pytest.mark.sampled(3)
@eager_and_jit
@pytest.mark.parametrize("kind", ["closure", "object", "declared"])
def test_a_layer_of_a_large_model_costs_what_one_of_a_small_one_does(kind, mode):
    few, many = (model_of(kind, depth) for depth in (10, 40))
    assert_same(many()[0], 5 * X)
    count = lambda run: calls(lambda: mode(lambda *_: run())(*ARGS))  # noqa: E731
    assert count(many) <= 2.5 * 4 * count(few)


Entry = collections.namedtuple("Entry", "name number")
MANY = {  # of which none holds a weight
    "numbers": lambda size: list(range(10 * size)),
    "words": lambda size: {str(i): i for i in range(10 * size)},
    "lists": lambda size: [[i] for i in range(size)],
    "named tuples": lambda size: {i: Entry(str(i), i) for i in range(size)},
    "objects": lambda size: [types.SimpleNamespace(i=i, tags=[i]) for i in range(size)],
    "an object array": lambda size: np.array([{"id": i} for i in range(size)], object),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("by", ["f", "rule"])
@pytest.mark.parametrize("kind", MANY)
def test_values_are_seen_beside_much_else(kind, by):
    """And a call beside 150,000 numbers makes about as many calls as beside ten."""

    def gradient(many):
        def loss(w, x):
            held = types.SimpleNamespace(many=many, w=w)

            @custom_gradient
            def f(x):
                y = held.w * x if x > 0 and (by != "f" or held.many is many) else -x

                def rule(dy, variables):
                    assert by != "rule" or held.many is many
                    return (7 if dy > 0 else 11) * dy * w, [5 * dy * x for _ in variables]

                return y, rule

            return f(x)

        return jax.grad(loss, (0, 1))(*ARGS)

    small, large = MANY[kind](1), MANY[kind](15_000)
    assert_same(gradient(large), (5 * X, 7 * W))
    if kind in ("numbers", "words"):
        assert calls(lambda: gradient(large)) <= calls(lambda: gradient(small)) + 20_000


LARGE = {  # how the weight is held, and how to get at it
    "list": (lambda w: [*range(100_000), [w]], lambda held: held[-1][0]),
    "key of a dict": (
        lambda w: {**dict.fromkeys(range(20_000)), (lambda: w): None},
        lambda held: [*held][-1](),
    ),
    "object array": (
        lambda w: np.array([*range(20_000), lambda: w], object),
        lambda held: held[-1](),
    ),
    "one of many records": (
        lambda w: [*([i] for i in range(2_000)), {"get": lambda: w}],
        lambda held: held[-1]["get"](),
    ),
}


@eager_and_jit
@pytest.mark.parametrize("kind", LARGE)
def test_a_weight_at_the_end_of_a_large_container_is_found(kind, mode):
    def loss(w, x):
        hold, get = LARGE[kind]
        held = hold(w)
        return counted(w, lambda: get(held))(x)

    assert_same(mode(jax.grad(loss, (0, 1)))(*ARGS), (5 * X, 7 * W))


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("world", ["grad", "jit(grad)", "grad(jit)"])
@pytest.mark.parametrize("caller", ["closure", "declared"])
@pytest.mark.parametrize("hold", ["instance", "class"])
def test_a_class_that_is_made_in_a_function_is_freed_with_the_call(hold, caller, world):
    gone = []

    def loss(w, x):
        class Local:
            weight = w

            def __init__(self):
                self.w = w

        gone.append(weakref.ref(Local))
        held = Local() if hold == "instance" else Local
        options = {"variables": [w]} if caller == "declared" else {}
        return counted(w, lambda: held.weight, **options)(x)

    WORLDS[world][0](loss)
    jax.clear_caches()
    gc.collect()
    assert {cls() for cls in gone} == {None}


@pytest.mark.parametrize("kept", ["pullback", "jitted function"])
def test_a_variable_that_f_only_reaches_is_not_kept_alive(kept):
    batch = jnp.ones(1000)
    alive = weakref.ref(batch)
    held = types.SimpleNamespace(log=lambda: batch)
    f = custom_gradient(lambda x: (x * 2.0 if held else 0 * x, lambda dy: 7 * dy))
    if kept == "pullback":
        _, gradient = jax.vjp(f, X)
    else:
        gradient = jax.jit(jax.grad(f))
        gradient(X)
    batch = None
    gc.collect()
    assert alive() is None
    assert_same(jax.tree.leaves(gradient(X)), [7 * X if kept == "pullback" else jnp.float32(7)])


SIZES = itertools.product(["undeclared", "declared"], ["list", "dicts", "jit"], WORLDS)


@pytest.mark.parametrize(("protocol", "kind", "world"), sample(SIZES, 6))
def test_a_rule_of_a_large_closure_holds_all_weights(protocol, kind, world):
    hold = {
        "list": list,
        "dicts": lambda ws: [{"w": w} for w in ws],
        "jit": lambda ws: jax.jit(lambda d: d * ws[0]),
    }[kind]

    def loss(w, x):
        weights = [w] + [w * 1 for _ in range(11)]
        held = hold(weights)

        @custom_gradient(variables=[w] if protocol == "declared" else None)
        def f(x):
            def rule(dy, variables=()):
                assert held is not None
                dx = 7 * dy * w
                return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

            return w * x, rule

        return f(x)

    WORLDS[world][0](loss)
    assert_same(jax.grad(loss, (0, 1))(*ARGS), (5 * X, 7 * W))
