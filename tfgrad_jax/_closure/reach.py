"""Find the tracers that values hold, and the way to each of them.

`reach` visits every object that a function holds, directly and through others, once, as the garbage
collector does. The objects that lead to a tracer are *on the way*: `skeleton.py` copies only these.
If one of them is not copied, or there is too much to visit, `Reached.obstacle` says so, and the
function must be traced.
"""

import collections
import dataclasses
import dis
import functools
import gc
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr

from tfgrad_jax._jax.trace import TRACES, is_below, is_live, is_operand
from tfgrad_jax._jax.types import Copied, Inert

from .objects import (
    UNWRAPPED,
    Kind,
    Object,
    annotations_of,
    attributes_of,
    can_be_key,
    content_of,
    kind_of,
)

Id: TypeAlias = int  # of an object that is kept alive meanwhile

# How many objects to visit. Where JAX records operations, a trace costs little and `f` sees tracers
# in any case. Eagerly `f` would lose its values, so there a trace is the last resort.
BUDGET, BUDGET_STAGED = 10_000, 2_000
# In one container: numbers and strings, and records of them, are fast to skip.
_BUDGET_INERT, _BUDGET_RECORDS, _FEW, _MANY = 2_000_000, 50_000, 1_000, 200

TOO_MUCH = "beside many thousands of objects, which may all hold others"

_FUNCTION, _CELL = types.FunctionType, types.CellType
# Objects of exactly these types hold no tracers, or are searched in another way: the defaults in a
# signature are those of its function.
_INERT: set[type] = {bool, int, float, complex, str, bytes, bytearray, range, slice, type(None)}
_INERT |= {type(Ellipsis), type(NotImplemented), types.ModuleType, types.CodeType, np.ufunc}
_INERT |= {types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType}
_INERT |= {types.ClassMethodDescriptorType, types.GetSetDescriptorType, inspect.Signature}
_INERT |= {type(jax.tree_util.default_registry)}
# A trace refers to the whole program that it records, and a user's object may hold one.
_LEAVES = (Tracer, jax.Array, np.generic, np.dtype, jax.Ref, Inert, *TRACES)
JITTED = type(jax.jit(len))
CACHED = (JITTED, type(functools.cache(len)))
_SIZED = (list, tuple, dict, set, frozenset, collections.deque)
_WEAK = (weakref.ref, weakref.KeyedRef, weakref.WeakMethod)  # `KeyedRef`: to the values of a table
# What shows others to us alone, or to nobody; and what may be looked for.
_OPAQUE = (Tracer, jax.Array, jax.Ref, np.ndarray, types.BuiltinFunctionType, Copied)
_OPAQUE += (*_WEAK, *weakref.ProxyTypes, *CACHED)
# These do not count towards the budget: a trace of the call would have to run them anyway.
_CODE = {_FUNCTION, _CELL, types.MethodType, functools.partial}


@dataclasses.dataclass(slots=True)
class Reached:
    """What values hold, directly and through others."""

    captured: dict[Id, Object]  # the tracers, or whatever else was looked for, in order
    # These, and all objects that lead to one, with how each is copied, or why it is not.
    way: dict[Id, Kind | str]
    functions: list[types.FunctionType]  # that were visited, and have variables
    mutable: list[Object]  # what else was visited and may be changed: containers, objects
    assigned: dict[Id, str]  # the variables to which these assign: cells, with their names
    # Why the values cannot be copied around others; "" if they can be.
    obstacle: str
    is_complete: bool  # False if the visit was given up
    # An object, and the ids of those that hold it. As it has the objects, no id is used twice.
    visited: dict[Id, list[Object]]

    @property
    def is_copied(self) -> bool:
        """Return whether all objects on the way are copied. Always, if there is no obstacle."""
        return all(isinstance(kind, Kind) or k in self.captured for k, kind in self.way.items())

    def on_way(self) -> list[Object]:
        """Return the objects that lead to a captured value."""
        return [self.visited[key][0] for key in self.way if key not in self.captured]


def is_captured(value: Object) -> bool:
    """Return whether a value that a function holds must become an operand: a live tracer, a Ref."""
    return is_live(value) if isinstance(value, Tracer) else is_operand(value)


def reach(
    values: Sequence[Object],
    takes: Callable[[Object], bool] = is_captured,
    *,
    variables: Container[Id] = (),
    ends: Container[Id] = (),
    budget: int = BUDGET,
    lenient: bool = False,
) -> Reached:
    """Visit what the values hold, up to the first obstacle.

    `takes` says which values to capture; so are these `variables`, cells. `ends` says what not to
    look into. If lenient, only too much to visit is an obstacle: what is not copied will be shared,
    and a jitted function will be copied without the `jit`.
    """
    found = Reached({}, {}, [], [], {}, "", True, {})
    visited, way = found.visited, found.way
    tables: list[tuple[Id, list[Object]]] = []  # with those of their keys that may lead to a tracer
    waiting: list[tuple[Id, Iterable[Object]]] = [(0, values)]  # what these objects hold
    for holder, held in waiting:  # it grows: the nearest ones come first
        for value in held:
            cls, key = type(value), id(value)
            if cls in _INERT:
                continue
            if key in visited:
                visited[key].append(holder)
                if key in way:
                    _mark(found, holder, lenient)
                continue
            visited[key] = [value, holder]
            if cls not in _CODE and not issubclass(cls, Copied):
                budget -= 1
            if key in ends:
                continue
            list_held = _HELD.get(cls)
            is_end = list_held is None and is_leaf(value, cls)
            if takes(value) if is_end else key in variables:
                found.captured[key] = value
                way[key] = ""
                _mark(found, holder, lenient)
                continue
            if is_end:
                continue
            if cls is _FUNCTION and value.__closure__:
                found.functions.append(value)
                found.assigned |= assigned_by(value)
            elif cls is types.GeneratorType:
                found.assigned |= _own_variables(value)
            elif key in found.assigned and is_below(content_of(value)):
                continue
            more = (list_held or _held)(value, budget)
            if more is not None and not (cls in _CODE or cls is tuple or issubclass(cls, Copied)):
                found.mutable.append(value)
            if more is None or budget < 0:
                found.obstacle, found.is_complete = TOO_MUCH, False
                return found
            if more and issubclass(cls, dict):
                keys = [k for k in dict.__iter__(value) if type(k) not in _INERT]
                tables += [(key, keys)] if keys else []
            waiting.append((key, more))
        if found.obstacle:
            return found
    for key, keys in tables:
        # The hash may read what the key holds, and copies are empty when the tables are filled.
        if key in way and not all(can_be_key(k, way) for k in keys):
            way[key] = "a `dict` with a key whose class has a `__hash__`"
            if not lenient:
                found.obstacle = "in a key of a `dict`, whose class has a `__hash__`"
    return found


def _mark(found: Reached, key: Id, lenient: bool) -> None:
    """Put an object on the way, with all objects that lead to it."""
    marked = [key]
    while marked:
        key = marked.pop()
        if key and key not in found.way:
            value, *holders = found.visited[key]
            marked += holders
            if lenient and type(value) in CACHED:
                kind: Kind | str = UNWRAPPED
            else:
                kind = kind_of(value, type(value))
            found.way[key] = kind
            if isinstance(kind, str) and not lenient:
                # Look no further: the modules of linen refer weakly to their parents, and through
                # them to the whole model. 64 layers would each walk through all of it.
                found.obstacle = f"in an object that is not copied: {kind}"
                found.is_complete = False
                return


def assigned_by(f: types.FunctionType) -> dict[Id, str]:
    """Return the variables of outer scopes to which a function assigns, by the ids of their cells.

    They are the user's own, as a counter is: they are not copied. That is an error only if such a
    variable holds a value of the derivative that is being computed. A value of the level below, at
    which `f` runs, is one that an earlier call has left there; eagerly it would be no tracer.
    """
    names = _assigned(f.__code__)
    if not names:
        return {}
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return {id(cell): name for name, cell in cells if name in names}


def constants_of(f: types.FunctionType) -> list[Object]:
    """Return its defaults, and what outer and global variables hold, but those it assigns to."""
    code, assigned = f.__code__, assigned_by(f)
    stored = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    names = [name for name in code.co_names if name in f.__globals__ and name not in stored]
    cells = [cell for cell in f.__closure__ or () if id(cell) not in assigned]
    variables = [*map(f.__globals__.__getitem__, names), *map(content_of, cells)]
    return [*variables, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]


@functools.cache
def _assigned(code: types.CodeType) -> frozenset[str]:
    """Return the variables of outer scopes to which a function, or one inside it, assigns."""
    stores = ("STORE_DEREF", "DELETE_DEREF")
    names = {i.argval for i in dis.get_instructions(code) if i.opname in stores}
    inner = [_assigned(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(names.union(*inner).intersection(code.co_freevars))


def _own_variables(generator: Object) -> dict[Id, str]:
    """Return the cells of a generator that waits, without those of outer scopes: they are live."""
    held = gc.get_referents(generator)
    functions = [f for f in held if type(f) is _FUNCTION and f.__code__ is generator.gi_code]
    outer = {id(cell) for f in functions for cell in f.__closure__ or ()}
    return {id(c): "" for c in held if type(c) is _CELL and id(c) not in outer}


def is_leaf(value: Object, cls: type) -> bool:
    """Return whether an object, which has this type, holds no others."""
    # Not cached: a cache would keep alive classes made in a function, and the values they hold.
    if cls in _INERT or issubclass(cls, _LEAVES):
        return True
    return issubclass(cls, np.ndarray) and value.dtype != object


# --- what objects hold ----------------------------------------------------------------------------

# What an object holds; None if that is more than so many others.
Held: TypeAlias = Sequence[Object] | None


def _held_by_function(f: types.FunctionType, most: int) -> Held:
    more = (f.__defaults__, f.__kwdefaults__, f.__dict__, annotations_of(f))
    return [*(f.__closure__ or ()), *(held for held in more if held)]


def _held_by_container(value: Object, most: int) -> Held:
    """Return the items of one of Python's containers; one of numbers and strings has none."""
    if type(value) is not dict:
        return _sifted(most, value)
    # Python does not track a dict of numbers and strings (up to 3.13); nor a small one that shows
    # the attributes of an object, whatever they are.
    if len(value) > _FEW and not gc.is_tracked(value):
        return ()
    return _sifted(most, value, value.values())


def _sifted(most: int, *parts: Collection[Object]) -> Held:
    """Return those values that may lead to a tracer; None if that is more than so many.

    A look at many at once takes a fraction of the time of a visit to each.
    """
    held: list[Object] = []
    for part in parts:
        if len(part) > _BUDGET_INERT:
            return None
        others = len(part) - sum(map(_INERT.__contains__, map(type, part)))
        if others > _BUDGET_RECORDS:
            return None
        if others == len(part):
            held += part
        elif others:
            held += [v for v in part if type(v) not in _INERT]
    if len(held) > _FEW:
        some = [held[i : i + _MANY] for i in range(0, len(held), _MANY)]
        held = [v for values in some if not _are_inert(values) for v in values]
    return held if len(held) <= most else None


def _are_inert(values: Iterable[Object]) -> bool:
    """Return whether values lead to nothing but numbers, strings and the like, a few steps away."""
    for _ in range(6):
        every = [v for v in values if type(v) not in _INERT]
        kinds = set(map(type, every))
        if np.ndarray in kinds:
            every = [v for v in every if type(v) is not np.ndarray or v.dtype == object]
            kinds = set(map(type, every))
        if not every or any(issubclass(cls, _OPAQUE) or cls in _CODE for cls in kinds):
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
_HELD: dict[type, Callable[[Object, int], Held]] = {
    _FUNCTION: _held_by_function,
    _CELL: lambda cell, _: (content_of(cell),),
    types.MethodType: lambda method, _: (method.__func__, method.__self__),
    types.BuiltinFunctionType: lambda function, _: (function.__self__,),
    functools.partial: lambda p, _: (p.func, p.args, p.keywords, p.__dict__),
    **dict.fromkeys(_SIZED, _held_by_container),
    **dict.fromkeys(_WEAK, lambda reference, _: (reference(),)),
    # Before JAX 0.12, a `ClosedJaxpr` holds the constants.
    Jaxpr: lambda jaxpr, _: (getattr(jaxpr, "consts", ()),),
    # Not the cached results: they depend on earlier calls.
    **dict.fromkeys(CACHED, lambda function, _: (function.__wrapped__,)),
}


def _held(value: Object, most: int) -> Held:
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


def is_importable(value: Object) -> bool:
    """Return whether a class or a function can be imported by its name."""
    found: Object = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value
