"""What `f` and its rule assign is kept as Python keeps it: on objects, in containers, in variables.

Each program has right gradients, wrong by 7 for the input and by 5 for the weight, and leaves what
as many plain calls as `f` has had runs would leave.
"""

import collections
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import FORWARD, REVERSE

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad

W, X = jnp.float32(2), jnp.float32(3)
FIRST = jax.value_and_grad
WORLDS = {
    "value and grad": FIRST,
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "jit(grad)": lambda f: jax.jit(FIRST(f)),
    "grad(jit)": lambda f: FIRST(jax.jit(f)),
    "grad(checkpoint)": lambda f: FIRST(jax.checkpoint(f)),
    "grad(vmap)": lambda f: FIRST(lambda w, x: jax.vmap(f, (0, None))(w[None], x)[0]),
    "vmap(grad)": lambda f: lambda w, x: jax.vmap(FIRST(f), (0, None))(w[None], x),
    "scan(grad)": lambda f: lambda w, x: lax.map(lambda w: FIRST(f)(w, x), w[None]),
    "grad(scan)": lambda f: FIRST(lambda w, x: lax.map(lambda w: f(w, x), w[None])[0]),
    "grad(cond)": lambda f: FIRST(lambda w, x: lax.cond(x > 0, f, f, w, x)),
    "jit": jax.jit,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (0, None))(w[None], x),
}


class Steps:
    """Counts that are read through properties and a descriptor."""

    steps = property(lambda self: getattr(self, "_steps", 0))

    @functools.cached_property
    def drawn(self):
        return 0

    @property
    def lazy(self):
        if not hasattr(self, "_lazy"):
            self._lazy = 0
        return self._lazy

    @lazy.setter
    def lazy(self, value):
        self._lazy = value

    @functools.cached_property
    def log(self):
        return []

    @property
    def reads(self):
        self._reads = getattr(self, "_reads", 0) + 1
        return self._reads


class Part:
    calls = 0

    def __init__(self, w):
        self.w = w


class Layer(Steps):
    __slots__ = ("slot",)

    def __init__(self, w):
        self.w, self.n, self.old, self.slot = w, 0, "old", 1
        self.items, self.table, self.members = [w, 1], {"w": w, "n": 0}, {"a"}
        self.queue, self.part = collections.deque([w, 0], maxlen=5), Part(w)
        self.ordered = collections.OrderedDict(a=1, w=w, b=2)
        self.part.parent, self.space, self.note = self, types.SimpleNamespace(w=w), lambda: w


def attribute(name, value):
    return lambda o: setattr(o, name, value(o))


ASSIGNED = {
    "an integer": attribute("n", lambda o: o.n + 1),
    "a string": attribute("old", lambda o: o.old + "!"),
    "an array": attribute("n", lambda o: o.n + np.ones(2)),
    "a new attribute": attribute("new", lambda o: getattr(o, "new", 0) + 1),
    "no attribute": lambda o: o.__dict__.pop("old", None),
    "a slot": attribute("slot", lambda o: o.slot + 1),
    "an appended item": lambda o: o.items.append(len(o.items)),
    "another item": lambda o: o.items.__setitem__(1, o.items[1] + 1),
    "items in another order": lambda o: o.items.reverse(),
    "a key": lambda o: o.table.update(n=o.table["n"] + 1),
    "a new key": lambda o: o.table.setdefault("m", []).append(1),
    "a member": lambda o: o.members.add(len(o.members)),
    "an item of a deque": lambda o: o.queue.append(len(o.queue)),
    "the order of keys": lambda o: o.ordered.move_to_end("a"),
    "a part": attribute("part", lambda o: (setattr(o.part, "n", 1), o.part)[1]),
    "a parent": lambda o: setattr(o.part.parent, "n", o.n + 1),
    "a namespace": lambda o: setattr(o.space, "n", getattr(o.space, "n", 0) + 1),
    "a function": lambda o: setattr(o.note, "n", getattr(o.note, "n", 0) + 1),
    "what a property shows": attribute("_steps", lambda o: o.steps + 1),
    "what a setter assigns": attribute("lazy", lambda o: o.lazy + 1),
    "what a property counts": lambda o: o.reads,
    "a cached property": attribute("drawn", lambda o: o.drawn + 1),
    "a list that a cached property makes": lambda o: o.log.append(1),
    "a table of attributes": lambda o: vars(o).update(drawn=o.drawn + 1),
}


def plain(value, w):
    """Return what can be compared: the weight by its name, no addresses."""
    if value is w or isinstance(value, jax.core.Tracer):
        return "w"
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value).__name__, *(plain(v, w) for v in value)]
    if isinstance(value, dict):
        return [(k, plain(v, w)) for k, v in value.items()]
    return type(value).__name__ if isinstance(value, (Part, Layer)) else str(value)


def left(o, w):
    state = [plain({**vars(o), "slot": o.slot, "members": sorted(map(str, o.members))}, w)]
    state += [plain(vars(part), w) for part in (o.part, o.space, o.note)]
    return str([[e for e in table if e[0] not in ("space", "note")] for table in state])


def nothing(o):
    pass


def loss_of(in_f=nothing, in_rule=nothing, variables="declared", make=Layer, made=None):
    """Return `w x`, whose declared gradients are 5 x by `w`, and 7 w by `x`."""
    made = [] if made is None else made

    def loss(w, x):
        layer, runs = make(w), collections.Counter()
        made.append((layer, w, runs))

        def f(x):
            runs["f"] += 1
            in_f(layer)

            def grad(dy, variables=()):
                runs["rule"] += 1
                in_rule(layer)
                dx = 7 * dy * w
                return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

            return x * w, grad

        return custom_gradient(f, variables=[w] if variables == "declared" else None)(x)

    return loss


def check_kept(world, kind, variables, where):
    note, made = ASSIGNED[kind], []
    loss = loss_of(**{f"in_{where}": note}, variables=variables, made=made)
    assert_same(WORLDS[world](loss)(W, X), WORLDS[world](loss_of())(W, X))
    for layer, w, runs in made:
        expected = Layer(w)
        for _ in range(runs[where]):
            note(expected)
        assert left(layer, w) == left(expected, w)
    assert where == "rule" or sum(runs["f"] for *_, runs in made) >= 1


EVERY = list(itertools.product(WORLDS, ASSIGNED, ["declared", "undeclared"]))
CORE = [("value and grad", kind, "undeclared") for kind in ASSIGNED]
CORE += [(world, "an integer", "undeclared") for world in WORLDS]


@pytest.mark.parametrize(("world", "kind", "variables"), sample(EVERY, 15, dict.fromkeys(CORE)))
def test_what_f_assigns_is_kept(world, kind, variables):
    check_kept(world, kind, variables, "f")


@pytest.mark.parametrize(("world", "kind", "variables"), sample(EVERY, 15, dict.fromkeys(CORE)))
def test_what_a_rule_assigns_is_kept(world, kind, variables):
    check_kept(world, kind, variables, "rule")


@pytest.mark.parametrize("world", WORLDS)
def test_what_f_computes_from_a_weight_may_be_left_on_self(world):
    """A log that nobody reads: the next call does not mind, and it holds no weight of this one."""
    log = types.SimpleNamespace(last=None, every=[])

    def note(o):
        log.last = o.w * 2
        log.every.append(jnp.exp(o.w))

    for _ in range(2):
        got = WORLDS[world](loss_of(note, note, "undeclared"))(W, X)
        assert_same(got, WORLDS[world](loss_of())(W, X))


@eager_and_jit
@pytest.mark.parametrize("assigned", ["self.w", "a variable"])
def test_a_rule_reads_what_f_has_left_in_the_place_of_the_weight(assigned, mode):
    def loss(w, x):
        held = Part(w)

        @custom_gradient(variables=w)
        def f(x):
            nonlocal w
            y = w * x
            if assigned == "self.w":
                held.w = 3 * held.w
            else:
                w = 3 * w

            def rule(dy, variables):
                return 7 * dy * (held.w if assigned == "self.w" else w), 5 * dy * x

            return y, rule

        return f(x)

    assert_same(mode(jax.grad(loss, (0, 1)))(W, X), (5 * X, 21 * W))


# --- libraries ------------------------------------------------------------------------------------

ONES = jnp.ones(2)


def equinox_module(w):
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        w: jax.Array
        norm: eqx.nn.LayerNorm

    return Net(w, eqx.nn.LayerNorm(2))


def nnx_module(w):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self):
            self.w, self.count = nnx.Param(w), nnx.Variable(jnp.int32(0))
            self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))

    return Net()


def linen_module(w):
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.param("w", nn.initializers.ones, ()) * x

    return Net().bind({"params": {"w": w}})


MODULES = {
    "equinox": (equinox_module, lambda o: o.norm(o.w * ONES)),
    "nnx": (nnx_module, lambda o: o.norm(o.w[...] * ONES)),
    "linen": (linen_module, lambda o: o(ONES)),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("library", MODULES)
def test_a_module_of_a_library_is_read(library, world):
    make, read = MODULES[library]
    loss = loss_of(read, read, make=make)
    assert_same(WORLDS[world](loss)(W, X), WORLDS[world](loss_of())(W, X))


def linen_state(notes_h):
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", lambda key: W)
            steps = self.variable("state", "steps", lambda: jnp.float32(-1))
            h = self.variable("state", "h", lambda: jnp.float32(0))

            @custom_gradient(variables=w)
            def f(x):
                steps.value += 1
                h.value = w * x if notes_h else h.value
                return w * x, lambda dy, variables: (7 * dy * w, 5 * dy * x)

            return f(x)

    variables = Net().init(jax.random.key(0), X)

    def loss(w, x):
        given = {"params": {"w": w}, "state": variables["state"]}
        y, state = Net().apply(given, x, mutable=["state"])
        return y, (state["state"]["steps"], state["state"]["h"])

    return loss


def haiku_state(notes_h):
    hk = pytest.importorskip("haiku")

    def net(x):
        w = hk.get_parameter("w", (), init=lambda *_: W)

        @custom_gradient(variables=w)
        def f(x):
            hk.set_state("steps", hk.get_state("steps", (), init=jnp.ones) + 1)
            hk.set_state("h", w * x if notes_h else jnp.float32(0))
            return w * x, lambda dy, variables: (7 * dy * w, 5 * dy * x)

        return f(x)

    net = hk.transform_with_state(net)
    _, state = net.init(None, X)

    def loss(w, x):
        y, found = net.apply({"~": {"w": w}}, {"~": state["~"] | {"steps": 0.0}}, None, x)
        return y, (found["~"]["steps"], found["~"]["h"])

    return loss


@eager_and_jit
@pytest.mark.parametrize("state", [haiku_state, linen_state])
def test_state_that_f_gives_to_a_library_is_kept(state, mode):
    gradients, (steps, _) = mode(jax.grad(state(False), (0, 1), has_aux=True))(W, X)
    assert_same(gradients, (5 * X, 7 * W))
    assert_same(steps, jnp.float32(1))


@pytest.mark.parametrize("state", [haiku_state, linen_state])
def test_state_that_depends_on_a_weight_is_never_a_silent_constant(state):
    """Used in the loss, its gradient would be lost: 5 x + 2 w x**2 is right."""
    loss = lambda w, x: (lambda y, state: y + state[1] ** 2)(*state_of(w, x))  # noqa: E731
    state_of = state(True)
    with pytest.raises((TypeError, jax.errors.UnexpectedTracerError)) as caught:
        assert_same(jax.grad(loss)(W, X), 5 * X + 2 * W * X**2)
        raise TypeError("a number that is right is as good: `state.f`, return it")
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "state" in text and "return it" in text


# --- gradients that depend on state ---------------------------------------------------------------


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


def a_residual_in_a_variable(w, x):
    h = None

    @custom_gradient
    def f(x):
        nonlocal h
        h = w * x
        return h * 1.0, lambda dy, variables=(): (7 * dy * h, [5 * dy * x for _ in variables])

    return f(x) + f(10 * x)


def a_generator_that_rules_advance(x):
    def numbers():
        n = 0
        while True:
            n += 1
            yield n

    it = numbers()
    f = custom_gradient(lambda x: (x * next(it), lambda dy: 7 * dy * next(it)))
    return f(x) + 100 * f(x)  # rules run in reverse: the second has 3, the first 4


def a_list_of_residuals_used_up(ws, x):
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
                gradients[i] = 5 * dy * inputs.pop()
                dy = dy * ws[i]
            return 7 * dy, gradients

        return y, grad

    return f(x)


def a_variable_assigned_after_the_call(w, x):
    for k in (2.0, 3.0):

        @custom_gradient
        def f(x):
            rule = lambda dy, variables: (k * dy * w, [5 * dy * x for _ in variables])  # noqa: B023, E731
            return w * x, rule

        x = f(x)
    return x


class Masked:
    """A dropout layer that counts its calls."""

    def __init__(self, key):
        self.key, self.n = key, 0

    @custom_gradient
    def __call__(self, x):
        self.n += 1
        mask = jax.random.bernoulli(jax.random.fold_in(self.key, self.n), 0.5, x.shape)
        mask = mask.astype(x.dtype)
        return x * mask, lambda dy: 7 * dy * mask


def dropout_twice(x):
    drop = Masked(jax.random.key(0))
    return jnp.sum(drop(x) + drop(x))


def masks():
    keys = [jax.random.fold_in(jax.random.key(0), n) for n in (1, 2)]
    return sum(jax.random.bernoulli(key, 0.5, (8,)).astype(jnp.float32) for key in keys)


WS = [jnp.float32(k + 1) for k in range(5)]
EVERY_W = functools.reduce(lambda a, b: a * b, WS)
PROGRAMS = {  # what is called, its arguments, the gradients
    "an iterator in f": (an_iterator_in_f, (W, X), (5 * 21 * X, 7 * 21 * W)),
    "an index that the rule reads": (
        an_index_that_the_rule_reads,
        (WS, X),
        ([5 * X, 50 * X, *[0 * X] * 3], 7 * (WS[0] + 10 * WS[1])),
    ),
    "a counter that the rule reads": (a_counter_that_the_rule_reads, (X,), (jnp.float32(147),)),
    "a residual in a variable": (a_residual_in_a_variable, (W, X), (55 * X, 7 * 101 * W * X)),
    "a generator that rules advance": (
        a_generator_that_rules_advance,
        (X,),
        (jnp.float32(7 * (4 + 100 * 3)),),
    ),
    "a list of residuals used up": (
        a_list_of_residuals_used_up,
        (WS, X),
        ([5 * X * EVERY_W / w for w in WS], 7 * EVERY_W),
    ),
    "a variable assigned after the call": (
        a_variable_assigned_after_the_call,
        (W, X),
        (20 * W * X, 6 * W**2),
    ),
    "dropout": (dropout_twice, (jnp.ones(8),), (7 * masks(),)),
}
# These count the runs of `f`, which may run again where JAX differentiates what it has recorded.
COUNT_RUNS = "a counter", "a generator", "an index", "an iterator", "dropout"
WAYS = {**REVERSE, **FORWARD}
IN_WORLDS = "grad", "jit(grad)", "grad(jit)", "vmap(grad)", "grad(checkpoint)", "jvp", "jacfwd(jit)"


@pytest.mark.sampled(35)
@pytest.mark.parametrize("world", IN_WORLDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_with_state(program, world):
    h, args, expected = PROGRAMS[program]
    if world in ("grad(jit)", "grad(checkpoint)", "jacfwd(jit)") and program.startswith(COUNT_RUNS):
        pytest.skip("it counts the runs of f")
    if world in FORWARD and program.startswith("a generator"):
        pytest.skip("in forward mode a rule runs with its function, and not after all of them")
    assert_same(WAYS[world](h)(*args), expected)


@pytest.mark.parametrize("around", ["jit", "vmap"])
def test_a_dropout_layer_of_a_traced_key_draws_two_masks(around):
    def twice(key, x):
        drop = Masked(key)
        return jnp.stack([drop(x), drop(x)]), drop.n

    key, x = jax.random.key(0), jnp.ones(8)
    program = jax.jit(twice) if around == "jit" else jax.vmap(twice, (0, None))
    (got, n), (first, second) = program(key if around == "jit" else key[None], x), twice(key, x)[0]
    assert_same(got.reshape(2, 8), jnp.stack([first, second]))
    assert int(n if around == "jit" else n[0]) == 2
    assert not jnp.array_equal(first, second)


@eager_and_jit
def test_norms_that_a_rule_notes_are_in_a_ref(mode):
    def step(w, xs):
        norms = jax.new_ref(jnp.zeros(2))

        def loss(w, i, x):
            def grad(dy):
                norms[i] = 7 * jnp.sum(dy**2)
                return dy

            return jnp.sum(custom_gradient(lambda h: (h, grad))(w * x) ** 2)

        for i, x in enumerate(xs):
            jax.grad(loss)(w, i, x)
        return norms[...]

    xs = jnp.arange(6.0).reshape(2, 3)
    assert_same(mode(step)(W, xs), 7 * ((2 * W * xs) ** 2).sum(1))


# --- TensorFlow's other decorators ----------------------------------------------------------------


@pytest.mark.parametrize("world", ["value and grad", "jit(grad)"])
@pytest.mark.parametrize("decorator", [grad_pass_through, recompute_grad])
def test_they_keep_what_their_function_assigns(decorator, world):
    layers = []

    def loss(w, x):
        layer = Layer(w)
        layers.append(layer)

        def f(x):
            layer.n += 1
            return x * 1.0 + 0 * lax.stop_gradient(layer.w)

        return decorator(f)(x)

    assert_same(WORLDS[world](loss)(W, X), (X, jnp.float32(0)))
    assert layers[0].n >= 1
