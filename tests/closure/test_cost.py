"""What a function costs: how often and when `f` and its rule run, and what a large closure adds."""

import collections
import concurrent.futures
import gc
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, product
from support.ways import gradient

from tfgrad_jax import custom_gradient

ARGS = W, X = jnp.float32(1.5), jnp.float32(0.5)
RUNS: collections.Counter[str] = collections.Counter()


def counted(get, **options):
    note = lambda name: lambda *_: RUNS.update([name]) or 1  # noqa: E731
    return product(get, note("f"), note("rule"), **options)


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def __call__(self, x):
        return counted(lambda: self.w).__wrapped__(x)


CALLERS = {
    "closure": lambda w, x: counted(w)(x),
    "declared": lambda w, x: counted(w, variables=[w])(x),
    "autodiff": lambda w, x: counted(w, variables="autodiff")(x),
    "method": lambda w, x: Layer(w)(x),
    "constants": lambda w, x: counted(jnp.float32(1.5))(x),
}


def pulled(times):
    def run(loss):
        _, pull = jax.vjp(loss, *ARGS)
        assert RUNS["rule"] == 0  # it runs in the backward pass
        for _ in range(times):
            pull(jnp.float32(1))

    return run


WORLDS = {  # what runs, and how often `f` and its rule do
    "value": (lambda loss: loss(*ARGS), 1, 0),
    "grad": (lambda loss: gradient(loss)(*ARGS), 1, 1),
    "never pulled back": (pulled(0), 1, 0),
    "pulled back twice": (pulled(2), 1, 2),
    "jit of the value": (lambda loss: jax.jit(loss)(*ARGS), 1, 0),
    "jit(grad)": (lambda loss: jax.jit(gradient(loss))(*ARGS), 1, 1),
    "grad(jit)": (lambda loss: gradient(jax.jit(loss))(*ARGS), 1, 1),
    "vmap(grad)": (lambda loss: jax.vmap(gradient(loss))(W[None], X[None]), 1, 1),
    "scan(grad)": (lambda loss: lax.map(lambda a: gradient(loss)(*a), (W[None], X[None])), 1, 1),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("caller", CALLERS)
def test_how_often_f_and_its_rule_run(caller, world):
    run, f, rule = WORLDS[world]
    RUNS.clear()
    run(lambda *args: CALLERS[caller](*args))  # a new function, which JAX has not compiled
    traced = any(word in world for word in ("jit", "vmap", "scan"))
    # A rule of an object is recorded once where JAX traces; a value may be recorded before.
    rules = {1, rule} if caller == "method" and traced else {rule}
    runs = {f, f + 1} if world == "grad(jit)" else {f}
    assert RUNS["f"] in runs and RUNS["rule"] in rules, dict(RUNS)


# --- growth: counted in calls of functions, of Python and of C ------------------------------------


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


def tower(declared, depth):
    def loss(w, x):
        h = lambda x: x  # noqa: E731
        for _ in range(depth):
            rule = lambda dy, variables: (7 * dy * w, [5 * dy for _ in variables])  # noqa: E731
            f = lambda x, below=h, rule=rule: (w * below(x), rule)  # noqa: E731
            h = custom_gradient(lambda x, f=f: f(x), variables=[w] if declared else None)
        return h(x)

    return loss


MODES = {
    "eager": gradient,
    "jit(grad)": lambda f: lambda *args: jax.jit(gradient(f))(*args),
    "grad(jit)": lambda f: lambda *args: gradient(jax.jit(f))(*args),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("declared", [False, True])
def test_a_level_of_a_deep_nest_costs_what_one_of_a_flat_one_does(declared, mode):
    run = lambda depth: MODES[mode](tower(declared, depth))(*ARGS)  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(1) as other:  # a program's stack
        assert_same(other.submit(run, 40).result(), (jnp.float32(5), 7 * W))
    assert calls(lambda: run(32)) <= 6 * calls(lambda: run(8))


def in_one_call(weights, x, declares=False):
    return product(lambda: sum(weights), variables=weights if declares else None)(x)


def in_layers(weights, x, kind):
    """Through layers that reach all weights: by a closure, or by an object."""
    model = types.SimpleNamespace(weights=weights)
    for i in range(len(weights)):
        x = product(lambda i=i: weights[i] if kind == "closure" else model.weights[i])(x) / x
    return x


GROWING = {
    "weights": (in_one_call, 1.2),
    "declared weights": (lambda weights, x: in_one_call(weights, x, declares=True), 1.2),
    "layers with closures": (lambda weights, x: in_layers(weights, x, "closure"), 2.5),
    "layers with an object": (lambda weights, x: in_layers(weights, x, "object"), 2.5),
}


@pytest.mark.parametrize("mode", ["eager", "jit(grad)"])
@pytest.mark.parametrize("kind", GROWING)
def test_each_of_many_weights_costs_what_one_of_few_does(kind, mode):
    loss, factor = GROWING[kind]

    def count(size):
        args = [jnp.float32(2)] * size, X
        return calls(lambda: MODES[mode](lambda *a: loss(*a))(*args)) / size

    assert count(40) <= factor * count(10)


MANY = {  # of which none holds a weight
    "numbers": lambda size: list(range(10 * size)),
    "words": lambda size: {str(i): i for i in range(10 * size)},
    "lists": lambda size: [[i] for i in range(size)],
    "objects": lambda size: [types.SimpleNamespace(i=i, tags=[i]) for i in range(size)],
    "an object array": lambda size: np.array([{"id": i} for i in range(size)], object),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("by", ["f", "rule"])
@pytest.mark.parametrize("place", ["beside", "at the end"])
@pytest.mark.parametrize("mode", ["eager", "jit(grad)"])
@pytest.mark.parametrize("kind", MANY)
def test_a_weight_and_its_value_are_seen_beside_much_else(kind, mode, place, by):
    """And a call beside 150,000 numbers makes about as many calls as beside ten."""
    see = lambda *values: 1 if mode != "eager" or all(v > 0 for v in values) else 9  # noqa: E731

    def run(many):
        def loss(w, x):
            held = [many, w] if place == "beside" else [*many, w]
            return product(lambda: held[-1], **{f"in_{by}": see})(x)

        return MODES[mode](loss)(*ARGS)

    small, large = MANY[kind](1), MANY[kind](15_000)
    assert_same(run(large), (5 * X, 7 * W))
    if kind in ("numbers", "words") and place == "beside":
        assert calls(lambda: run(large)) <= calls(lambda: run(small)) + 20_000


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_class_that_is_made_in_a_function_is_freed_with_the_call(mode):
    gone = []

    def loss(w, x):
        held = type("Local", (), {"weight": w})
        gone.append(weakref.ref(held))
        return product(lambda: held().weight)(x)

    assert_same(MODES[mode](loss)(*ARGS), (5 * X, 7 * W))
    jax.clear_caches()
    gc.collect()
    assert {cls() for cls in gone} == {None}
