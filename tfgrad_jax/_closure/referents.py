"""What objects hold: their referents, as the garbage collector sees them.

`REFERENTS`, by type, and `referents_of` list them for the walk of `reach.py`, without those that
hold no tracer for certain.
"""

import collections
import functools
import gc
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr

from tfgrad_jax._jax.types import Copied, Inert
from tfgrad_jax._messages.source import codes_inside, names_in

from .objects import Object, attributes_of, content_of

TRACES = jax.core.Trace, type(jax.extend.core.get_opaque_trace_state(()))
# In one container: numbers and strings, and records of them, are fast to skip.
_BUDGET_INERT, _BUDGET_RECORDS, _FEW, _MANY = 2_000_000, 50_000, 1_000, 200


_FUNCTION, _CELL = types.FunctionType, types.CellType
# Objects of exactly these types hold no tracers, or are searched in another way: the defaults in a
# signature are those of its function.
INERT: set[type] = {bool, int, float, complex, str, bytes, bytearray, range, slice, type(None)}
INERT |= {type(Ellipsis), type(NotImplemented), types.ModuleType, types.CodeType, np.ufunc}
INERT |= {types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType}
INERT |= {types.ClassMethodDescriptorType, types.GetSetDescriptorType, inspect.Signature}
INERT |= {type(jax.tree_util.default_registry)}
# A trace refers to the whole program that it records, and a user's object may hold one.
_LEAVES = (Tracer, jax.Array, np.generic, np.dtype, jax.Ref, Inert, *TRACES)
JITTED = type(jax.jit(len))
CACHED = (JITTED, type(functools.cache(len)))
_SIZED = (list, tuple, dict, set, frozenset, collections.deque)
_WEAK = (weakref.ref, weakref.KeyedRef, weakref.WeakMethod)  # `KeyedRef`: to the values of a table
# What shows others to us alone, or to nobody; and what may be looked for.
_OPAQUE = (Tracer, jax.Array, jax.Ref, np.ndarray, types.BuiltinFunctionType, Copied)
_OPAQUE += (*_WEAK, *weakref.ProxyTypes, *CACHED)
# These do not count towards the budget of a walk: a trace would have to run them anyway.
CODE = {_FUNCTION, _CELL, types.MethodType, functools.partial}


def is_leaf(value: Object, cls: type) -> bool:
    """Return whether an object, which has this type, holds no others."""
    # Not cached: a cache would keep alive classes made in a function, and the values they hold.
    if cls in INERT or issubclass(cls, _LEAVES):
        return True
    return issubclass(cls, np.ndarray) and value.dtype != object


# What an object holds; None if that is more than so many others.
Referents: TypeAlias = Sequence[Object] | None


def _of_function(f: types.FunctionType, most: int) -> Referents:
    more = (f.__defaults__, f.__kwdefaults__, f.__dict__)
    return [*(f.__closure__ or ()), *(held for held in more if held)]


def _of_container(value: Object, most: int) -> Referents:
    """Return the items of one of Python's containers; a large one of numbers has none."""
    if len(value) < 10:
        return [*value, *value.values()] if type(value) is dict else list(value)
    if type(value) is not dict:
        return _sifted(most, value)
    # Python does not track a dict of numbers and strings (up to 3.13); nor a small one that shows
    # the attributes of an object, whatever they are.
    if len(value) > _FEW and not gc.is_tracked(value):
        return ()
    return _sifted(most, value, value.values())


def _sifted(most: int, *parts: Collection[Object]) -> Referents:
    """Return those values that may lead to a tracer; None if that is more than so many.

    A look at many at once takes a fraction of the time of a visit to each.
    """
    held: list[Object] = []
    for part in parts:
        if len(part) > _BUDGET_INERT:
            return None
        others = len(part) - sum(map(INERT.__contains__, map(type, part)))
        if others > _BUDGET_RECORDS:
            return None
        if others == len(part):
            held += part
        elif others:
            held += [v for v in part if type(v) not in INERT]
    if len(held) > _FEW:
        some = [held[i : i + _MANY] for i in range(0, len(held), _MANY)]
        held = [v for values in some if not _are_inert(values) for v in values]
    return held if len(held) <= most else None


def _are_inert(values: Iterable[Object]) -> bool:
    """Return whether values lead to nothing but numbers, strings and the like, a few steps away."""
    for _ in range(6):
        every = [v for v in values if type(v) not in INERT]
        kinds = set(map(type, every))
        if np.ndarray in kinds:
            every = [v for v in every if type(v) is not np.ndarray or v.dtype == object]
            kinds = set(map(type, every))
        if not every or any(issubclass(cls, _OPAQUE) or cls in CODE for cls in kinds):
            return not every
        if any(issubclass(cls, type) for cls in kinds):
            classes = {id(v): v for v in every if issubclass(type(v), type)}
            if not all(map(is_importable, classes.values())):
                return False
            every = [v for v in every if id(v) not in classes]
        # Python 3.13 shows the attributes of an object to it alone, not to its `__dict__`.
        items = [dict.values(v) for v in every if issubclass(type(v), dict)]
        values = itertools.chain(gc.get_referents(*every), *items)
    return False


# By exact type.
REFERENTS: dict[type, Callable[[Object, int], Referents]] = {
    _FUNCTION: _of_function,
    _CELL: lambda cell, _: (content_of(cell),),
    types.MethodType: lambda method, _: (method.__func__, method.__self__),
    types.BuiltinFunctionType: lambda function, _: (function.__self__,),
    functools.partial: lambda p, _: (p.func, p.args, p.keywords, p.__dict__),
    **dict.fromkeys(_SIZED, _of_container),
    **dict.fromkeys(_WEAK, lambda reference, _: (reference(),)),
    # Before JAX 0.12, a `ClosedJaxpr` holds the constants.
    Jaxpr: lambda jaxpr, _: (getattr(jaxpr, "consts", ()),),
    # Not the cached results: they depend on earlier calls.
    **dict.fromkeys(CACHED, lambda function, _: (function.__wrapped__,)),
}


def referents_of(value: Object, most: int) -> Referents:
    """Return what an object of any other type holds."""
    cls = type(value)
    if issubclass(cls, Copied):  # not its `__dict__`, which would count towards the budget
        return list(attributes_of(value).values())
    if issubclass(cls, type):
        # Only a class that is made in a function can hold a tracer.
        local = [c for c in value.__mro__ if not is_importable(c)]
        return [v for c in local for v in vars(c).values()]
    if issubclass(cls, np.ndarray):  # of objects: others are leaves
        return _sifted(most, list(value.flat))
    held = gc.get_referents(value)
    if issubclass(cls, dict):  # Python 3.13 shows the attributes of an object to it alone
        held += [*dict.keys(value), *dict.values(value)]
    return _sifted(most, held)


def globals_of(f: types.FunctionType) -> dict[str, Object]:
    """Return the global variables that a function reads, or one that is written inside it."""
    codes = (f.__code__, *codes_inside(f.__code__))
    names = (name for code in codes for name in names_in(code, "LOAD_GLOBAL", "LOAD_NAME"))
    return {name: f.__globals__[name] for name in names if name in f.__globals__}


def is_importable(value: Object) -> bool:
    """Return whether a class or a function can be imported by its name."""
    found: Object = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value
