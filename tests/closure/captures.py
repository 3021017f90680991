"""Where a function may hold a weight: each entry takes `w` and returns what fetches it from there.

An entry stands for one mechanism: a cell, a pytree in a cell, an object that is no pytree, a
builtin, a class, a cache, another trace, a Ref. Python has more containers than that; a second one
of the same mechanism proves nothing.
"""

import collections
import dataclasses
import functools
import itertools
import threading
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

HOLD: dict[str, Any] = {}


def hold(f):
    HOLD[f.__name__.replace("_", " ")] = f
    return f


def keep(name, make, read):
    """Register `read(make(w))`, for what takes one line."""

    def get_of(w):
        held = make(w)
        return lambda: read(held)

    HOLD[name] = get_of


class Box:
    def __init__(self, w):
        self.w = w

    def get(self):
        return self.w


class Static:
    """A pytree that is all static."""

    def __init__(self, get):
        self.get = get


jax.tree_util.register_pytree_node(Static, lambda s: ((), s.get), lambda get, _: Static(get))


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


class Checked:
    """Whose class has a property of the name of the attribute."""

    def __init__(self, w):
        self.__dict__["w"] = w

    @property
    def w(self):
        return self.__dict__["w"]


class Table(dict):
    """Which has attributes, too."""


class Named(Box):
    """A member of tables by its name, which its class hashes."""

    def __init__(self, w):
        super().__init__(w)
        self.name = "w"

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


def in_object_array(w):
    array = np.empty((1, 2), object)
    array[0, 1] = {"w": w}
    return array


def weight_in_object_array(w):
    array = np.empty(2, object)
    array[0] = w
    return array


def in_an_array_of_itself(w):
    array = in_object_array(w)
    array[0, 0] = array
    return array


def attributed(held, w):
    held.w = w
    return held


def renamed(f):
    f.__name__ = f.__qualname__ = "g"
    return f


def nested(w):
    for _ in range(2_000):
        w = (w,)
    return w


def innermost(nest):
    while isinstance(nest, tuple):
        (nest,) = nest
    return nest


def cyclic(w):
    nodes = {"w": w}
    nodes["self"] = nodes
    return nodes


class Node:
    """A node of a graph, which knows its parent."""

    def __init__(self, w, parent=None):
        self.w, self.parent, self.children = w, parent, []


def tree(w):
    root = Node(w)
    root.children = [Node(w, root) for _ in range(2)]
    return root


class Operator(Box):
    """Which hands out another operator that holds it."""

    @property
    def T(self):  # noqa: N802
        return Operator(self)


class Emptied(Box):
    """Whose class says how its objects are pickled: without their cache, of which there is one."""

    made = 0

    def __new__(cls, *_):
        cls.made += 1
        return object.__new__(cls)

    def __init__(self, w):
        super().__init__(w)
        self.cache = {"one": 1.0}

    def __getstate__(self):
        return {"w": self.w, "cache": {}}

    def __reduce__(self):
        raise AssertionError("nobody pickles it")


class Finalized(Box):
    def __del__(self):
        self.w = None


class Handle(tuple):
    """A tuple with a finalizer."""

    ended = 0

    def __del__(self):
        type(self).ended += 1


class Hidden:
    """With a slot that it shares with its subclass by name, and one that is empty."""

    __slots__ = ("__w", "_late")

    def __init__(self, w):
        self.__w = w

    def hidden(self):
        return self.__w

    def __getattr__(self, name):
        raise AssertionError("nobody reads what is not there")

    def __getattribute__(self, name):
        assert name not in ("__getstate__", "_late")
        return object.__getattribute__(self, name)


class Lazy(Hidden):
    __slots__ = ("__dict__", "__w")

    def __init__(self, w):
        super().__init__((w, 4.0))
        self.__w = w

    @functools.cached_property
    def twice(self):
        return 2 * self.__w

    def get(self):
        w, factor = self.hidden()
        return self.twice * self.__w / w * factor / 8


class Bare:
    """A class that keeps the descriptor of its slot elsewhere."""

    __slots__ = ("w",)


BARE_SLOT = vars(Bare)["w"]
del Bare.w


def bare(w):
    held = Bare()
    BARE_SLOT.__set__(held, w)
    return held


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Record:
    """It is hashed by what it holds."""

    w: Any
    n: int = 1


class Entries(dict):
    """With a slot of the name of a key."""

    __slots__ = ("w",)


def entries(w):
    held = Entries(w=w)
    held.w = 10
    return held


def by_names_that_are_no_plain_strings(w):
    held = types.SimpleNamespace()
    setattr(held, np.str_("w"), w)
    return held


def described(w):
    """Return a function of which all that Python says of one was changed."""

    class Unit:
        pass

    def get(x: Unit) -> Unit:
        return x * w

    get.__doc__, get.__module__, get.__isabstractmethod__ = "other", "elsewhere", True
    get.__defaults__ = (w,)
    return get, Unit


def as_described(held):
    get, unit = held
    assert (get.__doc__, get.__module__, get.__isabstractmethod__) == ("other", "elsewhere", True)
    assert get.__annotations__["x"] is get.__annotations__["return"] is unit
    return get(2.0) - get.__defaults__[0]


def table_by_function(w):
    """Return a function, and tables with it, its method and a tuple of it among the keys."""

    def act():
        return w

    box = Box(act)
    return box, {(act, 1): 2.0, box.get: 3.0, act: {act: 4.0}}


def from_tables(held):
    box, table = held
    act = box.w
    return act() * table[act, 1] * table[box.get] * table[act][act] / 24


def proxied(w):
    root, leaf = Box(w), Box(None)
    leaf.parent = weakref.proxy(root)
    return root, leaf


def attrs_slots(w):
    attrs = pytest.importorskip("attrs")  # the job without the GIL installs few packages

    @attrs.define
    class Layer:
        w: Any

        @functools.cached_property
        def twice(self):
            return 2 * self.w

    return Layer(w)


def scaled_by(f, factor=1.0):
    return f() * factor


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[], drop_fields=["s"]
)
@dataclasses.dataclass
class Scaled:
    w: Any
    s: Any = 0.0


def logged(f):
    @functools.wraps(f)
    def wrapper(*args):
        return f(*args)

    return wrapper


@logged
def called(f):
    return f()


def maker(factor):
    return lambda x: factor * x


MADE = maker(0.5)
# A copy of a function that closes over nothing has an empty closure, where the function has none.
BARE = types.FunctionType((lambda x: x).__code__, globals(), closure=())
SCALES = {scaled_by: 1.0, called: 1.0, MADE: 2.0, print: 0.0}


def keyed(kind):
    """Return what holds an object with the weight, and a table that has it as a key or a member."""

    def make(w):
        node = Box(w)
        return node, kind(node)

    return make


PARTS, B = np.array([[0.5, -0.25, 0.125], [0.25, 0.125, -0.5]], np.float32), np.float32([0.25, 0.5])

keep("cell", lambda w: w, lambda w: w)
keep("dict of other keys", lambda w: {1: "a", (2, "b"): w, None: 0}, lambda d: d[2, "b"])
keep(
    "several leaves",
    lambda w: {"w": w * PARTS, "b": [w * B], "unused": w},
    lambda d: d["w"].sum() + d["b"][0].sum(),
)
keep("object", Box, lambda b: b.w)
keep("bound method", lambda w: Box(w).get, lambda get: get())
keep("slots", Slots, lambda b: b.w)
keep("static part of a pytree", lambda w: Static(lambda: w), lambda s: s.get())
keep("subclass of dict", lambda w: attributed(Table(a=1), w), lambda d: d.w)
keep("values of a table", lambda w: {"w": w}.values(), lambda values: next(iter(values)))
keep(
    "pytree with a weak reference",
    lambda w: (static := Static(lambda: w), weakref.ref(static)),
    lambda p: p[0].get() if p[1]() is p[0] else None,
)
keep("bound builtin", lambda w: {"w": w}.get, lambda get: get("w"))
keep("thousands of tuples", nested, innermost)
keep("object array", in_object_array, lambda a: a[0, 1]["w"])
keep("object array of itself", in_an_array_of_itself, lambda a: a[0, 0][0, 1]["w"])
keep("weight in an object array", weight_in_object_array, lambda a: a[0])
keep(
    "local function as a key",
    lambda w: ((act := lambda: w), {act: 1.0}),
    lambda p: p[0]() * p[1][p[0]],
)
keep("attribute of a function", lambda w: attributed(lambda: None, w), lambda f: f.w)
keep("class", lambda w: type("Held", (), {"w": w}), lambda c: c.w)
keep("object of a class with it", lambda w: type("Held", (), {"w": w})(), lambda h: h.w)
keep(
    "tree definition",
    lambda w: jax.tree.structure(jax.tree_util.Partial(lambda: w)),
    lambda t: jax.tree.unflatten(t, [])(),
)
keep("a lock beside", lambda w: (threading.Lock(), w), lambda p: p[1])
keep("default", lambda w: lambda w=w: w, lambda get: get())
keep(
    "attribute of a decorated function",
    lambda w: attributed(custom_gradient(lambda x: (x, lambda dy: dy)), w),
    lambda f: f.w,
)
keep("jitted function", lambda w: jax.jit(lambda: w * 1), lambda f: f())
keep("cached function", lambda w: functools.cache(lambda: w), lambda f: f())
keep("cycle", cyclic, lambda d: d["self"]["self"]["w"])
keep("parent", tree, lambda r: r.w if r.children[1].parent is r else None)
keep("operator with a transpose", Operator, lambda o: o.T.T.w.w.w)
keep("namespace", lambda w: types.SimpleNamespace(w=w), lambda n: n.w)
keep("slot without a descriptor", bare, BARE_SLOT.__get__)
keep("slots of two classes", Lazy, lambda o: o.get())
keep("function that is described", described, as_described)
keep("table by function", table_by_function, from_tables)
keep("slot of the name of a key", entries, lambda e: e["w"] * e.w / 10)
keep(
    "key that is hashed by what it holds",
    lambda w: ((record := Record(Box(w))), {record: 1.0}),
    lambda p: p[0].w.w * p[1].get(p[0], 100.0),
)
keep("tuple with a finalizer", lambda w: Handle([w]), lambda h: h[0])
keep("proxy", proxied, lambda p: p[1].parent.w)
keep(
    "jaxpr",
    lambda w: jax.make_jaxpr(lambda x: x * w)(1.0),
    lambda j: jax.extend.core.jaxpr_as_fun(j)(jnp.float32(1))[0],
)
keep("deque", lambda w: collections.deque([0, w], maxlen=2), lambda d: d[1] if d.maxlen else None)
keep("key of a table", keyed(lambda n: {n: 1.0}), lambda p: p[0].w * p[1][p[0]])
keep("member of a set", keyed(lambda n: {n}), lambda p: p[0].w if p[0] in p[1] else None)
keep(
    "weak key", keyed(lambda n: weakref.WeakKeyDictionary({n: 1.0})), lambda p: p[0].w * p[1][p[0]]
)
keep(
    "weak member", keyed(lambda n: weakref.WeakSet([n])), lambda p: p[0].w if p[0] in p[1] else None
)
keep("copy hooks", Emptied, lambda e: e.w * e.cache["one"])
keep("frozenset", lambda w: frozenset([Box(w)]), lambda s: min(s, key=id).w)
keep("frozen equals", lambda w: frozenset([(Named(w), 0)]), lambda s: min(s, key=id)[0].w)
keep("table of equals", lambda w: {Named(w): 0}, lambda d: next(k for k in d if k in d).w)
keep("finalizer", Finalized, lambda f: f.w)
keep(
    "global function as a key",
    lambda w: (w, scaled_by),
    lambda p: p[1](lambda: p[0]) * SCALES[p[1]],
)
keep(
    "wrapped global function as a key",
    lambda w: (w, called),
    lambda p: p[1](lambda: p[0]) * SCALES[p[1]] if p[1] is called else None,
)
keep(
    "what a function made, as a key",
    lambda w: (w, MADE),
    lambda p: p[1](p[0]) * SCALES[p[1]] if p[1] is MADE else None,
)
keep("function with an empty closure", lambda w: (w, BARE), lambda p: p[1](p[0]))
keep("dropped field", lambda w: Scaled(w, 1.0), lambda d: d.w * d.s)
keep("dropped field with the weight", lambda w: Scaled(1.0, w), lambda d: d.w * d.s)
keep("iterator", itertools.repeat, next)
keep("ref", lambda w: w, lambda w: jax.new_ref(w * 1)[...])  # written and read where it is fetched
keep(
    "integer beside",
    lambda w: (jnp.stack([0 * w, w]), jnp.sign(w).astype(int)),
    lambda p: p[0][p[1]],
)
keep(
    "a key beside",
    lambda w: (w, jax.random.key(jnp.sign(w).astype(int))),
    lambda p: jnp.where(jax.random.bernoulli(p[1], 1.0), p[0], 0),
)


@hold
def a_tracer_of_a_trace_that_is_over_beside(w):
    log = []
    jax.jit(log.append)(1.0)
    return lambda: w if log else None


@hold
def attributes_with_names_of_the_engine(w):
    held = Box(w)
    held._f = held._call = held.residuals = held.__wrapped__ = held.call = "mine"
    return lambda: held.w if held._f == held.call else None


@hold
def weak_reference(w):
    held = Box(w)
    reference = weakref.ref(held)
    return functools.partial(lambda held: reference().w, held)


ALIVE = collections.deque(maxlen=10)  # what others refer to weakly


@hold
def weak_value(w):
    table = weakref.WeakValueDictionary()
    ALIVE.append(table.setdefault("held", Box(w)))
    return lambda: table["held"].w


@hold
def weak_method(w):
    ALIVE.append(held := Box(w))
    method = weakref.WeakMethod(held.get)
    return lambda: method()()


@hold
def decorated_helper(w):
    """Its own rule is asked for second derivatives alone: the caller's rule has the first."""

    @custom_gradient
    def helper(x):
        return w * x, lambda dy, variables: (1000 * dy, [1000 * dy])

    return lambda: helper(1.0)


# Those that are not copied: JAX traces the call.
TRACED = {
    "values of a table",
    "bound builtin",
    "object array",
    "object array of itself",
    "weight in an object array",
    "deque",
    "key that is hashed by what it holds",
    "tuple with a finalizer",
    "slot without a descriptor",
    "proxy",
    "member of a set",
    "frozenset",
    "frozen equals",
    "table of equals",
    "pytree with a weak reference",
    "class",
    "object of a class with it",
    "tree definition",
    "jitted function",
    "cached function",
    "weak key",
    "weak member",
    "copy hooks",
    "finalizer",
    "iterator",
    "weak reference",
    "weak value",
    "weak method",
}
# More of those that are, of mechanisms that have an entry, each with code of its own here.
COPIED: dict[str, Any] = {
    name: lambda w, make=make, read=read: functools.partial(read, make(w))
    for name, make, read in (
        ("property", Checked, lambda c: c.w),
        (
            "default of a table",
            lambda w: collections.defaultdict(lambda: w),
            lambda d: d.default_factory(),
        ),
        ("ordered table", lambda w: collections.OrderedDict(a=0, w=w), lambda d: [*d.values()][1]),
        ("list", lambda w: [None, [w]], lambda a: a[1][0]),
        ("slots that are frozen", Record, lambda r: r.w * r.n),
        ("name that is no plain string", by_names_that_are_no_plain_strings, lambda o: o.w),
        ("slots of attrs", attrs_slots, lambda o: o.twice / 2),
        ("renamed", lambda w: renamed(lambda: w), lambda f: f() if f.__qualname__ == "g" else 0),
        ("partial", lambda w: functools.partial(max, w, key=abs), lambda f: f(0)),
        ("partial of JAX", lambda w: jax.tree_util.Partial(max, 0, w, key=abs), lambda f: f(0)),
    )
}

# Those that hold what is computed from `w`, which `variables=[w]` does not declare; and one whose
# derivative is its own rule.
COMPUTED = {"several leaves", "integer beside"}
DECORATED = {"decorated helper"}
