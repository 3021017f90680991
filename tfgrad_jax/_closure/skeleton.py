"""Copy functions and objects around other values for the tracers that they hold.

`dissect` takes the tracers out of functions, containers and objects; the `Skeleton` that is left
copies these around other values. A function is its code, its cells and its defaults; Python says of
any other object what `copy.copy` makes it of (`__reduce_ex__`). Only what lies on the way to a
tracer is copied. `snapshot` copies the cells of functions alone: a rule reads its closure at the
call, as it does under `jit`.
"""

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .reach import CACHED, INERT, is_captured, is_leaf, reach

_FUNCTION, _CELL = types.FunctionType, types.CellType


class Wrapper:
    """An object around functions, which `snapshot` copies too."""

    __slots__ = ()

    def unwrapped(self) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
        """Return what makes a copy, the arguments for it, and the attributes."""
        raise NotImplementedError


class OpaqueError(Exception):
    """A tracer is where it cannot be replaced, or may be."""


# Copies a value: from the values for the tracers, and from what is already copied.
Plan: TypeAlias = Callable[[Sequence[Any], dict[Any, Any]], Any]


def same(value: Any) -> Plan:
    return lambda values, made: value


class _Made:
    """Copies an object once: from `parts`, and then what it holds, which may be itself."""

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
    """Values, and what they hold, without the values that a predicate `takes` out.

    With no predicate, functions are copied, and everything else stays itself. `lenient`, what
    Python cannot copy stays itself too, and a jitted function is copied without the `jit`.
    """

    def __init__(
        self, takes: Callable[[Any], bool] | None = is_captured, lenient: bool = False
    ) -> None:
        self.taken: list[Any] = []
        self._takes, self._lenient = takes, lenient
        self._plans: list[Plan] = []
        self._known: dict[int, tuple[Any, Plan]] = {}  # by id, with the value of that id

    def add(self, value: Any) -> None:
        self._plans.append(self._plan(value))

    def finish(self) -> None:
        """Forget what was taken out: tracers must not outlive their trace."""
        self.taken, self._known = [], {}

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Return the values, copied around others for those that were taken out."""
        made: dict[Any, Any] = {}
        return [plan(values, made) for plan in self._plans]

    def _plan(self, value: Any) -> Plan:
        cls = type(value)
        if id(value) in self._known:
            return self._known[id(value)][1]
        if self._takes is not None and self._takes(value):
            i = len(self.taken)
            self.taken.append(value)
            return self._note(value, lambda values, made: values[i])
        if cls is _FUNCTION:
            return self._function(value)
        if is_leaf(cls) or not (self._takes or isinstance(value, Wrapper)):
            return same(value)
        try:
            return self._object(value)
        except OpaqueError:
            if not self._lenient:
                raise
            wrapped: Any = getattr(value, "__wrapped__", None)
            return self._plan(wrapped) if cls in CACHED else same(value)

    def _note(self, value: Any, plan: Any) -> Any:
        self._known[id(value)] = value, plan
        return plan

    def _function(self, f: types.FunctionType) -> Plan:
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
        found = reach([value], self._takes) if self._takes else wrapper
        if found is False:
            return same(value)
        if found is None or isinstance(value, type) or cls in CACHED:
            raise OpaqueError
        if cls is tuple:
            made: tuple[Any, ...] = ((lambda *items: items), value)
        elif cls is types.MethodType:
            made = (cls, (value.__func__, value.__self__))
        elif wrapper:
            made = value.unwrapped()
        else:
            made = _reduced(value)
        plan = self._note(value, _Made())
        reduced: Any = (*made, None, None, None)[:5]
        plan.make, parts, state, items, pairs = reduced
        plan.parts = list(map(self._plan, parts))
        if state:
            plan.fill.append((_set_state, self._plan(state)))
        plan.fill += [(_append, self._plan(item)) for item in items or ()]
        plan.fill += [(_at(key), self._plan(item)) for key, item in pairs or ()]
        return plan


INERT.add(Skeleton)


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


def dissect(
    values: Sequence[Any], takes: Callable[[Any], bool] = is_captured
) -> tuple[Skeleton, list[Any]] | None:
    """Return the values without those to take out, and these; None if that cannot be done."""
    skeleton = Skeleton(takes)
    try:
        for value in values:
            skeleton.add(value)
    except (OpaqueError, RecursionError):
        return None
    taken = skeleton.taken
    skeleton.finish()
    return skeleton, taken


def snapshot(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with cells of its own, which keep their present contents."""
    if type(f) is not _FUNCTION or not (f.__closure__ or f.__defaults__):
        return f
    skeleton = Skeleton(takes=None)
    skeleton.add(f)
    return skeleton(())[0]
