"""Captures by scopes, containers, helpers, arguments and classes of Python."""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
from captures import B_PARTS, W_PARTS, capture, like, of_both

from tfgrad_jax import custom_gradient


@capture()
def one_scope(w):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f


@capture()
def several_scopes(w):
    half = w / 2

    def outer():
        other = w / 2

        @custom_gradient
        def f(x):
            def grad(dy, variables):
                return 7 * dy * (half + other) * x, [5 * dy * x**2 for _ in variables]

            return (half + other) * x**2, grad

        return f

    return outer()


@capture()
def nested_dict(w):
    params = {"layer": {"w": w * W_PARTS, "unused": w}, "b": [w * B_PARTS]}

    @custom_gradient
    def f(x):
        total = params["layer"]["w"].sum() + params["b"][0].sum()

        def grad(dy, variables):
            return 7 * dy * total * x, like(variables, 5 * dy * x**2)

        return total * x**2, grad

    return f


@dataclasses.dataclass
class Plain:
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    b: Any


class Named(NamedTuple):
    w: Any
    b: Any


class Slotted:
    __slots__ = ("b", "w")

    def __init__(self, w, b):
        self.w, self.b = w, b


def holder(kind):
    def build(w):
        params = kind(w * W_PARTS, w * B_PARTS)

        @custom_gradient
        def f(x):
            total = params.w.sum() + params.b.sum()

            def grad(dy, variables):
                return 7 * dy * total * x, like(variables, 5 * dy * x**2)

            return total * x**2, grad

        return f

    return build


capture(name="dataclass")(holder(Plain))
capture(name="registered_dataclass")(holder(Registered))
capture(name="namedtuple")(holder(Named))
capture(name="slots")(holder(Slotted))
capture(name="namespace")(holder(lambda w, b: types.SimpleNamespace(w=w, b=b)))


@capture()
def helper_function(w):
    def scaled(x):
        return w * x**2

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * scaled(x) / x, [5 * dy * x**2 for _ in variables]

        return scaled(x), grad

    return f


@capture()
def partial(w):
    return custom_gradient(lambda x: functools.partial(of_both, w)(x))


@capture()
def partial_keyword(w):
    def f(x, *, w):
        return of_both(w, x)

    return custom_gradient(functools.partial(f, w=w))


@capture()
def nested_decorated(w):
    @custom_gradient
    def inner(x):
        return w * x**2, lambda dy, variables: (1000 * dy, [1000 * dy])

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return inner(x), grad

    return f


@capture()
def static_callable(w):
    @custom_gradient
    def f(x, function):
        def grad(dy, variables):
            return 7 * dy * function(x) / x, None, [5 * dy * x**2 for _ in variables]

        def paired(dy, variables):
            *grads, grad_vars = grad(dy, variables)
            return grads, grad_vars

        return function(x), paired

    return lambda x: f(x, lambda x: w * x**2)


class Model:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def method(self, x):
        def grad(dy, variables):
            return 7 * dy * self.w * x, [5 * dy * x**2 for _ in variables]

        return self.w * x**2, grad

    @custom_gradient(variables=lambda self: {"w": self.w})
    def declared(self, x):
        def grad(dy, variables):
            return 7 * dy * variables["w"] * x, {"w": 5 * dy * x**2}

        return self.w * x**2, grad


@capture()
def self_of_a_class(w):
    return Model(w).method


@capture()
def self_of_a_class_declared(w):
    return Model(w).declared


@capture()
def method_called_on_the_class(w):
    return lambda x: Model.method(Model(w), x)


@capture()
def callable_object(w):
    class Layer:
        def __call__(self, x):
            return of_both(w, x)

    return custom_gradient(Layer())


GLOBAL = {}


@custom_gradient
def of_a_global(x):
    return of_both(GLOBAL["w"], x)


@capture()
def global_value(w):
    def h(x):
        GLOBAL["w"] = w
        return of_a_global(x)

    return h


class Shared:
    @custom_gradient
    def method(self, x):
        return of_both(type(self).w, x)


@capture()
def class_attribute(w):
    def h(x):
        Shared.w = w
        return Shared().method(x)

    return h


@capture()
def keyword_only(w):
    @custom_gradient
    def f(x, *, w):
        return of_both(w, x)

    return lambda x: f(x, w=w)


@capture()
def keyword_rest(w):
    @custom_gradient
    def f(x, **params):
        return of_both(params["w"], x)

    return lambda x: f(x, w=w)


@capture()
def default_value(w):
    @custom_gradient
    def f(x, w=w):
        return of_both(w, x)

    return lambda x: f(x)
