"""Functions and rules with state: iterators, counters, lists used up, variables, singletons.

JAX may have a function run on a copy, or look at it before it runs. No program may see that: each
of these has the same gradients in every world, and leaves its state as a plain call would.
"""

import collections
import concurrent.futures
import functools
import gc
import itertools
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import UnexpectedTracerError
from support.helpers import assert_same
from support.ways import FORWARD, REVERSE

from tfgrad_jax import custom_gradient

WORLDS = (
    "grad",
    "jit(grad)",
    "grad(jit)",
    "vmap(grad)",
    "checkpoint(grad)",
    "grad(checkpoint)",
    "jvp",
    "jacfwd(jit)",
    "jacfwd(checkpoint)",
)
WAYS = {**REVERSE, **FORWARD}
W, X = jnp.float32(3), jnp.float32(2)


def weights(count):
    """Make a model's weights: from nine on, much is captured."""
    return [jnp.float32(k + 1) for k in range(count)]


# --- gradients: a rule is wrong by 7 for its input, and by 5 for the weight ----------------------


def an_iterator_in_f(w, x):
    scales = iter([1.0, 2.0])

    @custom_gradient
    def f(x):
        k = next(scales)
        return k * w * x, lambda dy, variables: (7 * k * dy * w, [5 * k * dy * x])

    return f(x) + 10 * f(x)


def an_index_that_the_rule_reads(ws, x):
    i = -1

    @custom_gradient
    def f(x):
        nonlocal i
        i += 1
        return ws[i] * x, lambda dy, variables: (7 * dy * ws[i], [5 * dy * x])

    return f(x) + 10 * f(x)


def a_counter_that_the_rule_reads(x):
    n = 0

    @custom_gradient
    def f(x):
        nonlocal n
        n += 1
        return x * 1.0, lambda dy: 7 * dy * n

    return f(x) + 10 * f(x)


def a_residual_in_a_variable(x):
    h = None

    @custom_gradient
    def f(x):
        nonlocal h
        h = x * x
        return h * 1.0, lambda dy: 7 * dy * h

    return f(x) + f(10 * x)


def a_residual_in_a_variable_beside_a_weight(w, x):
    h = None

    @custom_gradient
    def f(x):
        nonlocal h
        h = w * x
        return h * 1.0, lambda dy, variables: (7 * dy * h, [5 * dy * x])

    return f(x)


def a_generator_that_rules_advance(x):
    def numbers():
        n, peek = 0, lambda: n
        while True:
            n += 1
            yield n + 0 * peek()

    it = numbers()
    f = custom_gradient(lambda x: (x * next(it), lambda dy: 7 * dy * next(it)))
    return f(x) + 100 * f(x)  # rules run in reverse: the second has 3, the first 4


def a_rule_that_pops_what_f_noted(ws, x):
    @custom_gradient
    def f(x):
        y, order, inputs = x, [], []
        for i, w in enumerate(ws):
            inputs.append(y)
            order.append(i)
            y = y * w

        def grad(dy, variables):
            gradients = [jnp.float32(0)] * len(ws)
            while order:
                i = order.pop()
                gradients[i] = 5 * dy * inputs[i]
                dy = dy * ws[i]
            return 7 * dy, gradients

        return y, grad

    return f(x)


def a_rule_that_counts_arrays(ws, x):
    held = {"weights": list(ws)}

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            arrays = sum(isinstance(w, jax.Array) for w in held["weights"])
            return 7 * dy * arrays, [5 * dy * x for _ in variables]

        return x * held["weights"][1], grad

    return f(x)


def a_variable_assigned_after_the_call(x):
    scale = 2.0
    y = custom_gradient(lambda x: (scale * x, lambda dy: 7 * dy * scale))(x)
    scale = 5.0
    return y * scale


def a_table_by_function_whose_variable_is_assigned_later(x):
    total = 0.0
    for scale in (1.0, 2.0):

        def act(x):
            return x * scale  # noqa: B023

        table = {act: 10.0, (act, "b"): 5.0, "c": {act: 2.0}}

        def f(x, *, act=act, table=table):
            rule = lambda dy: 7 * act(dy) * table[act] * table[act, "b"] * table["c"][act]  # noqa: E731
            return act(x), rule

        total = total + custom_gradient(f)(x)
    return total


def a_variable_assigned_after_a_call_that_is_traced(w, x):
    scaled = jax.jit(lambda x: w * x)  # not copied
    for k in (2.0, 3.0):

        @custom_gradient
        def f(x):
            return scaled(x), lambda dy, variables: (k * dy * w, [5 * dy * x])  # noqa: B023

        x = f(x)
    return x


def a_variable_first_assigned_after_the_call(w, x):
    @custom_gradient(variables=[w])
    def f(x):
        return w * x, lambda dy, variables: (7 * dy * w * factor, [5 * dy * x * factor])

    y = f(x)
    factor = 2.0
    return y


def a_variable_of_a_generator_that_waits(x):
    def layers():
        for k in (2.0, 3.0):

            def scale(x):
                return k * x  # noqa: B023

            yield custom_gradient(lambda x: (scale(x), lambda dy: 7 * scale(dy)))

    return functools.reduce(lambda x, layer: layer(x), layers(), x)


class Node:
    """It is equal by a name that stands in a dict, beside a weight."""

    def __init__(self, name, w):
        self.attributes = {"name": name, "w": w}

    def __hash__(self):
        return hash(self.attributes["name"])

    def __eq__(self, other):
        return self.attributes["name"] == other.attributes["name"]


def an_object_that_hashes_a_dict(kind):
    def h(w, x):
        graph = kind([Node("a", w)])

        @custom_gradient
        def f(x):
            (node,) = graph
            w = node.attributes["w"]
            return w * x if node in graph else x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        return f(x)

    return h


class Config:
    """A singleton."""

    it = None

    def __new__(cls):
        cls.it = cls.it or super().__new__(cls)
        return cls.it


def a_singleton(read):
    def h(w, x):
        config = Config()
        config.w = w

        def layer(config):
            def f(x):
                w = read(config)
                return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

            return custom_gradient(f)

        return layer(config)(x)

    return h


class Timed:
    """A callable object with the name and the signature of what it wraps."""

    def __init__(self, f):
        functools.update_wrapper(self, f)
        self.f = f

    def __call__(self, *args, **kwargs):
        return self.f(*args, **kwargs)


def a_decorated_object_in_another(w, x):
    def product(x, y):
        return x * y * w, lambda dy: (7 * dy * y * w, 11 * dy * x * w)

    inner = custom_gradient(Timed(product), variables="autodiff")

    def f(x):
        return inner(x, y=x), lambda dy: 7 * dy * inner(x, y=x)

    return custom_gradient(f, variables="autodiff")(x)


def walked(ws, x):
    """Return the gradients by the popped rule: 5 dy times the input of each, 7 for x."""
    every = functools.reduce(lambda a, b: a * b, ws)
    return [5 * x * every / w for w in ws], 7 * every


PROGRAMS = {
    # what is called, its arguments, the gradients
    "an iterator in f": (an_iterator_in_f, (W, X), (5 * 21 * X, 7 * 21 * W)),
    "a counter that the rule reads": (a_counter_that_the_rule_reads, (X,), (jnp.float32(147),)),
    "a residual in a variable": (a_residual_in_a_variable, (X,), (7 * 1001 * X**2,)),
    "a residual in a variable beside a weight": (
        a_residual_in_a_variable_beside_a_weight,
        (W, X),
        (5 * X, 7 * W * X),
    ),
    "a generator that rules advance": (
        a_generator_that_rules_advance,
        (X,),
        (jnp.float32(7 * (4 + 100 * 3)),),
    ),
    "a decorated object in another": (
        a_decorated_object_in_another,
        (W, X),
        (X**2, 7 * X**2 * W),
    ),
    "a variable assigned after the call": (
        a_variable_assigned_after_the_call,
        (X,),
        (jnp.float32(70),),
    ),
    "a table by function whose variable is assigned later": (
        a_table_by_function_whose_variable_is_assigned_later,
        (X,),
        (jnp.float32(7 * (1 + 2) * 100),),
    ),
    "a variable assigned after a call that is traced": (
        a_variable_assigned_after_a_call_that_is_traced,
        (W, X),
        (20 * W * X, 6 * W**2),
    ),
    "a variable first assigned after the call": (
        a_variable_first_assigned_after_the_call,
        (W, X),
        (10 * X, 14 * W),
    ),
    "a variable of a generator that waits": (
        a_variable_of_a_generator_that_waits,
        (X,),
        (jnp.float32(7 * 2 * 7 * 3),),
    ),
}
PROGRAMS |= {
    name: (h, (W, X), (5 * X, 7 * W))
    for name, h in {
        "a key that hashes a dict": an_object_that_hashes_a_dict(dict.fromkeys),
        "a member that hashes a dict": an_object_that_hashes_a_dict(set),
        "a frozen member that hashes a dict": an_object_that_hashes_a_dict(frozenset),
        "a singleton, compared": a_singleton(lambda c: c.w if c is Config() else 100 * c.w),
        "a singleton, asked for again": a_singleton(lambda c: c and Config().w),
    }.items()
}
for count in (5, 12):
    ws = weights(count)
    first_two = [5 * X, 50 * X, *[0 * X] * (count - 2)], 7 * (ws[0] + 10 * ws[1])
    second = [0 * X, 5 * X, *[0 * X] * (count - 2)]
    PROGRAMS |= {
        f"{name} of {count} weights": (h, (ws, X), expected)
        for name, h, expected in (
            ("an index that the rule reads", an_index_that_the_rule_reads, first_two),
            ("a list used up", a_rule_that_pops_what_f_noted, walked(ws, X)),
            ("arrays counted", a_rule_that_counts_arrays, (second, jnp.float32(7 * count))),
        )
    }
# These count the runs of `f`, which runs again where JAX differentiates what it has recorded, as
# the function of a `custom_vjp` does.
COUNT_RUNS = ("a counter", "a generator", "an index", "an iterator in f")
RECORDED = "grad(jit)", "grad(checkpoint)", "jacfwd(jit)", "jacfwd(checkpoint)"
# In forward mode a rule runs with its function, and not after all of them.
RUN_LATER = "a generator", "a variable first assigned"


def cases():
    for program, world in itertools.product(PROGRAMS, WORLDS):
        counts_again = program.startswith(COUNT_RUNS) and world in RECORDED
        if not (counts_again or (program.startswith(RUN_LATER) and world in FORWARD)):
            yield program, world


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("program", "world"), [*cases()])
def test_gradients_with_state(program, world):
    h, args, expected = PROGRAMS[program]
    assert_same(WAYS[world](h)(*args), expected)


# --- what a rule reads is what its function left --------------------------------------------------


class Named:
    """It holds a function in a subclass that decides what a copy is."""

    def __init__(self, f=None):
        self.f = f


class Finalized(Named):
    def __del__(self):
        pass


class Hashed(Named):
    def __hash__(self):
        return 1

    def __eq__(self, other):
        return self is other


class Made(Named):
    def __new__(cls, f=None):
        return super().__new__(cls)


class Slotted:
    __slots__ = ("f",)

    def __init__(self, f):
        self.f = f


REGISTERED = weakref.WeakSet()


def registered(f):
    held = Named(f)
    REGISTERED.add(held)
    return held


def local_class(f):
    class Local:
        call = staticmethod(f)

    return Local


# What holds the function that reads a variable, and how a rule gets at it.
HOLDERS = {
    "a list": (lambda f: [f], lambda h: h[0]),
    "a dict": (lambda f: {"f": f}, lambda h: h["f"]),
    "a key": (lambda f: {f: 1}, lambda h: next(iter(h))),
    "an object": (Named, lambda h: h.f),
    "an object with slots": (Slotted, lambda h: h.f),
    "a partial": (functools.partial, lambda h: h),
    "a partial of jit": (lambda f: functools.partial(jax.jit(f)), lambda h: h),
    "a deque": (lambda f: collections.deque([f]), lambda h: h[0]),
    "a set": (lambda f: {f}, lambda h: next(iter(h))),
    "a frozenset": (lambda f: frozenset([f]), lambda h: next(iter(h))),
    "a view": (lambda f: {"f": f}.values(), lambda h: next(iter(h))),
    "a proxy": (lambda f: types.MappingProxyType({"f": f}), lambda h: h["f"]),
    "an array of objects": (lambda f: np.array([f], object), lambda h: h[0]),
    "a finalized object": (Finalized, lambda h: h.f),
    "an object with a hash": (Hashed, lambda h: h.f),
    "an object with a __new__": (Made, lambda h: h.f),
    "an object that is known weakly": (registered, lambda h: h.f),
    "a class": (local_class, lambda h: h.call),
    "an iterator": (lambda f: iter([f, f]), lambda h: next(h)),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_rule_reads_the_variables_of_its_turn_or_says_why_not(holder, world):
    """A loop changes the variable `scale` before the rules run."""
    make, get = HOLDERS[holder]

    def loss(x):
        total = 0.0
        for scale in (2.0, 3.0):

            def helper(v):
                return v * scale  # noqa: B023

            held = make(helper)
            f = custom_gradient(lambda v, *, held, s: (v * s, lambda dy: 7 * get(held)(dy)))
            total = total + f(x, held=held, s=scale)
        return total

    try:
        got = WAYS[world](loss)(X)
    except ValueError as error:
        text = str(error)
        assert "'scale'" in text and "local variable" in text and "helper" in text
    else:
        assert_same(got, (jnp.float32(35),))


def popped(kept):
    while kept:
        yield kept.pop()


def emptied(held):
    kept, held.f = held.f, []
    return kept


# What `f` makes for its rule, and how the rule uses it up.
USED_UP = {
    "a list": (lambda k: [k], popped),
    "a set": (lambda k: {k}, popped),
    "a deque": (lambda k: collections.deque([k], maxlen=3), popped),
    "a dict": (lambda k: {"k": k}, lambda d: [d.popitem()[1]]),
    "a default dict": (lambda k: collections.defaultdict(list, k=[k]), lambda d: d.pop("k", [])),
    "an object": (lambda k: Named([k]), emptied),
    "a list of an object": (lambda k: Named([k]), lambda h: popped(h.f)),
    "a list in lists": (lambda k: [[[k]]], lambda h: popped(h[0][0])),
    "a variable": (lambda k: None, None),
}


def twice(h, stage):
    """Return gradients by one pull-back that runs twice, and then in forward mode."""
    h = stage(h)
    _, pull = jax.vjp(h, X)
    one = jnp.float32(1)
    return [*pull(one), *pull(one), jax.jacfwd(h)(X), jax.grad(h)(X)]


@pytest.mark.parametrize("made", USED_UP)
@pytest.mark.parametrize("protocol", ["inputs", "declared", "undeclared"])
@pytest.mark.parametrize(
    "stage", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"]
)
def test_a_rule_may_use_up_what_its_function_made(stage, protocol, made):
    make, use_up = USED_UP[made]

    def loss(w):
        @functools.partial(custom_gradient, variables=[w] if protocol == "declared" else None)
        def f(x):
            kept, left = make(3.0), 3.0

            def total():
                nonlocal left
                if use_up is None:
                    found, left = left, 0.0
                    return found
                return sum(use_up(kept))

            if protocol == "inputs":
                return 2 * x, lambda dy: 7 * dy * total()
            return w * x, lambda dy, variables: (dy * w, [7 * dy * total()])

        return f(w) if protocol == "inputs" else f(X)

    assert_same(twice(loss, stage), [jnp.float32(21)] * 4)


# --- what is left behind -------------------------------------------------------------------------

STAGES = {"eager": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}
every_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)


@every_stage
def test_a_counter_that_the_rule_reaches_through_an_object_counts(stage):
    def counter():
        n = 0

        def count():
            nonlocal n
            n += 1
            return n

        return count

    held = types.SimpleNamespace(count=counter())
    f = custom_gradient(lambda x: (x * 1.0, lambda dy: 7 * dy if held.count() else None))
    assert_same(jax.grad(stage(lambda x: f(x) + 10 * f(x)))(X), jnp.float32(77))
    assert held.count() == 3


GLOBAL_LOG = []


def test_a_rule_may_log_to_a_global_list_that_its_function_took_into_a_variable():
    GLOBAL_LOG.clear()

    @custom_gradient
    def f(x):
        log = GLOBAL_LOG
        return x * 1.0, lambda dy: log.append(1) or 7 * dy

    _, pull = jax.vjp(f, X)
    assert_same([pull(jnp.float32(1)), pull(jnp.float32(1))], [(jnp.float32(7),)] * 2)
    assert len(GLOBAL_LOG) == 2


RULES = {}


@every_stage
def test_a_rule_from_a_global_table_keeps_the_variables_of_the_call(stage):
    scale = 1.0
    RULES["linear"] = lambda dy: 7 * dy * scale
    f = custom_gradient(lambda x: (x * 1.0, RULES["linear"]))
    _, pull = jax.vjp(stage(lambda x: f(x)), X)
    scale = 5.0
    assert_same(pull(jnp.float32(1)), (jnp.float32(7),))


@pytest.mark.parametrize("count", [3, 12])
def test_eagerly_f_leaves_values_for_the_user(count):
    kept = {}

    def loss(x, ws):
        @custom_gradient(variables=ws)
        def f(x):
            kept["h"] = h = x * ws[1]
            kept["logged"] = float(h)
            gradient = lambda dy, i: (5 if i == 1 else 0) * dy * x  # noqa: E731
            return h, lambda dy, variables: (
                7 * dy * variables[1],
                [gradient(dy, i) for i, _ in enumerate(variables)],
            )

        return f(x)

    gradients = [0 * X, 5 * X, *[0 * X] * (count - 2)]
    assert_same(jax.grad(loss, (0, 1))(X, weights(count)), (jnp.float32(14), gradients))
    assert kept["logged"] == 4.0
    assert_same(kept["h"] + 1, jnp.float32(5))


def test_f_runs_once_where_no_weight_is_differentiated():
    """What it leaves for the user can be used there, and an iterator moves on once."""
    kept, scales = {}, iter([2.0, 3.0])

    def loss(w, x):
        @custom_gradient(variables=[w])
        def f(x):
            k = next(scales)
            kept["h"] = k * w * x

            def rule(dy, variables=()):
                dx = 7 * k * dy * w
                return (dx, [5 * k * dy * x]) if len(variables) else dx

            return kept["h"], rule

        return f(x)

    def by_x(w):
        return jax.grad(lambda x: loss(w, x))(X), kept["h"] + 1

    assert_same(jax.vmap(by_x)(W[None]), (14 * W[None], 2 * W[None] * X + 1))
    assert_same(jax.grad(lambda w: by_x(w)[1])(W), 3 * X)


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


# --- threads -------------------------------------------------------------------------------------


REVERSAL = {
    "identity": lambda x: (x, lambda dy: -dy),
    "identity in a tuple": lambda x: ((x, x), lambda *dys: -dys[0]),
    "constant": lambda x: (jnp.float32(1), lambda dy: -dy),
}


@pytest.mark.parametrize("name", REVERSAL)
@pytest.mark.parametrize("call", ["by position", "by name", "primal", "closed over"])
def test_a_thread_does_not_lose_the_rule_of_what_another_one_differentiates(call, name):
    f = REVERSAL[name]
    h = custom_gradient(f, primal=(lambda x: f(x)[0]) if call == "primal" else None)
    threads = concurrent.futures.ThreadPoolExecutor(1)

    def loss(x):
        if call == "closed over":
            done = threads.submit(custom_gradient(lambda _: f(x)), 1.0)
        else:
            done = threads.submit(h, x=x) if call == "by name" else threads.submit(h, x)
        return jnp.sum(jax.tree.leaves(done.result())[0])

    x = jnp.float32(2)
    with threads:
        if not (call == "closed over" and name == "constant"):  # then nothing is traced
            for way in (jax.grad(loss), jax.jit(loss), lambda x: jax.jvp(loss, (x,), (x,))):
                with pytest.raises(UnexpectedTracerError, match="not in a thread pool"):
                    way(x)
        # A thread differentiates by itself, or computes values.
        own = threads.submit(jax.grad(lambda x: jax.tree.leaves(h(x))[0]), x)
        assert_same(own.result(), jnp.float32(-1))
        assert_same(threads.submit(h, x).result(), f(x)[0])


def test_threads_that_pull_back_leave_a_variable_alone():
    scale, pulls = 0.0, []
    f = custom_gradient(lambda x: (x * 1.0, lambda dy: 7 * dy * scale))
    for k in range(100):
        scale = k
        pulls.append(jax.vjp(f, X)[1])
    scale = 1000
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pull: float(pull(jnp.float32(1))[0]), pulls))
    assert got == [7.0 * k for k in range(100)]
    assert scale == 1000


def test_another_thread_sees_a_variable_as_it_is_while_a_rule_runs():
    step, seen = 0, []
    runs, may_end = threading.Event(), threading.Event()

    def rule(dy):
        before = step
        runs.set()
        assert may_end.wait(60)
        return 7 * dy * (1 + before)

    f = custom_gradient(lambda x: (x * 1.0, lambda dy: rule(dy)))
    _, pull = jax.vjp(f, X)
    step = 5
    thread = threading.Thread(target=lambda: seen.append(pull(jnp.float32(1))))
    thread.start()
    assert runs.wait(60)
    assert step == 5
    step = 6
    may_end.set()
    thread.join()
    assert step == 6
    assert_same(seen, [(jnp.float32(7),)])
