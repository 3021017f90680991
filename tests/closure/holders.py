"""Where a function may hold a value: a holder takes `w` and returns what fetches it from there."""

import collections
import dataclasses
import functools
import itertools
import operator
import types
import weakref
from typing import Any

import jax
import numpy as np

from tfgrad_jax import custom_gradient

HOLDERS = {}


def holder(hold):
    HOLDERS[hold.__name__.strip("_")] = hold
    return hold


@holder
def bound_builtin(w):
    get = {"w": w}.get
    return lambda: get("w")


@holder
def bound_builtin_of_a_list(w):
    get = [w].__getitem__
    return lambda: get(0)


@holder
def partial_of_a_builtin(w):
    get = functools.partial(operator.getitem, [w])
    return lambda: get(0)


@holder
def object_array(w):
    array = np.empty(2, object)
    array[1] = w
    return lambda: array[1]


@holder
def object_array_in_a_dict(w):
    array = np.empty((1, 2), object)
    array[0, 0] = {"w": w}
    return lambda: array[0, 0]["w"]


@holder
def attribute_of_a_dict(w):
    class Dict(dict):
        pass

    d = Dict(a=1)
    d.w = w
    return lambda: d.w


@holder
def attribute_of_a_list(w):
    class List(list):
        pass

    values = List([1])
    values.w = w
    return lambda: values.w


@holder
def attribute_of_a_tuple(w):
    class Tuple(tuple):
        pass

    values = Tuple([1])
    values.w = w
    return lambda: values.w


@holder
def attribute_of_a_number(w):
    class Float(float):
        pass

    number = Float(1)
    number.w = w
    return lambda: number.w


@holder
def function_attribute(w):
    def function():
        return function.w

    function.w = w
    return function


@holder
def attribute_of_a_decorated_function(w):
    @custom_gradient
    def function(x):
        return function.w * x, lambda dy: dy

    function.w = w
    return lambda: function.w


@holder
def attribute_of_another_function(w):
    def other():
        raise AssertionError

    other.w = w
    return lambda: other.w


@holder
def in_a_slice(w):
    piece = slice(None, w)
    return lambda: piece.stop


@holder
def in_a_deque(w):
    queue = collections.deque([1, w])
    return lambda: queue[1]


@holder
def in_slots(w):
    class Slots:
        __slots__ = ("w",)

    held = Slots()
    held.w = w
    return lambda: held.w


@holder
def in_slots_of_a_base(w):
    class Base:
        __slots__ = ("w",)

    class Derived(Base):
        __slots__ = ("other",)

    held = Derived()
    held.w = w
    return lambda: held.w


@holder
def in_a_namespace(w):
    held = types.SimpleNamespace(inner=types.SimpleNamespace(w=w))
    return lambda: held.inner.w


@holder
def in_a_mapping_proxy(w):
    held = types.MappingProxyType({"w": w})
    return lambda: held["w"]


@holder
def in_a_chain_map(w):
    held = collections.ChainMap({}, {"w": w})
    return lambda: held["w"]


@holder
def in_a_class(w):
    class Held:
        value = w

    return lambda: Held.value


@holder
def in_a_property(w):
    class Held:
        value = property(lambda self: w)

    held = Held()
    return lambda: held.value


@holder
def in_a_bound_method(w):
    class Held:
        def __init__(self):
            self.w = w

        def get(self):
            return self.w

    return Held().get


@holder
def in_a_default(w):
    def get(w=w):
        return w

    return get


@holder
def in_a_keyword_default(w):
    def get(*, w=w):
        return w

    return get


@holder
def in_a_static_field(w):
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["w"])
    @dataclasses.dataclass
    class Held:
        x: Any
        w: Any

    held = Held(1.0, w)
    return lambda: held.w


@holder
def in_aux_data(w):
    @jax.tree_util.register_pytree_node_class
    class Held:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (), (self.w,)

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*aux)

    held = Held(w)
    return lambda: held.w


@holder
def in_aux_data_beside_a_leaf(w):
    @jax.tree_util.register_pytree_node_class
    class Held:
        def __init__(self, child, w):
            self.child, self.w = child, w

        def tree_flatten(self):
            return (self.child,), (self.w,)

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children, *aux)

    held = Held(w, w)
    return lambda: (held.child + held.w) / 2


@holder
def in_a_class_made_by_a_call(w):
    cls = type("Held", (), {"w": w})
    return lambda: cls.w


@holder
def in_a_tree_definition(w):
    partial = jax.tree_util.Partial(lambda: w)
    treedef = jax.tree.structure(partial)
    return lambda: jax.tree.unflatten(treedef, [])()


@holder
def in_a_tree_partial(w):
    return jax.tree_util.Partial(lambda w: w, w)


@holder
def in_a_tree_partial_of_a_closure(w):
    return jax.tree_util.Partial(lambda: w)


@holder
def in_a_jitted_function(w):
    return jax.jit(lambda: w * 1)


@holder
def in_a_cached_function(w):
    return functools.cache(lambda: w)


@holder
def in_a_single_dispatch(w):
    dispatched = functools.singledispatch(lambda _: w)
    return lambda: dispatched(0)


@holder
def in_a_wrapped_function(w):
    def inner():
        return w

    @functools.wraps(inner)
    def outer():
        return inner()

    return outer


@holder
def in_a_weak_reference(w):
    class Held:
        pass

    held = Held()
    held.w = w
    reference = weakref.ref(held)
    get = functools.partial(lambda held: reference().w, held)
    return get


@holder
def in_a_cycle(w):
    nodes = {"w": w}
    nodes["self"] = nodes
    return lambda: nodes["self"]["self"]["w"]


@holder
def in_a_nested_list(w):
    deep = w
    for _ in range(30):
        deep = [deep]

    def get():
        value = deep
        while isinstance(value, list):
            (value,) = value
        return value

    return get


@holder
def in_a_dict_with_keys_of_several_types(w):
    held = {1: 1.0, "a": [2.0], (2, "b"): w, None: 0}
    return lambda: held[2, "b"]


@holder
def in_a_user_dict(w):
    held = collections.UserDict(w=w)
    return lambda: held["w"]


@holder
def in_an_iterator(w):
    return functools.partial(next, itertools.repeat(w))
