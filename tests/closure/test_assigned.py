"""What `f` and its rule assign is kept, or an error: it is never lost.

They run on copies of what leads to a tracer; so what they assign there is an error that names it.
Everything else that they assign to is the user's own.
"""

import collections
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample

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
}
# Here nothing is differentiated, so that only `f` runs.
VALUES = {
    "jit": jax.jit,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (0, None))(w[None], x),
    "scan": lambda f: lambda w, x: lax.map(lambda w: f(w, x), w[None]),
    "checkpoint": jax.checkpoint,
}


class Named:
    def __init__(self, w):
        self.w = w


class Table(dict):
    pass


class Default:
    """A descriptor that shows a default until something is assigned."""

    def __get__(self, instance, owner=None):
        return 0 if instance is None else vars(instance).get("_late", 0)

    def __set__(self, instance, value):
        vars(instance)["_late"] = value


class Steps:
    """Counts that look like what a class computes when it is read."""

    steps = property(lambda self: getattr(self, "_steps", 0))
    late = Default()

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
    def tags(self):
        if not hasattr(self, "_tags"):
            self._tags = {}
        return self._tags

    @property
    def reads(self):
        self._reads = getattr(self, "_reads", 0) + 1
        return self._reads

    @property
    def turns(self):
        if self.w is not None:
            self._turns = getattr(self, "_turns", 0) + 1
        return self._turns

    def advance(self):
        self.drawn += 1

    def set(self, **values):
        for name, value in values.items():
            setattr(self, name, value)


def advance(layer):
    layer.drawn += 1


class Layer(Steps):
    __slots__ = ("slot",)

    def __init__(self, w):
        self.w, self.n, self.old, self.slot, self.rate = w, 0, "old", 1, [1, 2]
        self.items, self.table, self.own = [w, 1], {"w": w, "n": 0}, Table(w=w)
        self.ordered = collections.OrderedDict(self.table)
        self.part, self.space = Named(w), types.SimpleNamespace(w=w)
        self.part.parent = self
        self.note = lambda: w


def attribute(name, value):
    return lambda layer: setattr(layer, name, value(layer))


# What is assigned to, and how the error names it.
ASSIGNED = {
    "an integer": (attribute("n", lambda o: o.n + 1), "attribute `n` of a `Layer`"),
    "a string": (attribute("old", lambda o: "new"), "attribute `old` of a `Layer`"),
    "a list": (attribute("rate", lambda o: [3]), "attribute `rate` of a `Layer`"),
    "an array": (attribute("n", lambda o: jnp.ones(2)), "attribute `n` of a `Layer`"),
    "a tracer": (attribute("n", lambda o: 2 * o.w), "attribute `n` of a `Layer`"),
    "the weight": (attribute("w", lambda o: 2 * o.w), "attribute `w` of a `Layer`"),
    "a new attribute": (attribute("new", lambda o: 1), "attribute `new` of a `Layer`"),
    "no attribute": (lambda o: delattr(o, "old"), "attribute `old` of a `Layer`"),
    "a slot": (attribute("slot", lambda o: 2), "attribute `slot` of a `Layer`"),
    "an appended item": (lambda o: o.items.append(1), "a `list`, the attribute `items` of a `L"),
    "a removed item": (lambda o: o.items.pop(), "a `list`, the attribute `items`"),
    "another item": (lambda o: o.items.__setitem__(1, 3), "a `list`, the attribute `items`"),
    "the items in another order": (lambda o: o.items.reverse(), "a `list`, the attribute `items`"),
    "a key": (lambda o: o.table.update(n=1), "a `dict`, the attribute `table`"),
    "a new key": (lambda o: o.table.update(m=o.w), "a `dict`, the attribute `table`"),
    "a removed key": (lambda o: o.table.pop("n"), "a `dict`, the attribute `table`"),
    "a key of a subclass": (lambda o: o.own.update(n=1), "a `Table`, the attribute `own`"),
    "a part": (lambda o: setattr(o.part, "n", 1), "attribute `n` of a `Named`"),
    "a parent": (lambda o: setattr(o.part.parent, "n", 1), "attribute `n` of a `Layer`"),
    "a namespace": (lambda o: setattr(o.space, "n", 1), "attribute `n` of a `SimpleNamespace`"),
    "a function": (lambda o: setattr(o.note, "n", 1), "attribute `n` of a `function`"),
    "the order of keys": (lambda o: o.ordered.move_to_end("w"), "the attribute `ordered`"),
    "the order in a dict": (
        lambda o: o.table.update(w=o.table.pop("w")),
        "a `dict`, the attribute `table`",
    ),
    "the class": (lambda o: setattr(o.part, "__class__", Counted), "the class of a `Named`"),
    "what a property shows": (attribute("_steps", lambda o: o.steps + 1), "attribute `_steps`"),
    "what a setter assigns": (attribute("lazy", lambda o: o.lazy + 1), "attribute `_lazy`"),
    "what a descriptor shows": (attribute("late", lambda o: o.late + 1), "attribute `_late`"),
    "what a property counts": (lambda o: o.reads, "attribute `_reads`"),
    "what a property counts at times": (lambda o: o.turns, "attribute `_turns`"),
    "a cached property": (attribute("drawn", lambda o: o.drawn + 1), "attribute `drawn`"),
    "a cached property, by a method": (lambda o: o.advance(), "attribute `drawn`"),
    "a cached property, by name": (lambda o: o.set(drawn=o.drawn + 1), "attribute `drawn`"),
    "a cached property, by a function": (advance, "attribute `drawn`"),
    "a list that a cached property makes": (lambda o: o.log.append(1), "attribute `log`"),
    "a dict that a property makes": (lambda o: o.tags.update(a=1), "attribute `_tags`"),
    "a cached property, in a table": (
        lambda o: vars(o).update(drawn=o.drawn + 1),
        "attribute `drawn`",
    ),
}


def nothing(layer):
    pass


def loss_of(in_f=nothing, in_rule=nothing, make=Layer, more=0, variables="declared"):
    """Return `w x`, whose declared gradients are 5 x by `w`, and 7 w by `x`."""

    def loss(w, x):
        layer, others = make(w), [k * w for k in range(more)]

        def f(x):
            in_f(layer)
            assert others is not None

            def grad(dy, variables):
                in_rule(layer)
                return 7 * dy * w, [5 * dy * x for _ in variables]

            return x * w, grad

        declared = [w] if variables == "declared" else None
        return custom_gradient(f, variables=declared)(x)

    return loss


def refused(program, what, function):
    with pytest.raises(TypeError) as caught:
        program(W, X)
    text = str(caught.value)
    assert f"`loss_of.loss.{function}` ({__file__}:" in text
    for words in (what, "runs on a copy", "part of `y`", "`nonlocal`", "jax.new_ref"):
        assert words in text


IN_F = list(itertools.product([*WORLDS, *VALUES], ASSIGNED, ["declared", "undeclared"]))
IN_RULE = list(itertools.product(WORLDS, ASSIGNED, ["declared", "undeclared"]))
CORE = list(itertools.product(["value and grad"], ASSIGNED, ["declared"]))


@pytest.mark.parametrize(("world", "kind", "variables"), sample(IN_F, 20, CORE))
def test_a_function_assigns_to_no_copy(world, kind, variables):
    note, what = ASSIGNED[kind]
    refused((WORLDS | VALUES)[world](loss_of(note, variables=variables)), what, "f")


@pytest.mark.parametrize(("world", "kind", "variables"), sample(IN_RULE, 20, CORE))
def test_a_rule_assigns_to_no_copy(world, kind, variables):
    note, what = ASSIGNED[kind]
    refused(WORLDS[world](loss_of(in_rule=note, variables=variables)), what, "f.grad")


@pytest.mark.parametrize("world", ["value and grad", "jit(grad)"])
@pytest.mark.parametrize("kind", ["an integer", "an appended item"])
def test_nor_in_a_large_model(kind, world):
    note, what = ASSIGNED[kind]
    refused(WORLDS[world](loss_of(note, more=12)), what, "f")
    refused(WORLDS[world](loss_of(in_rule=note, more=12)), what, "f.grad")


def state(layer):
    names = ("n", "w", "new", "old", "slot", "rate", "items", "table", "own", "space")
    return [getattr(layer, name, None) for name in names], vars(layer.part), vars(layer.note)


@pytest.mark.parametrize("kind", ASSIGNED)
@pytest.mark.parametrize("where", ["f", "rule"])
def test_what_holds_no_tracer_is_assigned_once(where, kind):
    """`f` runs on copies, because of the weight beside it; this object is no copy."""
    layer, expected = Layer(2.0), Layer(2.0)
    note = ASSIGNED[kind][0]
    loss = loss_of(**{"in_f" if where == "f" else "in_rule": note}, make=lambda w: layer)
    assert_same(jax.grad(loss, (0, 1))(W, X), (5 * X, 7 * W))
    note(expected)
    (found, part, noted), (wanted, *others) = state(layer), state(expected)
    assert str(found) == str(wanted)
    assert (part.keys(), noted) == (others[0].keys(), others[1])


class Counted(Named):
    """Its class, which can be imported, is no copy."""

    calls = 0

    def count(self):
        type(self).calls += 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("world", WORLDS)
def test_a_class_attribute_counts(world):
    Counted.calls = 0
    loss = loss_of(in_rule=Counted.count, make=Counted)
    assert_same(WORLDS[world](loss)(W, X), WORLDS[world](loss_of())(W, X))
    assert Counted.calls >= 1


TRACED = {
    "set": (lambda w: {Named(w)}, lambda s: s.add(1), len),
    "deque": (lambda w: collections.deque([w]), lambda d: d.append(1), len),
    "object of a class with a weight": (
        lambda w: type("Held", (), {"w": w, "n": 1})(),
        attribute("n", lambda o: o.n + 1),
        lambda o: o.n,
    ),
}


@pytest.mark.parametrize("world", ["value and grad", "jit(grad)"])
@pytest.mark.parametrize("kind", TRACED)
def test_what_is_traced_is_no_copy(kind, world):
    make, note, count = TRACED[kind]
    kept = []
    loss = loss_of(note, make=lambda w: kept.append(make(w)) or kept[-1])
    assert_same(WORLDS[world](loss)(W, X), WORLDS[world](loss_of())(W, X))
    assert count(kept[0]) == 2


# --- what is no assignment of the user's ---------------------------------------------------------


class LazyProperty:
    """As libraries have their own: it assigns by name."""

    def __init__(self, compute):
        self.compute = compute

    def __get__(self, instance, owner=None):
        value = self.compute(instance)
        setattr(instance, self.compute.__name__, value)
        return value


class Lazy(Named):
    @functools.cached_property
    def twice(self):
        return 2 * self.w

    @property
    def names(self):
        if not hasattr(self, "_names"):
            self._names = ("w",)
        return self._names

    @property
    def tried(self):
        try:
            return self._tried
        except AttributeError:
            self._tried = self.w * jnp.ones(2)
        return self._tried

    @property
    def found(self):
        if (value := vars(self).get("_found")) is None:
            value = self._found = self.w
        return value

    @LazyProperty
    def by_name(self):
        return 2 * self.w


class LazySlots:
    __slots__ = ("_names", "w")
    names = Lazy.names

    def __init__(self, w):
        self.w = w


def attrs_layer(w):
    attrs = pytest.importorskip("attrs")  # the job without the GIL installs few packages

    @attrs.define
    class Layer:
        w: jax.Array

        @functools.cached_property
        def twice(self):
            return 2 * self.w

    return Layer(w)


COMPUTED = {
    "cached": (Lazy, lambda o: o.twice),
    "if it is missing": (Lazy, lambda o: o.names),
    "after an exception": (Lazy, lambda o: o.tried),
    "if it is not in the table": (Lazy, lambda o: o.found),
    "by a descriptor": (Lazy, lambda o: o.by_name),
    "in a slot": (LazySlots, lambda o: o.names),
    "in a slot of attrs": (attrs_layer, lambda o: o.twice),
}


@pytest.mark.parametrize(
    ("world", "kind"),
    sample(itertools.product(WORLDS, COMPUTED), 5, [("value and grad", k) for k in COMPUTED]),
)
def test_what_a_class_computes_when_it_is_read_is_no_assignment(world, kind):
    make, read = COMPUTED[kind]
    loss = loss_of(read, read, make=make)
    assert_same(WORLDS[world](loss)(W, X), WORLDS[world](loss_of())(W, X))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("world", WORLDS)
def test_a_rule_changes_what_its_function_has_made(world):
    def loss(w, x):
        @custom_gradient(variables=w)
        def f(x):
            saved = [w, x, Layer(w)]

            def grad(dy, variables):
                nonlocal saved
                saved[2].n += 1
                layer, saved = saved.pop(), [7 * dy * saved[0], 5 * dy * saved[1]]
                assert layer.n == 1
                return tuple(saved)

            return x * w, grad

        return f(x)

    assert_same(WORLDS[world](loss)(W, X), WORLDS[world](loss_of())(W, X))


# --- libraries -----------------------------------------------------------------------------------


def equinox_module(w):
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        w: jax.Array
        norm: eqx.nn.LayerNorm
        drop: eqx.nn.Dropout
        rate: float = 0.0

    return Net(w, eqx.nn.LayerNorm(2), eqx.nn.Dropout(0.5))


def nnx_module(w):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self):
            self.w, self.count, self.rate = nnx.Param(w), nnx.Variable(jnp.int32(0)), 0.0
            self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))

    return Net()


def linen_module(w):
    nn = pytest.importorskip("flax.linen")
    return nn.LayerNorm().bind({"params": {"scale": jnp.stack([w, w]), "bias": jnp.zeros(2)}})


ONES = jnp.ones(2)
# Modules that hold the weight, and what reads them: the library may note what it likes.
READ = {
    "equinox": (equinox_module, lambda o: o.drop(o.norm(o.w * ONES), key=jax.random.key(0))),
    "nnx": (nnx_module, lambda o: o.norm(o.w[...] * ONES)),
    "linen": (linen_module, lambda o: o(ONES)),
}
# What refuses an assignment before we see it.
REFUSED = {
    "equinox": (equinox_module, attribute("rate", lambda o: 1.0), "cannot assign to field 'rate'"),
    "nnx, an attribute": (nnx_module, attribute("rate", lambda o: 1.0), "Cannot mutate 'Net'"),
    "nnx, a Variable": (nnx_module, lambda o: o.count.set_value(1), "Cannot mutate Variable"),
    "linen": (linen_module, attribute("epsilon", lambda o: 1.0), "frozen"),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("library", READ)
def test_a_module_of_a_library_is_read(library, world):
    make, read = READ[library]
    loss = loss_of(read, read, make=make)
    assert_same(WORLDS[world](loss)(W, X), WORLDS[world](loss_of())(W, X))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("where", ["in_f", "in_rule"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("library", REFUSED)
def test_a_module_of_a_library_refuses_assignments(library, world, where):
    make, note, text = REFUSED[library]
    with pytest.raises(Exception, match=text):
        WORLDS[world](loss_of(make=make, **{where: note}))(W, X)


def linen_state():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", lambda key: W)
            steps = self.variable("state", "steps", lambda: jnp.float32(-1))

            @custom_gradient(variables=w)
            def f(x):
                steps.value += 1
                self.sow("state", "h", w * x)
                return w * x, lambda dy, variables: (7 * dy * w, 5 * dy * x)

            return f(x)

    variables = Net().init(jax.random.key(0), X)
    given = {"params": variables["params"], "state": {"steps": variables["state"]["steps"]}}

    def loss(w, x):
        y, state = Net().apply(given | {"params": {"w": w}}, x, mutable=["state"])
        return y, (state["state"]["steps"], *state["state"]["h"])

    return loss


def haiku_state():
    hk = pytest.importorskip("haiku")

    def net(x):
        w = hk.get_parameter("w", (), init=lambda *_: W)

        @custom_gradient(variables=w)
        def f(x):
            hk.set_state("steps", hk.get_state("steps", (), init=jnp.ones) + 1)
            hk.set_state("h", w * x)
            return w * x, lambda dy, variables: (7 * dy * w, 5 * dy * x)

        return f(x)

    net = hk.transform_with_state(net)
    _, state = net.init(None, X)

    def loss(w, x):
        y, found = net.apply({"~": {"w": w}}, {"~": state["~"] | {"steps": 0.0}}, None, x)
        return y, (found["~"]["steps"], found["~"]["h"])

    return loss


@eager_and_jit
def test_state_that_a_function_gives_to_haiku_is_kept(mode):
    """Haiku keeps it outside of what `f` holds."""
    gradients, (steps, h) = mode(jax.grad(haiku_state(), (0, 1), has_aux=True))(W, X)
    assert_same(gradients, (5 * X, 7 * W))
    assert_same((steps, h), (jnp.float32(1), W * X))


@eager_and_jit
def test_state_that_a_function_gives_to_linen_is_an_error(mode):
    """What leads to the scope of a module is traced, so the state is a tracer of that trace."""

    def step(w, x):
        gradients, (steps, h) = jax.grad(linen_state(), (0, 1), has_aux=True)(w, x)
        return gradients, steps + h

    with pytest.raises(jax.errors.UnexpectedTracerError):
        mode(step)(W, X)


# --- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 1, 13], ids=["no weight", "one weight", "many weights"])
@pytest.mark.parametrize("world", ["eager", "jit", "vmap"])
def test_a_variable_counts_every_run(world, held):
    """Of `f`, of a rule, and of its helper; a rule that is pulled back twice runs twice."""
    runs = rules = notes = 0

    def note():
        nonlocal notes
        notes += 1

    def loss(w, x):
        weights = [w + k for k in range(held)]

        @custom_gradient(variables=weights[:1])
        def f(x):
            nonlocal runs
            runs += 1
            scale = weights[0] if weights else 1

            def grad(dy, variables):
                nonlocal rules
                rules += 1
                note()
                return 7 * dy * scale, [5 * dy * x for _ in variables]

            return x * scale, grad

        return f(x) + f(x) + f(x)

    def twice(w, x):
        _, pull = jax.vjp(loss, w, x)
        return pull(jnp.ones_like(w)), pull(2 * jnp.ones_like(w))

    vmap = lambda f: lambda w, x: jax.tree.map(lambda g: g[0], jax.vmap(f, (0, None))(w[None], x))  # noqa: E731
    around = {"eager": lambda f: f, "jit": jax.jit, "vmap": vmap}[world]
    once = (15 * X, 21 * W) if held else (0 * X, jnp.float32(21))
    assert_same(around(twice)(W, X), (once, jax.tree.map(lambda g: 2 * g, once)))
    assert (runs, rules, notes) == (3, 6, 6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("world", WORLDS)
def test_a_variable_that_holds_the_weight_is_not_assigned_to(world):
    def another(w):
        return lambda: w  # another variable of that name

    def loss(w, x):
        twice = another(2 * w)

        @custom_gradient(variables=w)
        def f(x):
            nonlocal w
            y, w = w * x, twice()
            return y, lambda dy, variables: (7 * dy * w, 5 * dy * x)

        return f(x)

    text = r"`.*loss.f` \(.*py:\d+\) assigned to the variable `w`\."
    with pytest.raises(TypeError, match=text):
        WORLDS[world](loss)(W, X)


@eager_and_jit
def test_each_call_has_the_value_that_it_left_for_its_rule(mode):
    def loss(w, x):
        h = None

        @custom_gradient(variables=w)
        def f(x):
            nonlocal h
            h = x * x
            return h * w, lambda dy, variables: (7 * dy * h * w, 5 * dy * h)

        return f(x) + f(10 * x)

    expected = 5 * 101 * X**2, 7 * W * (X**2 + 10 * 100 * X**2)
    assert_same(mode(jax.grad(loss, (0, 1)))(W, X), expected)


# --- the programs that were silently wrong -------------------------------------------------------


def masked(key, n):
    return jax.random.bernoulli(jax.random.fold_in(key, n), 0.5, (8,))


class Dropout:
    def __init__(self, key):
        self.key, self.n = key, 0

    @custom_gradient
    def __call__(self, x):
        self.n += 1
        mask = masked(self.key, self.n).astype(x.dtype)
        return x * mask, lambda dy: 7 * dy * mask


def drop_twice(key, x):
    drop = Dropout(key)
    return jnp.stack([drop(x), drop(x)])


def test_two_calls_of_a_dropout_layer_draw_two_masks_or_raise():
    key, x = jax.random.key(0), jnp.ones(8)
    masks = jnp.stack([masked(key, n).astype(x.dtype) for n in (1, 2)])
    assert_same(drop_twice(key, x), masks)
    dx = jax.grad(lambda x: drop_twice(key, x).sum())(x)  # the key is not traced
    assert_same(dx, 7 * masks.sum(0))
    assert_same(jax.jit(lambda x: drop_twice(key, x))(x), masks)
    over_keys = jax.vmap(lambda key: drop_twice(key, x))
    for program, of in ((jax.jit(drop_twice), (key, x)), (over_keys, (key[None],))):
        with pytest.raises(TypeError, match="the attribute `n` of a `Dropout`"):
            program(*of)


def test_norms_that_a_rule_notes_are_in_a_ref():
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
    expected = 7 * ((2 * W * xs) ** 2).sum(1)
    for mode in (lambda f: f, jax.jit):
        assert_same(mode(step)(W, xs), expected)


# --- TensorFlow's other decorators ---------------------------------------------------------------


@pytest.mark.parametrize("world", ["value and grad", "jit(grad)"])
def test_a_function_that_passes_its_gradient_through_assigns_to_no_copy(world):
    def loss(w, x):
        layer = Layer(w)

        def f(x):
            layer.n += 1
            return jnp.round(x) + 0 * layer.w

        return grad_pass_through(f)(x)

    with pytest.raises(TypeError, match="the attribute `n` of a `Layer`"):
        WORLDS[world](loss)(W, X)


@eager_and_jit
def test_recompute_grad_runs_the_function_itself(mode):
    layer = Layer(2.0)

    @recompute_grad
    def f(w, x):
        layer.n += 1
        return w * x**2

    assert_same(mode(jax.grad(f, (0, 1)))(W, X), (X**2, 2 * W * X))
    assert layer.n >= 1
