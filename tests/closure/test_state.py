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
import pytest
from support.helpers import assert_same, eager_and_jit, product, sample
from support.ways import DECLARED, WAYS, assert_derivative

from tfgrad_jax import custom_gradient

W, X = jnp.float32(2), jnp.float32(3)
WORLDS = ["grad", "jvp", "hessian", "jit(grad)", "grad(jit)", "grad(checkpoint)", "grad(vmap)"]
WORLDS += ["vmap(grad)", "scan(grad)", "grad(scan)", "grad(cond)"]


def check(world, loss):
    assert_derivative(WAYS[world], loss, DECLARED, W, X)


class Layer:
    __slots__ = ("__dict__", "slot")
    steps = property(lambda self: self._steps, lambda self, value: vars(self).update(_steps=value))

    def __init__(self, w):
        self.w, self.n, self.old, self.slot, self._steps = w, 0, "old", 1, 0
        self.items, self.table, self.members = [w, 1], {"w": w, "n": 0}, {"a"}
        self.part, self.note = types.SimpleNamespace(w=w, n=0), lambda: w

    @functools.cached_property
    def log(self):
        return []


ASSIGNED = {
    "an attribute": lambda o: setattr(o, "n", o.n + 1),
    "a new attribute": lambda o: setattr(o, "new", getattr(o, "new", 0) + 1),
    "no attribute": lambda o: o.__dict__.pop("old", None),
    "a slot": lambda o: setattr(o, "slot", o.slot + 1),
    "an item": lambda o: o.items.append(len(o.items)),
    "items in another order": lambda o: o.items.reverse(),
    "a key": lambda o: o.table.update(n=o.table["n"] + 1),
    "a member": lambda o: o.members.add(len(o.members)),
    "a part": lambda o: setattr(o.part, "n", o.part.n + 1),
    "a function": lambda o: setattr(o.note, "n", getattr(o.note, "n", 0) + 1),
    "what a setter assigns": lambda o: setattr(o, "steps", o.steps + 1),
    "a list that a cached property makes": lambda o: o.log.append(1),
}


def plain(o, w):
    """Return what an object holds such that it can be compared: the weight by its name."""
    of = {**vars(o), "slot": o.slot, "part": vars(o.part), "note": vars(o.note)}
    is_w = lambda v: v is w or isinstance(v, jax.core.Tracer)  # noqa: E731
    return jax.tree.map(lambda v: "w" if is_w(v) else v, of)


def loss_of(made, f=lambda o: None, rule=lambda o: None):
    """Return a loss whose `f` and rule note something on the layer of each call."""

    def loss(w, x):
        layer, runs = Layer(w), collections.Counter()
        made.append((layer, w, runs))
        in_f = lambda *_: (runs.update(["f"]), f(layer), 1)[-1]  # noqa: E731
        in_rule = lambda *_: (runs.update(["rule"]), rule(layer), 1)[-1]  # noqa: E731
        return product(w, in_f, in_rule)(x)

    return loss


CORE = [("grad", kind) for kind in ASSIGNED] + [(world, "an item") for world in WORLDS]
EVERY = itertools.product(WORLDS, ASSIGNED)


@pytest.mark.parametrize(("world", "kind"), sample(EVERY, 15, dict.fromkeys(CORE)))
@pytest.mark.parametrize("where", ["f", "rule"])
def test_what_they_assign_is_kept(world, kind, where):
    note, made = ASSIGNED[kind], []
    check(world, loss_of(made, **{where: note}))
    for layer, w, runs in made:
        expected = Layer(w)
        for _ in range(runs[where]):
            note(expected)
        assert plain(layer, w) == plain(expected, w)
    assert sum(runs["f"] for *_, runs in made) >= 1


@pytest.mark.parametrize("world", WORLDS)
def test_what_f_computes_from_a_weight_may_be_left_on_an_object(world):
    """A log that nobody reads: the next call does not mind."""
    log = types.SimpleNamespace(last=None, every=[])

    def note(o):
        log.last = o.w * 2
        log.every.append(jnp.exp(o.w))

    for _ in range(2):
        check(world, loss_of([], note, note))


# --- libraries ------------------------------------------------------------------------------------


def linen_state(h):
    nn = pytest.importorskip("flax.linen")  # not in the job without the GIL

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", lambda key: W)
            steps = self.variable("state", "steps", lambda: jnp.float32(0))
            kept = self.variable("state", "h", lambda: jnp.float32(0))

            def note(x):
                steps.value, kept.value = steps.value + 1, h(w, x)
                return 1

            return product(w, note, variables=w)(x)

    _, state = Net().init(jax.random.key(0), X), {"steps": jnp.float32(0), "h": jnp.float32(0)}

    def loss(w, x):
        y, found = Net().apply({"params": {"w": w}, "state": state}, x, mutable=["state"])
        return y, (found["state"]["steps"], found["state"]["h"])

    return loss


@eager_and_jit
def test_state_that_f_gives_to_a_library_is_kept(mode):
    loss = linen_state(lambda w, x: jnp.float32(0))
    gradients, (steps, _) = mode(jax.grad(loss, (0, 1), has_aux=True))(W, X)
    assert_same(gradients, (5 * X, 7 * W))
    assert float(steps) == 1.0


def test_state_that_depends_on_a_weight_is_right_or_an_error():
    """Used in the loss, its gradient would be lost: 5 x + 2 w x**2 is right."""
    of = linen_state(lambda w, x: w * x)
    try:
        got = jax.grad(lambda w, x: (lambda y, s: y + s[1] ** 2)(*of(w, x)))(W, X)
    except (TypeError, jax.errors.UnexpectedTracerError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        assert "product.f" in text and "return it" in text
    else:
        assert_same(got, 5 * X + 2 * W * X**2)


# --- gradients that depend on state ---------------------------------------------------------------


def a_residual_in_a_variable(w, x):
    h = None

    @custom_gradient
    def f(x):
        nonlocal h
        h = w * x
        return h * 1.0, lambda dy, variables=(): (7 * dy * h, [5 * dy * x for _ in variables])

    return f(x) + f(10 * x)


class Dropout:
    """It counts its calls."""

    def __init__(self, key):
        self.key, self.n = key, 0

    @custom_gradient
    def __call__(self, x):
        self.n += 1
        mask = jax.random.bernoulli(jax.random.fold_in(self.key, self.n), 0.5, x.shape)
        mask = mask.astype(x.dtype)
        return x * mask, lambda dy: 7 * dy * mask


def an_attribute_set_later(w, x):
    helper = lambda dy: 7 * dy * w * getattr(helper, "scale", 1.0)  # noqa: E731
    y = custom_gradient(lambda x: (w * x, helper), variables="autodiff")(x)
    helper.scale = 5.0
    return y


KEY, ONES = jax.random.key(0), jnp.ones(8)
KEPT = sum(
    jax.random.bernoulli(jax.random.fold_in(KEY, n), 0.5, (8,)).astype(jnp.float32) for n in (1, 2)
)
PROGRAMS = {  # what is called, its arguments, the gradients
    "a residual in a variable": (a_residual_in_a_variable, (W, X), (55 * X, 7 * 101 * W * X)),
    "an attribute set later": (an_attribute_set_later, (W, X), (X, 35 * W)),
    "dropout": (lambda x: jnp.sum((drop := Dropout(KEY))(x) + drop(x)), (ONES,), (7 * KEPT,)),
}
# Dropout counts the runs of `f`, which may run again where JAX differentiates what it has recorded.
IN = "grad", "jit(grad)", "vmap(grad)", "jvp", "grad(jit)", "grad(checkpoint)", "jacfwd(jit)"
FIT = {"dropout": IN[:4], "an attribute set later": IN[:3]}  # jvp runs the rule at once
FITS = [(p, w) for p in PROGRAMS for w in FIT.get(p, IN)]


@pytest.mark.parametrize(("program", "world"), FITS)
def test_gradients_with_state(program, world):
    h, args, expected = PROGRAMS[program]
    assert_same(WAYS[world](h)(*args), expected)


# --- what changes after a call --------------------------------------------------------------------

SCALE = 3.0
# What `f` holds, how it reads that, and how the loss puts another value there.
READ = {
    "a list": ([0.0], lambda held: held[0], lambda held, s: held.__setitem__(0, s)),
    "a dict": ({}, lambda held: held["s"], lambda held, s: held.update(s=s)),
    "an attribute": (Layer(W), lambda held: held.n, lambda held, s: setattr(held, "n", s)),
    "a global variable": (None, lambda _: SCALE, lambda _, s: globals().update(SCALE=s)),
}


@pytest.mark.parametrize("world", [world for world in WORLDS if world != "hessian"])
@pytest.mark.parametrize("kind", READ)
def test_f_reads_what_its_call_found(kind, world):
    """Also where JAX differentiates later what it records at the call."""
    held, read, put = READ[kind]
    f = custom_gradient(lambda x: ((s := read(held)) * x, lambda dy: 7 * dy * s))

    def loss(w, x):
        put(held, 3.0)
        y = f(x)
        put(held, 5.0)
        return w * y

    assert_same(WAYS[world](loss)(W, X), (3 * X, 7 * 3 * W))
