"""What functions hold: can a tracer be reached, and can they be made anew around other values?

`reach` answers the first question for whatever a decorated function can see beside its
operands. Where there is a tracer, `dissect` answers the second: it takes the tracers out of
cells, defaults and the pytrees in them, and `Skeleton` puts other values in their places.
`snapshot` does that without looking for tracers: a rule reads its closure at the call, as it
does under `jit`.
"""

import dis
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten

_LIMIT = 5_000  # objects to look at; beyond these it is cheaper to trace the function

_FUNCTION = types.FunctionType
_BUILTIN = types.BuiltinFunctionType
# Objects of these very types hold no tracer that could be used, or are asked in another way.
_INERT = {
    bool, int, float, complex, str, bytes, bytearray, range, type(None), type(Ellipsis),
    type(NotImplemented), types.ModuleType, types.CodeType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, np.ufunc, type(jax.tree_util.default_registry),
}  # fmt: skip
# Objects of these very types are looked into: the most frequent ones, known at once.
_HOLDERS = {
    types.FunctionType, types.CellType, types.MethodType, functools.partial, dict, tuple, list,
}  # fmt: skip
JITTED = type(jax.jit(len))
_CACHED = {JITTED, type(functools.cache(len))}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_METHODS = ("LOAD_ATTR", "LOAD_METHOD")
_FILLING = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault")


def _is_inert(cls: type) -> bool:
    """Return whether no object of a type can hold a tracer."""
    if cls in _INERT:
        return True
    if issubclass(cls, (np.generic, np.dtype, jax.Array)) and not issubclass(cls, Tracer):
        _INERT.add(cls)
        return True
    return False


def reach(values: Sequence[Any]) -> bool | None:
    """Return whether a tracer can be reached from the values.

    True if there is one, False if there is none, None if there is too much to look at.
    """
    for found in _walk(values):
        return None if found is None else True
    return False


def tracers_in(values: Sequence[Any]) -> list[Any]:
    """Return the tracers that can be reached from the values, each once."""
    return list({id(t): t for t in _walk(values) if t is not None}.values())


def _walk(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the tracers that can be reached; None, and no more, where there is too much."""
    pending = list(values)
    seen: dict[int, Any] = {}  # by id, and kept, so that no id is used twice
    steps = 0
    while pending:
        value = pending.pop()
        cls = type(value)
        if cls in _INERT or id(value) in seen or (cls not in _HOLDERS and _is_inert(cls)):
            continue
        steps += 1
        if isinstance(value, Tracer):
            yield value
            continue
        seen[id(value)] = value
        held = _held(value, cls)
        if steps > _LIMIT or held is None or len(held) > _LIMIT:
            yield None
            return
        pending += held


def _held(value: Any, cls: type) -> Sequence[Any] | None:
    """Return what an object holds, or None if it is too much."""
    if cls is _FUNCTION:
        if value.__closure__ is None and value.__defaults__ is None and not value.__dict__:
            return () if value.__kwdefaults__ is None else (value.__kwdefaults__,)
        held = [value.__defaults__, value.__kwdefaults__, value.__dict__]
        return held + [content_of(cell) for cell in value.__closure__ or ()]
    if cls is _BUILTIN:
        return (value.__self__,)
    if isinstance(value, Wrapper):
        return value.unwrapped()[1]
    if isinstance(value, type):
        # Only a class that is made in a function can hold a tracer.
        local = [c for c in value.__mro__ if not is_importable(c)]
        return [v for c in local for v in vars(c).values()]
    if isinstance(value, np.ndarray):
        return list(value.flat) if value.dtype == object else ()
    if isinstance(value, _CONTAINERS) and len(value) > _LIMIT:
        return None
    if cls in _CACHED:  # not what is cached: it depends on what was called before
        return (value.__wrapped__,)
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


@functools.cache
def _assigned(code: types.CodeType) -> frozenset[str]:
    """Return the variables of enclosing functions that the code assigns to."""
    found = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _assigned(inner) & set(code.co_freevars)
    return frozenset(found)


@functools.cache
def _filled(code: types.CodeType) -> frozenset[str]:
    """Return the variables of enclosing functions into whose containers the code puts values."""
    steps = list(dis.get_instructions(code))
    found = {
        a.argval
        for a, b, c in zip(steps, steps[1:], steps[2:], strict=False)
        if a.opname == "LOAD_DEREF"
        and (c.opname == "STORE_SUBSCR" or (b.argval in _FILLING and b.opname in _METHODS))
    }
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(found.union(*map(_filled, inner)) & {*code.co_freevars})


def _has_cycle(value: Any, above: tuple[int, ...]) -> bool:
    """Return whether a container holds itself, which JAX would flatten without end."""
    if not isinstance(value, (list, tuple, dict)):
        return False
    if id(value) in above:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(_has_cycle(part, (*above, id(value))) for part in parts)


def _partial(parts: Sequence[Any]) -> functools.partial[Any]:
    f, args, keywords, attributes = parts
    made = functools.partial(f, *args, **keywords)
    made.__dict__.update(attributes)
    return made


class _OpaqueError(Exception):
    """A tracer is where it cannot be replaced, or may be."""


class Wrapper:
    """An object around functions that can be made anew around others."""

    __slots__ = ()

    def unwrapped(self) -> tuple[Callable[[Sequence[Any]], Any], Sequence[Any]]:
        """Return how to make it, and what it is made around."""
        raise NotImplementedError


# How to make a value anew: as it is, a tracer (its index), a function (its index), or a pytree or a
# wrapper (how to put the parts together, and these).
_Plan = tuple[int, Any, Any]
_SAME, _TRACER, _MADE, _PARTS = range(4)


class Skeleton:
    """Values, and the functions among them, without the tracers that they hold."""

    def __init__(self, search: bool) -> None:
        self.tracers: list[Any] = []
        self._search = search  # for tracers; or else what is no function stays as it is
        self._plans: list[_Plan] = []
        self._functions: list[Any] = []  # (function, places of its cells, plans of the rest)
        self._cells: list[tuple[types.CellType, _Plan | None]] = []  # None: stays shared
        self._known: dict[int, int] = {}  # ids of tracers, functions and cells -> index

    def add(self, value: Any) -> None:
        self._plans.append(self._plan(value))

    def finish(self) -> None:
        """Forget the tracers, and what refers to them: they must not outlive their trace."""
        self.tracers = []
        self._known = {}
        self._functions = [
            (f.__code__, f.__globals__, f.__name__, f.__qualname__, *rest)
            for f, *rest in self._functions
        ]
        cells: list[Any] = [(c if p is None else None, p) for c, p in self._cells]
        self._cells = cells

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Return the values, made anew around others for the tracers."""
        cells = [types.CellType() if cell is None else cell for cell, _ in self._cells]
        made: list[Any] = []
        for code, scope, name, qualname, places, _ in self._functions:
            f = _FUNCTION(code, scope, name, None, tuple(cells[i] for i in places))
            f.__qualname__ = qualname
            made.append(f)

        def fill(plan: _Plan) -> Any:
            kind, content, parts = plan
            if kind == _SAME:
                return content
            if kind == _TRACER:
                return values[content]
            if kind == _MADE:
                return made[content]
            return content(list(map(fill, parts)))

        # A wrapper reads the signature of its function: inner ones first, and then the cells.
        for f, (*_, plans) in reversed(list(zip(made, self._functions, strict=True))):
            f.__defaults__, f.__kwdefaults__, attributes = map(fill, plans)
            if attributes:
                f.__dict__.update(attributes)
        for new, (_, plan) in zip(cells, self._cells, strict=True):
            if plan is not None:
                new.cell_contents = fill(plan)
        return [fill(plan) for plan in self._plans]

    def _plan(self, value: Any) -> _Plan:
        cls = type(value)
        if _is_inert(cls):
            return _SAME, value, None
        if cls is _FUNCTION:
            return self._function(value)
        if isinstance(value, Wrapper):
            make, parts = value.unwrapped()
            return _PARTS, make, [self._plan(part) for part in parts]
        if not self._search:
            return _SAME, value, None
        if isinstance(value, Tracer):
            if id(value) not in self._known:
                self._known[id(value)] = len(self.tracers)
                self.tracers.append(value)
            return _TRACER, self._known[id(value)], None
        found = reach([value])
        if found is False:
            return _SAME, value, None
        if found is None or isinstance(value, Iterator) or _has_cycle(value, ()):
            raise _OpaqueError
        if cls is functools.partial:
            parts = (value.func, value.args, value.keywords, vars(value))
            return _PARTS, _partial, [self._plan(part) for part in parts]
        try:
            leaves, treedef = tree_flatten(value)
        except (TypeError, ValueError):  # such as keys that cannot be sorted
            raise _OpaqueError from None
        if (len(leaves) == 1 and leaves[0] is value) or reach([treedef]) is not False:
            raise _OpaqueError
        return _PARTS, treedef.unflatten, [self._plan(leaf) for leaf in leaves]

    def _function(self, f: types.FunctionType) -> _Plan:
        if id(f) in self._known:
            return _MADE, self._known[id(f)], None
        attributes = vars(f)
        if not (f.__closure__ or f.__defaults__ or f.__kwdefaults__ or attributes):
            return _SAME, f, None
        self._known[id(f)] = index = len(self._functions)
        places: list[int] = []
        plans: list[_Plan] = []
        self._functions.append((f, places, plans))
        shared = _assigned(f.__code__) if f.__closure__ else ()
        filled = _filled(f.__code__) if f.__closure__ and self._search else ()
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            held = content_of(cell) if name in filled else None
            if isinstance(held, _CONTAINERS) and reach([held]) is not False:
                raise _OpaqueError  # there may be tracers of an earlier trace, which are not used
            places.append(self._cell(cell, name in shared))
        plans += [self._plan(f.__defaults__), self._plan(f.__kwdefaults__)]
        plans.append(self._attributes(attributes))
        return _MADE, index, None

    def _attributes(self, attributes: dict[str, Any]) -> _Plan:
        if not attributes:
            return _SAME, None, None
        return self._plan(dict(attributes))

    def _cell(self, cell: types.CellType, shared: bool) -> int:
        if id(cell) not in self._known:
            self._known[id(cell)] = len(self._cells)
            self._cells.append((cell, None))
            try:
                content = cell.cell_contents
            except ValueError:  # it is assigned later
                return len(self._cells) - 1
            if not shared:
                index = self._known[id(cell)]
                self._cells[index] = (cell, self._plan(content))
        index = self._known[id(cell)]
        if shared:
            # What one function assigns, the others see.
            if self._search and reach([content_of(cell)]) is not False:
                raise _OpaqueError
            self._cells[index] = (cell, None)
        return index


def dissect(values: Sequence[Any]) -> tuple[Skeleton, list[Any]] | None:
    """Return the values without their tracers, and these; None if that cannot be done."""
    skeleton = Skeleton(search=True)
    try:
        for value in values:
            skeleton.add(value)
    except (_OpaqueError, RecursionError):
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
    skeleton.finish()
    return skeleton(())[0]
