"""A wrong gradient of a weight is found, or the weight is named, however a layer is handed over."""

import contextvars
import functools
import types
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import X, fact, notes

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import assert_gradient, check_gradient

W = jnp.asarray([1.5, -0.5, 2.0], jnp.float32)
WRONG = "declared = 7 x expected"  # what each layer declares of its weight


def wrong(w, x):
    """Return the value of a layer, and its rule: right of `x`, seven times too much of `w`."""
    return jnp.sin(x) * w**2, lambda dy, variables: (
        dy * jnp.cos(x) * w**2,
        jax.tree.map(lambda _: 14 * dy * jnp.sin(x) * w, variables),
    )


def closure(w):
    return custom_gradient(lambda x: wrong(w, x))


class Layer:
    def __init__(self, w):
        self.params = {"w": w}

    @custom_gradient(variables=lambda self: self.params)
    def __call__(self, x):
        return wrong(self.params["w"], x)

    @custom_gradient
    def apply(self, x):
        return wrong(self.params["w"], x)

    @staticmethod
    def static(params, x):
        return custom_gradient(lambda x: wrong(params["w"], x), variables=params)(x)


class Model:
    def __init__(self, w):
        self.layers = [Layer(w)]

    def __call__(self, x):
        return self.layers[0](x)


class Finalized(Model):
    def __del__(self):
        pass


class Hashed(Model):
    def __hash__(self):
        return 0


class Named(NamedTuple):
    held: Any

    def __call__(self, x):
        return self.held(x)


def wrapped(h):
    @functools.wraps(h)
    def wrapper(*args):
        return h(*args)

    return wrapper


def around(layer):
    return lambda x: 2 * layer(x)


def in_a_jitted_helper(w):
    value = jax.jit(lambda x: wrong(w, x)[0])
    return custom_gradient(lambda x: (value(x), wrong(w, x)[1]), variables=w), X


def in_what_can_be_called(w):
    value = jax.tree_util.Partial(lambda w, x: wrong(w, x)[0], w)
    return custom_gradient(lambda x: (value(x), wrong(w, x)[1]), variables=value), X


def branching_on(w):
    return custom_gradient(lambda x: wrong(w if w[0] > 0 else -w, x), variables=w), X


def of_equinox(w):
    eqx = pytest.importorskip("equinox")

    class Module(eqx.Module):
        w: jax.Array

        @custom_gradient
        def __call__(self, x):
            return wrong(self.w, x)

    return Module(w), X


def of_filter_jit(w):
    return pytest.importorskip("equinox").filter_jit(Layer(w)), X


def of_filter_jit_of_a_module(w):
    module, *args = of_equinox(w)
    return pytest.importorskip("equinox").filter_jit(module), *args


def of_nnx(w):
    nnx = pytest.importorskip("flax.nnx")

    class Module(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(w)

        def __call__(self, x):
            return closure(self.w[...])(x)

    return Module(), X


def of_linen(w):
    nn = pytest.importorskip("flax.linen")

    class Module(nn.Module):
        @nn.compact
        def __call__(self, x):
            return closure(self.param("w", lambda key: w))(x)

    return Module().apply, {"params": {"w": w}}, X


def jitted_before(layer):
    jax.jit(layer)(X)
    if any(isinstance(r.__callback__, types.FunctionType) for r in weakref.getweakrefs(layer)):
        pytest.skip("before JAX 0.12 its references look like those of others")
    return layer


SELF = "self.params['w']"
FOUND = {  # how it is handed over, and the name of the weight
    "an object": (lambda w: (Layer(w), X), SELF),
    "an object that was jitted before": (lambda w: (jitted_before(Layer(w)), X), SELF),
    "a method": (lambda w: (Layer(w).apply, X), SELF),
    "a function of a class": (lambda w: (Layer.apply, Layer(w), X), SELF),
    "a static method": (lambda w: (Layer.static, {"w": w}, X), "params['w']"),
    "jit of a method": (lambda w: (jax.jit(Layer(w).apply), X), SELF),
    "jit of vmap of an object": (lambda w: (jax.jit(jax.vmap(Layer(w))), X[None]), SELF),
    "vmap of a function": (lambda w: (jax.vmap(closure(w)), X[None]), "w"),
    "checkpoint": (lambda w: (jax.checkpoint(closure(w)), X), "w"),
    "a lambda": (lambda w: (around(Layer(w)), X), "layer.params['w']"),
    "a partial": (lambda w: (functools.partial(Layer.static, {"w": w}), X), "args[0]['w']"),
    "a wrapper": (lambda w: (wrapped(Layer(w).apply), X), SELF),
    "an object that holds another": (lambda w: (Model(w), X), "self.layers[0].params['w']"),
    "an argument": (lambda w: (lambda layer, x: layer(x), Layer(w), X), "layer.params['w']"),
    "a jitted helper": (in_a_jitted_helper, "w"),
    "variables that can be called": (in_what_can_be_called, "w"),
    "a function that branches on it": (branching_on, "w"),
    "equinox": (of_equinox, "self.w"),
    "filter_jit of an object": (of_filter_jit, SELF),
    "filter_jit of a module": (of_filter_jit_of_a_module, "self.w"),
    "flax nnx": (of_nnx, "self.w.value"),
    "flax linen": (of_linen, "variables['params']['w']"),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", FOUND)
def test_a_wrong_gradient_of_a_weight_is_found(way):
    hand_over, name = FOUND[way]
    h, *args = hand_over(W)
    report = check_gradient(h, *args, transforms=False)
    found = notes(report)
    assert found.pop(name) == WRONG
    assert "unnamed" not in report.title and "Wrapper" not in report.title
    assert set(found.values()) == {""} and report.unchecked == ()
    with pytest.raises(AssertionError, match=r"WRONG: declared = 7 x expected"):
        assert_gradient(h, *args, transforms=False)


GLOBAL_LAYER, REFERENCES = Layer(W), []
CONTEXT = contextvars.ContextVar("weight", default=W)


def default(w):
    @custom_gradient
    def scale(x, w=w):
        return x * w, lambda dy: (dy * w, 7 * dy * x)

    return scale


def referred(layer):
    REFERENCES.append(weakref.ref(layer))
    return layer


def branching(layer):
    return lambda x: layer(x) if x.sum() > 0 else x


def bounded(w):
    def layer(x):
        if w[0] > 1.5:
            raise ValueError("outside of the domain")
        return wrong(w, x)

    return custom_gradient(layer, variables=w)


def in_a_second_place(read):
    """Return a layer whose declared weight is read where it is not replaced."""
    return lambda w: custom_gradient(lambda x: (read(x), wrong(w, x)[1]), variables=w)


NAMED = {  # how it is handed over, the name of the weight, and why it is not checked
    "a global object": (lambda w: lambda x: GLOBAL_LAYER(x), "GLOBAL_LAYER.params['w']",
                        "a global variable"),
    "a global object in an inner function": (
        lambda w: lambda x: around(lambda x: GLOBAL_LAYER(x))(x),
        "GLOBAL_LAYER.params['w']", "a global variable"),
    "a global object in a branch": (lambda w: branching(lambda x: GLOBAL_LAYER(x)),
                                    "GLOBAL_LAYER.params['w']", "a global variable"),
    "a global object in a `cond`": (
        lambda w: lambda x: jax.lax.cond(x[0] > 0, GLOBAL_LAYER, jnp.sin, x),
        "GLOBAL_LAYER.params['w']", "a global variable"),
    "a global function": (lambda w: lambda x: hidden(x), "GLOBAL_LAYER.params['w']",
                          "a global variable"),
    "an object with a finalizer": (Finalized, "self.layers[0].params['w']",
                                   "`Finalized` defines `__del__`: not copied"),
    "an object with a hash of its own": (Hashed, "self.layers[0].params['w']",
                                         "`Hashed` defines `__hash__`: not copied"),
    "an object that something refers to weakly": (
        lambda w: referred(Layer(w)), SELF, "`Layer` is referred to weakly: not copied"),
    "a named tuple of one": (lambda w: around(Named(Finalized(w))),
                             "layer.held.layers[0].params['w']",
                             "`Finalized` defines `__del__`: not copied"),
    "a default that the call leaves out": (default, "w", "the call leaves it out: pass it"),
    "a context variable": (lambda w: lambda x: closure(CONTEXT.get())(x), "a float32[3]",
                           "found in no object"),
    "a context variable beside it": (in_a_second_place(lambda x: wrong(CONTEXT.get(), x)[0]),
                                     "w", "held where it is not replaced"),
    "a context variable in a branch": (
        in_a_second_place(lambda x: wrong(CONTEXT.get(), x)[0] if x[0] > 0 else x),
        "w", "not seen to change the value"),
    "a value that it may not leave": (bounded, "w", "not seen to change the value"),
    "a global array, which is the argument": (
        lambda w: custom_gradient(lambda x: wrong(X, x)), "X", "a global variable"),
    "a global array that is declared": (
        lambda w: custom_gradient(lambda x: wrong(W, x), variables=[W]), "W", "a global variable"),
}  # fmt: skip


def hidden(x):
    return GLOBAL_LAYER(x)


@pytest.mark.parametrize("way", NAMED)
def test_a_weight_that_cannot_be_replaced_is_named(way):
    make, name, why = NAMED[way]
    h = make(W)
    report = check_gradient(h, X, transforms=False)
    assert report.ok and not report and notes(report) == {"x": ""}
    assert report.unchecked == (f"{name} ({why})",)
    assert str(report).startswith("Gradient of ") and ": ok where it was checked\n" in str(report)
    assert fact(report, "not checked").text == f"{name} ({why})"
    with pytest.raises(AssertionError, match="\nWhat `not checked` names was not") as caught:
        assert_gradient(h, X, transforms=False)
    assert str(caught.value).startswith(str(report))
    assert_gradient(h, X, transforms=False, unchecked="allow")


def test_what_is_held_and_is_no_weight_is_not_named():
    layer, unread, of_rule = Layer(W), jnp.ones(3), jnp.ones(3)
    number, table = jnp.arange(3), np.arange(3, dtype=np.float32)

    def f(x):
        jax.vjp(custom_gradient(lambda x: (x, lambda dy: dy * of_rule)), x)
        y = jnp.cos(x) * jnp.array([1.0, 2.0, 3.0]) * number.astype(x.dtype) + table * x[0]
        return y, unread

    report = check_gradient(lambda x: f(x)[0], X, transforms=False)
    assert report.ok and notes(report) == {"x": ""} and report.unchecked == ()
    fixed = custom_gradient(lambda x: (x * unread, lambda dy: dy * unread))
    report = check_gradient(lambda x: fixed(layer(x)), X, transforms=False)
    assert notes(report) == {"x": "", "layer.params['w']": WRONG} and report.unchecked == ()
    text = "fixed.unread: to differentiate them is an error"
    assert (fact(report, "no gradient").ok, fact(report, "no gradient").text) == (None, text)
