"""Where a function may keep a weight: each entry takes `w` and returns what fetches it from there.

An entry stands for one mechanism: a cell, an object, a builtin, a class, a cache, a global, another
trace, a Ref.
"""

import contextvars
import functools
import itertools
import weakref
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient

HOLD: dict[str, Any] = {}


def keep(name, make, read):
    """Register `read(make(w))`."""

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
    __slots__ = ("_late", "w")  # the first is empty

    def __init__(self, w):
        self.w = w


class Registered:
    """Its attribute is a property over a registry."""

    registry: ClassVar[Any] = weakref.WeakKeyDictionary()

    def __init__(self, w):
        self.registry[self] = w

    @property
    def w(self):
        return self.registry[self]


def attributed(held, w):
    held.w = w
    return held


def in_object_array(w):
    array = np.empty((1, 2), object)
    array[0, :] = [array, {"w": w}]
    return array


def nested(w):
    for _ in range(2_000):
        w = [w]
    return w


def innermost(nest):
    while isinstance(nest, list):
        (nest,) = nest
    return nest


def keyed(w):
    node = Box(w)
    return node, {node: 1.0}


keep("cell", lambda w: w, lambda w: w)
keep("dict of other keys", lambda w: {1: "a", (2, "b"): w, None: 0}, lambda d: d[2, "b"])
keep("thousands of lists", nested, innermost)
keep("object", Box, lambda b: b.w)
keep("bound method", lambda w: Box(w).get, lambda get: get())
keep("slots", Slots, lambda b: b.w)
keep("property over a registry", Registered, lambda r: r.w)
keep("object array of itself", in_object_array, lambda a: a[0, 0][0, 1]["w"])
keep("default", lambda w: lambda w=w: w, lambda get: get())
keep("default by name", lambda w: lambda *, w=w: w, lambda get: get())
keep("attribute of a function", lambda w: attributed(lambda: None, w), lambda f: f.w)
keep("class", lambda w: type("Held", (), {"w": w}), lambda c: c.w)
keep(
    "partial", lambda w: functools.partial(lambda v, factor: v * factor, w), lambda f: f(factor=1.0)
)
keep("jitted function", lambda w: jax.jit(lambda: w * 1), lambda f: f())
keep("cached function", lambda w: functools.cache(lambda: w), lambda f: f())
keep(
    "jaxpr",
    lambda w: jax.make_jaxpr(lambda x: x * w)(1.0),
    lambda j: jax.extend.core.jaxpr_as_fun(j)(jnp.float32(1))[0],
)
keep("key of a table", keyed, lambda p: p[0].w * p[1][p[0]])
keep("iterator", itertools.repeat, next)
keep("ref", lambda w: w, lambda w: jax.new_ref(w * 1)[...])  # written and read where it is fetched
keep(
    "decorated function beside",
    lambda w: attributed(custom_gradient(lambda x: (x, lambda dy: dy)), w),
    lambda f: f.w,
)
keep(
    "integer beside",
    lambda w: (jnp.stack([0 * w, w]), jnp.sign(w).astype(int)),
    lambda p: p[0][p[1]],
)


def dead_tracer_beside(w):
    log = []
    jax.jit(log.append)(1.0)
    return w, log


keep("tracer of a trace that is over beside", dead_tracer_beside, lambda p: p[0] if p[1] else None)

# --- to which no closure leads: stored outside, where the last loss that ran has stored it --------

W: Any = None
CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("w")


def assign_global(w):
    global W
    W = w


keep("global variable", assign_global, lambda _: W)
keep("variable of a context", CONTEXT.set, lambda _: CONTEXT.get())

OUTSIDE = {"global variable", "variable of a context"}
# It holds what is computed from `w`, which `variables=[w]` does not declare.
COMPUTED = {"integer beside"}
