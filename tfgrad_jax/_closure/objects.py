"""How each kind of object is copied: what makes a new one, from which parts.

`recipe` runs for each object that leads to a tracer. Functions are made from their code, cells and
defaults; the containers of Python from their items; other objects from their attributes, without
running code of their class. If a class defines how its objects are copied, we do not guess: a
registered pytree is made by `tree_unflatten`, and any other such object raises `OpaqueError`. So
does one with a weak reference to it.
"""

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.tree_util import all_leaves, tree_flatten, tree_unflatten

from tfgrad_jax._types import Wrapper

from .reach import OpaqueError, Walk

_FUNCTION, _METHOD = types.FunctionType, types.MethodType
_PARTIAL = (functools.partial, jax.tree_util.Partial)
_MAPPINGS = (collections.OrderedDict, collections.defaultdict, dict)
_CONTAINERS = (*_MAPPINGS, list, set, collections.deque)
# A class that defines one of these says that its objects are more than their attributes.
HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
HOOKS += ("__new__", "__del__", "__getattribute__")


# A function that puts contents into a new object, and the contents.
Fill: TypeAlias = tuple[Callable[..., None], Sequence[Any]]


class Recipe(NamedTuple):
    """How to make a copy of an object, and from which values."""

    make: Callable[..., Any]
    parts: Sequence[Any] = ()  # the arguments of `make`, which must exist before the copy
    fill: Sequence[Fill] = ()  # the contents, which may refer to the copy: a list may hold itself


def recipe(value: Any, cls: Any, walk: Walk | None) -> Recipe:
    """Return how to copy an object; raise `OpaqueError` if it cannot be copied."""
    if cls is _FUNCTION:
        return _function(value)
    if issubclass(cls, Wrapper):
        make, parts, attributes = value.unwrapped()
        return Recipe(make, parts, _attributes(attributes))
    assert walk is not None  # without a walk, only functions are copied
    if cls is tuple or cls is frozenset:
        return Recipe(lambda *items: cls(items), tuple(value))
    if cls is _METHOD:
        return Recipe(cls, (value.__func__, value.__self__))
    if cls in _PARTIAL:
        parts = (value.func, value.args, value.keywords)
        return Recipe(lambda f, args, keywords: cls(f, *args, **keywords), parts)
    if cls is types.SimpleNamespace:
        return Recipe(cls, fill=_attributes(vars(value)))
    if cls is np.ndarray:
        return _object_array(value)
    for base in _CONTAINERS:
        if issubclass(cls, base):
            return _container(value, cls, base)
    try:
        return _ordinary(value, cls)
    except OpaqueError:
        if all_leaves([value]) or weakref.getweakrefcount(value):
            raise
    return _pytree(value, walk)


def _function(f: types.FunctionType) -> Recipe:
    code, scope, name, qualname = f.__code__, f.__globals__, f.__name__, f.__qualname__

    def make(*cells: types.CellType) -> types.FunctionType:
        new = _FUNCTION(code, scope, name, None, cells)
        if qualname is not code.co_qualname:
            new.__qualname__ = qualname
        return new

    # The defaults come first: a wrapper reads the signature of its function when it is made.
    defaults = {"__defaults__": f.__defaults__, "__kwdefaults__": f.__kwdefaults__}
    first = {name: held for name, held in defaults.items() if held}
    return Recipe(make, f.__closure__ or (), [*_attributes(first), *_attributes(vars(f))])


def _attributes(attributes: Mapping[str, Any]) -> list[Fill]:
    if not attributes:
        return []
    names = list(attributes)

    def fill(new: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # not the `__setattr__` of a user's class

    return [(fill, list(attributes.values()))]


def _object_array(value: Any) -> Recipe:
    shape = value.shape

    def make(*items: Any) -> Any:
        new = np.empty(len(items), object)
        new[:] = items
        return new.reshape(shape)

    return Recipe(make, list(value.flat))


def _container(value: Any, cls: Any, base: Any) -> Recipe:
    """Return how to copy a list, a dict, a set or a deque, also of a user's subclass."""
    fill: list[Fill] = []
    if cls is not base:
        fill += _ordinary(value, cls, base).fill
    if base is collections.deque:
        maxlen = value.maxlen
        fill.append((lambda new: base.__init__(new, (), maxlen), ()))
    elif base is collections.defaultdict:
        fill.append((base.__init__, [value.default_factory]))
    if base in _MAPPINGS:
        keys = list(base.keys(value))
        fill.append((_put_items(base), [*keys, *(base.__getitem__(value, k) for k in keys)]))
    else:
        put = base.update if base is set else base.extend
        fill.append((lambda new, *items: put(new, items), list(base.__iter__(value))))
    return Recipe(functools.partial(base.__new__, cls), fill=fill)


def _put_items(base: Any) -> Callable[..., None]:
    def put(new: Any, *keys_and_values: Any) -> None:
        half = len(keys_and_values) // 2
        for key, value in zip(keys_and_values[:half], keys_and_values[half:], strict=True):
            base.__setitem__(new, key, value)

    return put


def _pytree(value: Any, walk: Walk) -> Recipe:
    """Return how to copy a registered pytree, from its children and its static part."""
    children, treedef = tree_flatten(value, is_leaf=lambda v: v is not value)
    walk.leads(children)  # `tree_flatten` may have made objects that the walk has not seen
    fill: Sequence[Fill] = ()
    if dataclasses.is_dataclass(value):  # its registration may drop fields
        names = (f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        fill = _attributes({name: getattr(value, name) for name in names})
    cls, static = treedef.node_data()
    if not walk.leads([static]):
        return Recipe(lambda *children: tree_unflatten(treedef, children), children, fill)
    leaves, of_nodes = treedef.children(), type(treedef).from_node_data_and_children

    def make(static: Any, *children: Any) -> Any:
        new = of_nodes(jax.tree_util.default_registry, (cls, static), leaves)
        return tree_unflatten(new, children)

    return Recipe(make, (static, *children), fill)


def _ordinary(value: Any, cls: Any, base: Any = object) -> Recipe:
    """Return how to copy an object from its attributes; `base` makes the empty object."""
    has_hooks = any(getattr(cls, n, None) is not getattr(base, n, None) for n in HOOKS)
    if has_hooks or weakref.getweakrefcount(value):
        raise OpaqueError(value)
    try:
        base.__new__(cls)  # runs no code of the class
    except TypeError:  # the class is written in C
        raise OpaqueError(value) from None
    state: Any = object.__getstate__(value)  # type: ignore[attr-defined]
    if isinstance(state, tuple):  # with slots
        state = (state[0] or {}) | state[1]
    return Recipe(functools.partial(base.__new__, cls), fill=_attributes(state or {}))
