"""Where a function may hold a weight: each entry takes `w` and returns what fetches it from there.

An entry stands for one mechanism: a cell, a pytree in a cell, an object that is no pytree, a
builtin, a class, a cache, another trace, a Ref. Python has more containers than that; a second one
of the same mechanism proves nothing.
"""

import functools
import itertools
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


class Table(dict):
    """Which has attributes, too."""


def in_object_array(w):
    array = np.empty((1, 2), object)
    array[0, 1] = {"w": w}
    return array


def attributed(held, w):
    held.w = w
    return held


def cyclic(w):
    nodes = {"w": w}
    nodes["self"] = nodes
    return nodes


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
keep("subclass of dict", lambda w: attributed(Table(a=1), w), lambda d: d.w)
keep("bound builtin", lambda w: {"w": w}.get, lambda get: get("w"))
keep("object array", in_object_array, lambda a: a[0, 1]["w"])
keep("attribute of a function", lambda w: attributed(lambda: None, w), lambda f: f.w)
keep("class", lambda w: type("Held", (), {"w": w}), lambda c: c.w)
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


@hold
def decorated_helper(w):
    """Its own rule is asked for second derivatives alone: the caller's rule has the first."""

    @custom_gradient
    def helper(x):
        return w * x, lambda dy, variables: (1000 * dy, [1000 * dy])

    return lambda: helper(1.0)


# Those that hold what is computed from `w`, which `variables=[w]` does not declare; and one whose
# derivative is its own rule.
COMPUTED = {"several leaves", "integer beside"}
DECORATED = {"decorated helper"}
