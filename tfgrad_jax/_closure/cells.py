"""What functions hold: can a tracer be reached, and can they be made anew around other values?

`reach` answers the first question for whatever a decorated function can see beside its operands.
`dissect` answers the second: it takes the tracers out of functions, containers and objects, and
`Skeleton` makes the same anew around other values. Python tells how: a function is its code, its
cells and its defaults, and anything else is what `copy.copy` makes it of (`__reduce_ex__`).
`snapshot` copies the cells of functions alone: a rule reads its closure at the call, as it does
under `jit`.
"""

import functools
import gc
import operator
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr

from tfgrad_jax._compat import is_live

_LIMIT = 5_000  # objects to look at; beyond these it is cheaper to trace the function

_FUNCTION = types.FunctionType
_BUILTIN = types.BuiltinFunctionType
_CELL = types.CellType
# Objects of these very types hold no tracer that could be used, or are asked in another way.
_INERT = {
    bool, int, float, complex, str, bytes, bytearray, range, type(None), type(Ellipsis),
    type(NotImplemented), types.ModuleType, types.CodeType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, np.ufunc, type(jax.tree_util.default_registry), Jaxpr,
}  # fmt: skip
# Objects of these very types are looked into: the most frequent ones, known at once.
_HOLDERS = {_FUNCTION, _CELL, types.MethodType, functools.partial, dict, tuple, list}
JITTED = type(jax.jit(len))
_CACHED = (JITTED, type(functools.cache(len)))
_CONTAINERS = (list, tuple, dict, set, frozenset)


def _is_inert(cls: type) -> bool:
    """Return whether no object of a type can hold a tracer."""
    if cls in _INERT:
        return True
    if issubclass(cls, (np.generic, np.dtype, jax.Array)) and not issubclass(cls, Tracer):
        _INERT.add(cls)
        return True
    return False


def reach(values: Sequence[Any], takes: Callable[[Any], bool] | None = None) -> bool | None:
    """Return whether a live tracer, or what `takes` accepts, can be reached from the values.

    True if there is one, False if there is none, None if there is too much to look at.
    """
    pending = list(values)
    seen: dict[int, Any] = {}  # by id, and kept, so that no id is used twice
    while pending:
        value = pending.pop()
        cls = type(value)
        if takes is not None and takes(value):
            return True
        if cls in _INERT or id(value) in seen or (cls not in _HOLDERS and _is_inert(cls)):
            continue
        seen[id(value)] = value
        if isinstance(value, Tracer):
            if takes is None and is_live(value):
                return True
            continue
        held = _held(value, cls)
        if held is None or len(seen) > _LIMIT or len(held) > _LIMIT:
            return None
        pending += held
    return False


def _held(value: Any, cls: type) -> Sequence[Any] | None:
    """Return what an object holds, or None if it is too much."""
    if cls is _FUNCTION:
        if value.__closure__ is None and value.__defaults__ is None and not value.__dict__:
            return () if value.__kwdefaults__ is None else (value.__kwdefaults__,)
        held = [value.__defaults__, value.__kwdefaults__, value.__dict__]
        return held + [content_of(cell) for cell in value.__closure__ or ()]
    if cls is _BUILTIN:
        return (value.__self__,)
    if isinstance(value, type):
        # Only a class that is made in a function can hold a tracer.
        local = [c for c in value.__mro__ if not is_importable(c)]
        return [v for c in local for v in vars(c).values()]
    if isinstance(value, np.ndarray):
        return list(value.flat) if value.dtype == object else ()
    if isinstance(value, _CONTAINERS) and len(value) > _LIMIT:
        return None
    if cls is weakref.ref:
        return (value(),)
    if cls in _CACHED:  # not what is cached: it depends on what was called before
        return (value.__wrapped__,)
    if isinstance(value, dict):  # Python 3.13 shows the attributes of an object to it alone
        return [*gc.get_referents(value), *value.values()]
    return gc.get_referents(value)


def is_importable(value: Any) -> bool:
    """Return whether a module has a class or a function under its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None


class Wrapper:
    """An object around functions, into which `snapshot` looks."""

    __slots__ = ()

    def unwrapped(self) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
        """Return how to make it, what it is made of, and its attributes."""
        raise NotImplementedError


class OpaqueError(Exception):
    """A tracer is where it cannot be replaced, or may be."""


# How to make a value anew: from the values of the tracers, and what was made until then.
Plan: TypeAlias = Callable[[Sequence[Any], dict[Any, Any]], Any]


def same(value: Any) -> Plan:
    return lambda values, made: value


class _Made:
    """How to make an object anew, once: of `parts`, and then what it holds, which may be itself."""

    def __init__(self) -> None:
        self.make: Callable[..., Any] = _CELL
        self.parts: Sequence[Plan] = ()
        self.fill: list[tuple[Callable[[Any, Any], Any], Plan]] = []

    def __call__(self, values: Sequence[Any], made: dict[Any, Any]) -> Any:
        if self not in made:
            parts = [part(values, made) for part in self.parts]
            if self not in made:  # or else one of its parts holds it
                made[self] = new = self.make(*parts)
                for put, content in self.fill:
                    put(new, content(values, made))
        return made[self]


class Skeleton:
    """Values, and the functions among them, without the tracers that they hold.

    With `takes`, without the values that it accepts, such as arrays, instead of live tracers; then
    what cannot be rebuilt stays as it is, with what it holds.
    """

    def __init__(self, search: bool, takes: Callable[[Any], bool] | None = None) -> None:
        self.tracers: list[Any] = []
        self._takes = takes
        self._search = search  # for tracers; or else what is no function stays as it is
        self._plans: list[Plan] = []
        self._known: dict[int, tuple[Any, Plan]] = {}  # by id, with the value of that id

    def add(self, value: Any) -> None:
        self._plans.append(self._plan(value))

    def finish(self) -> None:
        """Forget the tracers, and what refers to them: they must not outlive their trace."""
        self.tracers, self._known = [], {}

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Return the values, made anew around others for the tracers."""
        made: dict[Any, Any] = {}
        return [plan(values, made) for plan in self._plans]

    def _plan(self, value: Any) -> Plan:
        cls = type(value)
        if self._takes is not None and self._takes(value):
            known = self._known.get(id(value))
            return known[1] if known else self._tracer(value)
        if _is_inert(cls):
            return same(value)
        if cls is _FUNCTION:
            return self._function(value)
        if id(value) in self._known:
            return self._known[id(value)][1]
        if not (self._search or isinstance(value, Wrapper)):
            return same(value)
        if self._takes is None and isinstance(value, Tracer) and is_live(value):
            return self._tracer(value)
        try:
            return self._object(value)
        except OpaqueError:
            if self._takes is None:
                raise
            return same(value)

    def _tracer(self, value: Any) -> Plan:
        i = len(self.tracers)
        self.tracers.append(value)
        return self._note(value, lambda values, made: values[i])

    def _note(self, value: Any, plan: Any) -> Any:
        self._known[id(value)] = value, plan
        return plan

    def _function(self, f: types.FunctionType) -> Plan:
        if id(f) in self._known:
            return self._known[id(f)][1]
        if not (f.__closure__ or f.__defaults__ or f.__kwdefaults__ or vars(f)):
            return same(f)
        plan = self._note(f, _Made())
        code, scope, name, qualname = f.__code__, f.__globals__, f.__name__, f.__qualname__

        def make(*cells: Any) -> Any:
            new = _FUNCTION(code, scope, name, None, cells)
            new.__qualname__ = qualname
            return new

        # A wrapper reads the signature of its function, so the defaults come before the cells.
        for attribute in ("__defaults__", "__kwdefaults__"):
            if (held := getattr(f, attribute)) is not None:
                plan.fill.append((_setter(attribute), self._plan(held)))
        for key, held in vars(f).items():
            plan.fill.append((_setter(key), self._plan(held)))
        plan.make, plan.parts = make, [self._cell(cell) for cell in f.__closure__ or ()]
        return plan

    def _cell(self, cell: types.CellType) -> Plan:
        if id(cell) in self._known:
            return self._known[id(cell)][1]
        plan = self._note(cell, _Made())
        try:
            content = cell.cell_contents
        except ValueError:  # it is assigned later: it stays shared
            plan.make = lambda: cell
        else:
            plan.fill.append((_setter("cell_contents"), self._plan(content)))
        return plan

    def _object(self, value: Any) -> Plan:
        """Plan to make an object as `copy.copy` does."""
        wrapper, cls = isinstance(value, Wrapper), type(value)
        found = reach([value], self._takes) if self._search else wrapper
        if found is False:
            return same(value)
        if found and self._takes is not None and cls in _CACHED:
            return self._plan(value.__wrapped__)  # a copy need not remember anything
        if found is None or isinstance(value, type) or cls in _CACHED:
            raise OpaqueError
        if cls is tuple:
            made: Any = ((lambda *items: items), value)
        elif cls is types.MethodType:
            made = (cls, (value.__func__, value.__self__))
        elif wrapper:
            made = value.unwrapped()
        else:
            made = _reduced(value)
        plan = self._note(value, _Made())
        plan.make, parts, state, items, pairs = (*made, None, None, None)[:5]
        plan.parts = list(map(self._plan, parts))
        if state:
            plan.fill.append((_set_state, self._plan(state)))
        plan.fill += [(_append, self._plan(item)) for item in items or ()]
        plan.fill += [(_at(key), self._plan(item)) for key, item in pairs or ()]
        return plan


_INERT.add(Skeleton)


def _reduced(value: Any) -> tuple[Any, ...]:
    """Return how to make an object: what to call on what, its state, its items, its pairs."""
    try:
        made = value.__reduce_ex__(4)
        make, parts, *_ = made
        if make(*parts) is not value:  # as for a singleton
            return made
    except Exception as error:  # of any type: that of what cannot be copied
        raise OpaqueError from error
    raise OpaqueError


def _setter(name: str) -> Callable[[Any, Any], Any]:
    return lambda new, value: setattr(new, name, value)


def _at(key: Any) -> Callable[[Any, Any], Any]:
    return lambda new, item: operator.setitem(new, key, item)


def _append(new: Any, item: Any) -> None:
    new.append(item)


def _set_state(new: Any, state: Any) -> None:
    if hasattr(new, "__setstate__"):
        new.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(new).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(new, name, value)


def dissect(values: Sequence[Any]) -> tuple[Skeleton, list[Any]] | None:
    """Return the values without their tracers, and these; None if that cannot be done."""
    skeleton = Skeleton(search=True)
    try:
        for value in values:
            skeleton.add(value)
    except (OpaqueError, RecursionError):
        return None
    tracers = skeleton.tracers
    skeleton.finish()
    return skeleton, tracers


def snapshot(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with cells of its own, which keep their contents of now."""
    if type(f) is not _FUNCTION or not (f.__closure__ or f.__defaults__):
        return f
    skeleton = Skeleton(search=False)
    skeleton.add(f)
    return skeleton(())[0]
