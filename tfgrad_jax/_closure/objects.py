"""How each kind of object is copied: what makes a new one, and what is put into it.

`recipe` runs for each object that leads to a tracer. Functions are made from their code, cells and
defaults; the containers of Python from their items; other objects from their attributes, without
running code of their class. An object of a class that is written in C, or that has a finalizer,
raises `OpaqueError`; so does one to which something refers weakly.
"""

import collections
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import all_leaves

from tfgrad_jax._jax.types import Wrapper

from .reach import OpaqueError

_FUNCTION, _METHOD = types.FunctionType, types.MethodType
_PARTIAL = (functools.partial, jax.tree_util.Partial)
_MAPPINGS = (collections.OrderedDict, collections.defaultdict, dict)
_CONTAINERS = (*_MAPPINGS, list, set, collections.deque)


class Fill(NamedTuple):
    """What is put into a new object, and how."""

    put: Callable[..., None]
    contents: Sequence[Any]
    hashes: bool = False  # whether `put` hashes the contents


class Recipe(NamedTuple):
    """How to make a copy of an object, and from which values."""

    make: Callable[..., Any]
    parts: Sequence[Any] = ()  # the arguments of `make`, which must exist before the copy
    fills: Sequence[Fill] = ()  # the contents, which may refer to the copy: a list may hold itself
    hashes: bool = False  # whether `make` hashes the parts


def recipe(value: Any, cls: Any) -> Recipe:
    """Return how to copy an object; raise `OpaqueError` if it cannot be copied."""
    if cls is _FUNCTION:
        return _function(value)
    if issubclass(cls, Wrapper):
        make, parts, attributes = value.unwrapped()
        return Recipe(make, parts, _attributes(attributes))
    if cls is types.CellType:
        return Recipe(cls, fills=[Fill(_put_into_cell, [value.cell_contents])])
    if cls is _METHOD:
        return Recipe(cls, (value.__func__, value.__self__))
    if cls is types.BuiltinFunctionType:  # a method of a container, such as `append`
        return Recipe(lambda of, name=value.__name__: getattr(of, name), [value.__self__])
    if cls in _PARTIAL:
        return _partial(value, cls)
    if cls is types.SimpleNamespace:
        return Recipe(cls, fills=_attributes(vars(value)))
    for base in (tuple, frozenset):
        if issubclass(cls, base):
            return _collection(value, cls, base)
    if cls is np.ndarray:
        return _object_array(value)
    base = next((base for base in _CONTAINERS if issubclass(cls, base)), object)
    if weakref.getweakrefcount(value):
        raise OpaqueError(value)
    return _container(value, cls, base) if base is not object else _ordinary(value, cls)


def _function(f: types.FunctionType) -> Recipe:
    code, scope, name, qualname = f.__code__, f.__globals__, f.__name__, f.__qualname__
    cells, keywords = f.__closure__ or (), f.__kwdefaults__ or {}
    count, names = len(cells), list(keywords)

    def make(defaults: Any, *more: Any) -> types.FunctionType:
        new = _FUNCTION(code, scope, name, defaults, more[:count])
        new.__kwdefaults__ = dict(zip(names, more[count:], strict=True)) or None
        if qualname is not code.co_qualname:
            new.__qualname__ = qualname
        return new

    parts = (f.__defaults__, *cells, *keywords.values())
    return Recipe(make, parts, _attributes(vars(f)))


def _put_into_cell(cell: types.CellType, content: Any) -> None:
    cell.cell_contents = content


def _partial(value: Any, cls: Any) -> Recipe:
    names, count = list(value.keywords), 1 + len(value.args)

    def make(*parts: Any) -> Any:
        return cls(*parts[:count], **dict(zip(names, parts[count:], strict=True)))

    parts = [value.func, *value.args, *value.keywords.values()]
    return Recipe(make, parts, _attributes(vars(value)))


def _attributes(attributes: Mapping[str, Any]) -> list[Fill]:
    names = list(attributes)

    def put(new: Any, *values: Any) -> None:
        # Not by `setattr`, which runs the properties of a user's class.
        object.__getattribute__(new, "__dict__").update(zip(names, values, strict=True))

    return [Fill(put, list(attributes.values()))] if attributes else []


def _slots(attributes: Mapping[str, Any]) -> list[Fill]:
    names = list(attributes)

    def put(new: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # not the `__setattr__` of a user's class

    return [Fill(put, list(attributes.values()))] if attributes else []


def _collection(value: Any, cls: Any, base: Any) -> Recipe:
    """Return how to copy a tuple or a frozenset, also of a user's subclass, or a named tuple."""
    try:
        base.__new__(cls)
    except TypeError:  # the class is written in C
        raise OpaqueError(value) from None
    attributes = _attributes(getattr(value, "__dict__", {}))
    make = lambda *items: base.__new__(cls, items)  # noqa: E731
    return Recipe(make, list(value), attributes, hashes=base is frozenset)


def _object_array(value: Any) -> Recipe:
    shape, indices = value.shape, list(np.ndindex(value.shape))

    def put(new: Any, *items: Any) -> None:
        for index, item in zip(indices, items, strict=True):
            new[index] = item

    return Recipe(functools.partial(np.empty, shape, object), fills=[Fill(put, list(value.flat))])


def _container(value: Any, cls: Any, base: Any) -> Recipe:
    """Return how to copy a list, a dict, a set or a deque, also of a user's subclass."""
    fills: list[Fill] = []
    if cls is not base:
        fills += _ordinary(value, cls, base).fills
    if base is collections.deque:
        maxlen = value.maxlen
        fills.append(Fill(lambda new: base.__init__(new, (), maxlen), ()))
    elif base is collections.defaultdict:
        fills.append(Fill(base.__init__, [value.default_factory]))
    if base in _MAPPINGS:
        keys = list(base.keys(value))
        items = [*keys, *(base.__getitem__(value, k) for k in keys)]
        fills.append(Fill(functools.partial(_put_items, base), items, hashes=True))
    else:
        add = base.update if base is set else base.extend
        items = list(base.__iter__(value))
        fills.append(Fill(lambda new, *items: add(new, items), items, hashes=base is set))
    return Recipe(functools.partial(base.__new__, cls), fills=fills)


def _put_items(base: Any, new: Any, *keys_and_values: Any) -> None:
    half = len(keys_and_values) // 2
    for key, value in zip(keys_and_values[:half], keys_and_values[half:], strict=True):
        base.__setitem__(new, key, value)


def _knows_its_objects(cls: Any) -> bool:
    """Return whether a class decides what a new object is: there may be one, or one for each key.

    A registered pytree is a value: it has a constructor of its own for other reasons.
    """
    makers = (getattr(cls, name, None) for name in ("__new__", "__reduce__", "__reduce_ex__"))
    return any(isinstance(maker, types.FunctionType) for maker in makers)


def _ordinary(value: Any, cls: Any, base: Any = object) -> Recipe:
    """Return how to copy an object from its attributes; `base` makes the empty object."""
    if hasattr(cls, "__del__") or (_knows_its_objects(cls) and all_leaves([value])):
        raise OpaqueError(value)
    try:
        base.__new__(cls)  # runs no code of the class
    except TypeError:  # the class is written in C
        raise OpaqueError(value) from None
    state: Any = object.__getstate__(value)  # type: ignore[attr-defined]
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    fills = [*_attributes(attributes or {}), *_slots(slots or {})]
    return Recipe(functools.partial(base.__new__, cls), fills=fills)
