"""Find the way from what a function holds to the tracers in it.

A `Walk` visits every object that the decorated function can reach, apart from its operands, once,
as the garbage collector does. It notes which objects lead to a tracer: `skeleton.py` copies only
these.
"""

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr

from tfgrad_jax._jax.trace import TRACES, is_live, is_operand, is_staging
from tfgrad_jax._jax.types import Wrapper

# How many objects to visit before we trace the call instead. Under staging a trace costs little,
# and `f` sees tracers anyway. Eagerly `f` would lose its values, so there it is the last resort.
_BUDGET, _BUDGET_STAGED = 10_000, 2_000
_BUDGET_INERT = 100_000  # numbers, strings and the like in one container: fast to skip

_FUNCTION, _CELL = types.FunctionType, types.CellType
# Objects of exactly these types hold no tracers, or are searched in another way.
INERT: set[type] = {bool, int, float, complex, str, bytes, bytearray, range, slice, type(None)}
INERT |= {type(Ellipsis), type(NotImplemented), types.ModuleType, types.CodeType, Jaxpr, np.ufunc}
INERT |= {types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType}
INERT |= {types.ClassMethodDescriptorType, types.GetSetDescriptorType}
INERT |= {type(jax.tree_util.default_registry)}
# A trace refers to the whole program that it records, and a user's object may hold one.
_LEAVES = (Tracer, jax.Array, np.generic, np.dtype, jax.Ref, *TRACES)
JITTED = type(jax.jit(len))
CACHED = (JITTED, type(functools.cache(len)))
_SIZED = (list, tuple, dict, set, frozenset, collections.deque)
_WEAK = (weakref.ref, weakref.KeyedRef, weakref.WeakMethod)  # `KeyedRef`: to the values of a table


class TooMuchError(Exception):
    """There are too many objects to visit."""


class OpaqueError(Exception):
    """An object of this `kind` holds a tracer, and we cannot copy it to replace the tracer."""

    def __init__(self, holder: Any) -> None:
        super().__init__(type(holder).__qualname__)
        self.kind = type(holder)


# These do not count towards the budget: a trace of the call would have to run them anyway.
_CODE = (_FUNCTION, _CELL, types.MethodType, functools.partial, Wrapper)


def is_captured(value: Any) -> bool:
    """Return whether a value that a function holds must become an operand: a live tracer, a Ref."""
    if issubclass(type(value), Tracer):
        return is_live(value)
    return is_operand(value)


def is_leaf(value: Any, cls: type) -> bool:
    """Return whether an object, which has this type, holds no others."""
    # Not cached: a cache would keep alive classes made in a function, and the values they hold.
    if cls in INERT or issubclass(cls, _LEAVES):
        return True
    return issubclass(cls, np.ndarray) and value.dtype != object


class Walk:
    """A walk from values, through the objects that they hold, to those that a predicate `takes`.

    It visits each object once, however many others hold it. `taken` has the values that it took,
    and `way` the ids of these and of all objects that lead to one. A patient walk visits more
    objects before it gives up.
    """

    def __init__(
        self,
        values: Sequence[Any],
        takes: Callable[[Any], bool] = is_captured,
        patient: bool = True,
        lenient: bool = False,
    ) -> None:
        self.way: set[int] = set()
        self.taken: dict[int, Any] = {}  # by id
        self.functions: list[types.FunctionType] = []  # that it visited
        self.takes, self.lenient = takes, lenient
        self._budget = _BUDGET if patient or not is_staging() else _BUDGET_STAGED
        # By id: an object, and then the ids of the objects that hold it. As it has the objects, no
        # id is used twice.
        self._seen: dict[int, list[Any]] = {}
        self._visit(values)

    def _visit(self, values: Sequence[Any]) -> None:
        """Visit what the values hold.

        Raises `TooMuchError` if there are too many objects. Raises `OpaqueError`, unless `lenient`,
        as soon as a weak reference leads to a value that is taken: it cannot be copied.
        """
        seen, way = self._seen, self.way
        waiting: list[tuple[int, Iterable[Any]]] = [(0, values)]  # ids, and what these objects hold
        for holder, held in waiting:  # it grows: the nearest ones come first
            for value in held:
                cls, key = type(value), id(value)
                if cls in INERT:
                    continue
                if key in seen:
                    seen[key].append(holder)
                    if key in way:
                        self._mark(holder)
                    continue
                seen[key] = [value, holder]
                list_held = HELD.get(cls)
                is_end = list_held is None and is_leaf(value, cls)
                if (is_end or cls is _CELL) and self.takes(value):
                    self.taken[key] = value
                    self._mark(key)
                    continue
                if is_end:
                    continue
                if cls is _FUNCTION:
                    self.functions.append(value)
                more = (list_held or _held)(value, self._budget)
                if not issubclass(cls, _CODE):
                    self._budget -= 1 + len(more)
                    if self._budget < 0:
                        raise TooMuchError
                waiting.append((key, more))

    def _mark(self, key: int) -> None:
        """Put an object on the way, with all objects that lead to it."""
        marked = [key]
        while marked:
            key = marked.pop()
            if key and key not in self.way:
                self.way.add(key)
                value, *holders = self._seen[key]
                # It cannot be copied, so we need not look further: the modules of linen refer
                # weakly to their parents, and through them to the whole model.
                if type(value) in _WEAK and not self.lenient:
                    raise OpaqueError(value)
                marked += holders


def _held_by_function(f: types.FunctionType, most: int) -> list[Any]:
    more = (f.__defaults__, f.__kwdefaults__, f.__dict__)
    return [*(f.__closure__ or ()), *(held for held in more if held)]


def _held_by_container(value: Any, most: int) -> Sequence[Any]:
    """Return the items of one of Python's containers; see `_held`."""
    size = len(value)
    if size > most:
        if size > _BUDGET_INERT or not _is_inert(value):
            raise TooMuchError
        return ()
    return [*value, *value.values()] if type(value) is dict else list(value)


# What objects of exactly these types hold.
HELD: dict[type, Callable[[Any, int], Sequence[Any]]] = {
    _FUNCTION: _held_by_function,
    _CELL: lambda cell, _: (content_of(cell),),
    types.MethodType: lambda method, _: (method.__func__, method.__self__),
    types.BuiltinFunctionType: lambda function, _: (function.__self__,),
    functools.partial: lambda p, _: (p.func, p.args, p.keywords, p.__dict__),
    **dict.fromkeys(_SIZED, _held_by_container),
    **dict.fromkeys(_WEAK, lambda reference, _: (reference(),)),
    # Not the cached results: they depend on earlier calls.
    **dict.fromkeys(CACHED, lambda function, _: (function.__wrapped__,)),
}


def _held(value: Any, most: int) -> Sequence[Any]:
    """Return what an object of any other type holds; raise `TooMuchError` if that is over `most`.

    A long container of numbers and strings counts as empty.
    """
    cls = type(value)
    if issubclass(cls, Wrapper):  # everything else that it holds is derived from these
        _, parts, attributes = value.unwrapped()
        return [*parts, *attributes.values()]
    if issubclass(cls, type):
        # Only a class that is made in a function can hold a tracer.
        local = [c for c in value.__mro__ if not is_importable(c)]
        return [v for c in local for v in vars(c).values()]
    if issubclass(cls, np.ndarray):  # of objects: others are leaves
        if value.size > most:
            raise TooMuchError
        return list(value.flat)
    if issubclass(cls, _SIZED):
        base: Any = next(base for base in _SIZED if issubclass(cls, base))
        if base.__len__(value) > most:  # not the `__len__` of a user's class
            raise TooMuchError
        if base is dict:  # Python 3.13 shows the attributes of an object to it alone
            return [*dict.keys(value), *dict.values(value), *gc.get_referents(value)]
    return gc.get_referents(value)


def _is_inert(value: Any) -> bool:
    """Return whether a list, a tuple or a dict holds only numbers, strings and the like."""
    if type(value) is dict and not gc.is_tracked(value):
        return True  # up to Python 3.13; 3.14 tracks every dict, so we look at each entry
    if type(value) is dict and not INERT.issuperset(map(type, value.values())):
        return False
    return type(value) in (list, tuple, dict) and INERT.issuperset(map(type, value))


def is_importable(value: Any) -> bool:
    """Return whether a class or a function can be imported by its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value


def content_of(cell: types.CellType, empty: Any = None) -> Any:
    """Return what a variable holds, or `empty` if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
