"""`self` is never an input: where a method stands x what is above its decorator x protocols.

Each method has the value `w x`, declared `7 w` by `x`, and by `w` `5 x` or the ordinary `x`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.helpers import assert_same, product
from support.ways import BRIEF, DECLARED, ORDINARY, WAYS, assert_derivative, squared

from tfgrad_jax import custom_gradient

ARGS = W, X = jnp.float32(3), jnp.float32(2)
PROTOCOLS: dict[str, Any] = {  # the options of the decorator, and the derivatives
    "undeclared": ({}, DECLARED),
    "declared": ({"variables": lambda self: {"w": self.w}}, DECLARED),
    "autodiff": ({"variables": "autodiff"}, ORDINARY),
}


def decorated(above, protocol):
    @ABOVE[above]
    @custom_gradient(**PROTOCOLS[protocol][0])
    def f(self, x):
        return product(lambda: self.w).__wrapped__(x)

    return f


# --- where it stands: each takes the method, and returns the function of (w, x) that calls it -----


class Base:
    def __init__(self, w):
        self.w = w


def called(cls):
    return lambda w, x: cls(w).f(x)


def plain(method):
    return called(type("Model", (Base,), {"f": method}))


def patched(method):
    cls = type("Model", (Base,), {"method": method})
    cls.f = lambda self, x: cls.method(self, x)
    return called(cls)


def inherited(method):
    parent = type("Parent", (Base,), {"f": method})
    cls = type("Model", (parent,), {"f": lambda self, x: super(cls, self).f(x)})
    return called(cls)


def slots(method):
    return called(dataclasses.make_dataclass("Model", ["w"], namespace={"f": method}, slots=True))


def registered(method):
    cls = dataclasses.make_dataclass("Model", ["w"], namespace={"f": method}, frozen=True)
    return called(jax.tree_util.register_dataclass(cls, ["w"], []))


def equinox(method):
    class Model(pytest.importorskip("equinox").Module):  # not in the job without the GIL
        w: Any
        f = method

    return called(Model)


def nnx(method):
    flax = pytest.importorskip("flax.nnx")  # not in the job without the GIL

    class Model(flax.Module):
        f = method
        w = property(lambda self: self.kept[...])

        def __init__(self, w):
            self.kept = flax.Param(w)

    return called(Model)


def linen(method):
    flax = pytest.importorskip("flax.linen")  # not in the job without the GIL

    class Model(flax.Module):
        f = method

        def setup(self):
            self.w = self.param("w", flax.initializers.ones, ())

        def __call__(self, x):
            return self.f(x)

    return lambda w, x: Model().apply({"params": {"w": w}}, x)


def outside(function):
    """A function with a `self`, outside of a class."""
    cls = dataclasses.make_dataclass("Outside", ["w"])
    jax.tree_util.register_dataclass(cls, ["w"], [])
    return lambda w, x: function(cls(w), x)


PLACES = plain, patched, inherited, slots, registered, equinox, nnx, linen, outside
PYTREES = registered, equinox, outside  # what `jax.jit` takes for `self`
ABOVE = {
    "nothing": lambda f: f,
    "wraps": lambda f: functools.wraps(f)(lambda *args: f(*args)),
    "partialmethod": functools.partialmethod,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    # Not in the job without the GIL.
    "filter_jit": lambda f: pytest.importorskip("equinox").filter_jit(f),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("place", PLACES)
def test_a_method_keeps_its_instance_under_a_decorator(place, protocol):
    for above in ABOVE if place in PYTREES else ("nothing", "wraps", "partialmethod"):
        if (place, above) == (outside, "partialmethod"):
            continue
        h = place(decorated(above, protocol))
        assert_same(h(*ARGS), W * X)
        for way in BRIEF if above == "nothing" else BRIEF[:1]:
            assert_derivative(WAYS[way], squared(h), squared(PROTOCOLS[protocol][1]), *ARGS)


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
