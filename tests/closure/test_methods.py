"""`self` is never an input: kinds of class x what stands above the decorated method x protocols.

Each method has the value `w x`, declared `7 w` by `x`, and by `w` `5 x` or the ordinary `x`.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.helpers import assert_same, product, sample
from support.ways import BRIEF, WAYS, assert_derivative, gradient, hand_written, squared

from tfgrad_jax import custom_gradient

ARGS = W, X = jnp.float32(3), jnp.float32(2)
DECLARED = hand_written(lambda w, x: w * x, lambda w, x: 5 * x, lambda w, x: 7 * w)
ORDINARY = hand_written(lambda w, x: w * x, lambda w, x: x, lambda w, x: 7 * w)
PROTOCOLS: dict[str, Any] = {  # the options of the decorator, and the derivatives
    "undeclared": ({}, DECLARED),
    "declared": ({"variables": lambda self: {"w": self.w}}, DECLARED),
    "autodiff": ({"variables": "autodiff"}, ORDINARY),
}


def body(self, x):
    return product(lambda: self.w).__wrapped__(x)


# Of each kind of class: its decorator, its base, and what stands in its body.
MODEL = """
{decorator}
class Model({base}):
    {body}

    @above
    @decorate
    def {name}(self, x):
        return body(self, x)
"""
INIT = "def __init__(self, w): self.w = w"
SETUP = "def setup(self): self.w = self.param('w', linen.initializers.ones, ())"
KEPT = "def __init__(self, w): self.kept = nnx.Param(w)\n    w = property(lambda s: s.kept[...])"
REGISTERED = "@jax.tree_util.register_dataclass\n@dataclasses.dataclass(frozen=True)"
CLASSES = {
    "plain": ("", "", INIT),
    "slots": ("@dataclasses.dataclass(slots=True)", "", "w: Any"),
    "registered": (REGISTERED, "", "w: Any"),
    "equinox": ("", "equinox.Module", "w: Any"),
    "flax struct": ("@struct.dataclass", "", "w: Any"),
    "nnx": ("", "nnx.Module", KEPT),
    "linen": ("", "linen.Module", SETUP + "\n    def __call__(self, x): return self.f(x)"),
    "callable linen": ("", "linen.Module", SETUP),
    "callable": ("", "", INIT),
}
LIBRARIES = {
    "equinox": "equinox",
    "struct": "flax.struct",
    "nnx": "flax.nnx",
    "linen": "flax.linen",
}


def logged(f):
    return functools.wraps(f)(lambda *args: f(*args))


ABOVE = {
    "nothing": lambda f: f,
    "wraps": logged,
    "partialmethod": functools.partialmethod,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "filter_jit": lambda f: pytest.importorskip("equinox").filter_jit(f),
}
PYTREES = {"registered", "equinox", "flax struct"}  # what `jax.jit` takes for `self`
EVERY = [
    (kind, above, protocol)
    for kind, above, protocol in itertools.product(CLASSES, ABOVE, PROTOCOLS)
    if kind in PYTREES or not any(word in above for word in ("jit", "checkpoint"))
    if (kind, above) != ("callable linen", "partialmethod")  # linen itself does not take it
]


def model(kind, above, protocol):
    """Return the class, and the method of a new instance as a function of (w, x)."""
    decorator, base, members = CLASSES[kind]
    used = [name for name in LIBRARIES if name in decorator + base]
    namespace = {name: pytest.importorskip(LIBRARIES[name]) for name in used}
    namespace |= {"Any": Any, "dataclasses": dataclasses, "jax": jax, "__name__": __name__}
    namespace |= {"above": ABOVE[above], "decorate": custom_gradient(**PROTOCOLS[protocol][0])}
    namespace["body"] = body
    name = "__call__" if "callable" in kind else "f"
    source = MODEL.format(decorator=decorator, base=base, body=members, name=name)
    exec(source, namespace)
    cls = namespace["Model"]
    if "linen" in kind:
        return cls, lambda w, x: cls().apply({"params": {"w": w}}, x)
    return cls, lambda w, x: getattr(cls(w), name)(x)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_method_under_a_decorator_has_its_gradients(kind):
    for of_kind, above, protocol in EVERY:
        if of_kind == kind:
            _, h = model(kind, above, protocol)
            assert_same(h(*ARGS), W * X)
            assert_same(gradient(h)(*ARGS), gradient(PROTOCOLS[protocol][1])(*ARGS))


CORE = [(kind, "nothing", "undeclared") for kind in CLASSES]


@pytest.mark.parametrize(("kind", "above", "protocol"), sample(EVERY, 5, CORE))
def test_a_method_under_a_decorator_and_transformations(kind, above, protocol):
    _, h = model(kind, above, protocol)
    for name in BRIEF:
        assert_derivative(WAYS[name], squared(h), squared(PROTOCOLS[protocol][1]), *ARGS)


# --- methods that are moved, and functions that have a `self` -------------------------------------


def patched(cls, f):
    cls.f = lambda self, x: f(self, x)
    return cls


def derived(cls, f):
    return type("Derived", (cls,), {"f": lambda self, x: super(type(self), self).f(x)})


def borrowed(cls, f):
    made = {"__init__": cls.__init__, "g": f, "f": lambda self, x: self.g(x)}
    return type("Made", (), made)


MOVES = {"patched": patched, "inherited": derived, "borrowed": borrowed}  # to a method `f`
OUTSIDE = dataclasses.make_dataclass("Outside", ["w"])
jax.tree_util.register_dataclass(OUTSIDE, data_fields=["w"], meta_fields=[])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("move", [*MOVES, *(a for a in ABOVE if a != "partialmethod")])
def test_a_method_that_is_moved_keeps_its_instance(move, protocol):
    """And so does a function with a `self` that is written outside of a class."""
    options, oracle = PROTOCOLS[protocol]
    if move in MOVES:
        cls, _ = model("plain", "nothing", protocol)
        moved = MOVES[move](cls, cls.f)
        h = lambda w, x: moved(w).f(x)  # noqa: E731
    else:
        f = ABOVE[move](custom_gradient(**options)(lambda self, x: body(self, x)))
        h = lambda w, x: f(OUTSIDE(w), x)  # noqa: E731
    for name in BRIEF[:3]:
        assert_derivative(WAYS[name], squared(h), squared(oracle), *ARGS)


# --- what has no instance -------------------------------------------------------------------------


class Scaled:
    """Its static methods take an instance of their own class, as an operator does."""

    def __init__(self, w):
        self.w = w

    inside = staticmethod(custom_gradient(lambda one, x: times(one, x)))
    outside = custom_gradient(staticmethod(lambda one, x: times(one, x)))
    jitted = staticmethod(jax.jit(custom_gradient(lambda one, x: times(one, x))))
    class_inside = classmethod(custom_gradient(lambda cls, one, x: times(one, x)))
    class_outside = custom_gradient(classmethod(lambda cls, one, x: times(one, x)))


def times(one, x):
    return one.w * x, lambda dy: (Scaled(5 * dy * x), 7 * dy * one.w)


jax.tree_util.register_pytree_node(
    Scaled, lambda s: ((s.w,), None), lambda _, children: Scaled(*children)
)


@pytest.mark.parametrize("name", ["inside", "outside", "jitted", "class_inside", "class_outside"])
def test_an_instance_given_to_a_static_or_class_method_is_an_input(name):
    h = lambda w, x: getattr(Scaled, name)(Scaled(w), x)  # noqa: E731
    for way in BRIEF[:3]:
        assert_derivative(WAYS[way], squared(h), squared(DECLARED), *ARGS)
