"""Look at what Python objects hold. Nothing is copied, and no code of the user's runs.

reaches_nothing   the quick look, at every call: can functions read constants alone?
visited           all that an object leads to, with the names that the user has for it
survey            does it lead to a tracer, or to functions whose variables may change?
named             the names of some values, for messages
"""

import builtins
import collections
import contextlib
import contextvars
import dis
import enum
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, get_opaque_trace_state

from .._jax.types import Copied, Inert

Object: TypeAlias = Any  # any Python object
Id: TypeAlias = int  # of an object that is kept alive meanwhile
Matches: TypeAlias = Callable[[Object], bool]
Roots: TypeAlias = Sequence[tuple[str, Object]]  # with their names; "": it needs none

ARRAYS = Tracer, jax.Array, np.ndarray, np.generic
JITTED = type(jax.jit(len))
CACHED = JITTED, type(functools.cache(len))
# Values of exactly these types hold nothing.
PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), type(...), range, slice})
_SIZED = tuple, list, dict, set, frozenset, collections.deque
_CONTAINERS = frozenset(_SIZED)
# These hold no arrays of the user's, or show them in another way. (A trace refers to the whole
# program that it records, and a user's object may hold one.)
_ENDS = (
    types.ModuleType, types.CodeType, np.dtype, Inert, jax.core.Trace,
    type(get_opaque_trace_state(())), type(jax.tree_util.default_registry),
)  # fmt: skip
# By the modules themselves: one of the user's may be called `signal`, too.
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy", *sys.stdlib_module_names})
_OURS = __name__.rpartition("._closure")[0]
_STORES = setattr, delattr, vars, globals, exec, eval
BUDGET, _BUDGET_OF_FUNCTIONS = 10_000, 1_000  # of objects to visit, for arrays and for functions


def content(cell: types.CellType) -> Object:
    """Return what a variable of a function holds; `EMPTY` if that is not known yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


EMPTY = Inert()  # what a variable holds that has no value


def attributes_of(h: Copied) -> dict[str, Object]:
    """Return what the user has set on a decorated function; Python's own names are of `f`."""
    return {k: v for k, v in vars(h).items() if not k.startswith("__")}


def is_of_library(value: Object) -> bool:
    """Return whether a function or a class is one of Python, JAX or NumPy, or ours.

    One with variables is looked into in any case.
    """
    if getattr(value, "__closure__", None):
        return False
    f: Any = getattr(value, "__wrapped__", None) if type(value) is JITTED else value
    is_code = type(f) is types.FunctionType  # `functools.wraps` may have given it another module
    module = str(f.__globals__.get("__name__") if is_code else getattr(value, "__module__", ""))
    return module.partition(".")[0] in _LIBRARIES or f"{module}.".startswith(f"{_OURS}.")


@functools.cache
def _operations(code: types.CodeType) -> Sequence[tuple[str, str]]:
    """Return the operations with names of a function, and of those that are written in it."""
    found = [(i.opname, i.argval) for i in dis.get_instructions(code) if type(i.argval) is str]
    inner = (_operations(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return [*dict.fromkeys([*found, *(one for some in inner for one in some)])]


@functools.cache
def assigned_in(code: types.CodeType) -> frozenset[str]:
    """Return the variables of outer functions to which code assigns."""
    stores = {name for op, name in _operations(code) if op in ("STORE_DEREF", "DELETE_DEREF")}
    return frozenset(stores.intersection(code.co_freevars))


@functools.cache
def _leaves_something(code: types.CodeType) -> bool:
    """Return whether code assigns to anything but its own variables, or may do so by others."""
    outside = "STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "IMPORT_NAME"
    return bool(assigned_in(code)) or any(
        op in outside
        or name == "__dict__"
        or (op == "LOAD_GLOBAL" and getattr(builtins, name, None) in _STORES)
        for op, name in _operations(code)
    )


def globals_of(f: types.FunctionType) -> Iterator[tuple[str, Object]]:
    """Yield the global variables that a function may read, and so for functions written in it."""
    for op, name in _operations(f.__code__):
        if op in ("LOAD_GLOBAL", "LOAD_NAME") and name in f.__globals__:
            yield name, f.__globals__[name]


def reaches_nothing(held: Iterable[Object], may_change: bool = False) -> bool:
    """Return whether functions can read constants alone, and leave nothing behind.

    False if there may be a tracer; or an object or a variable in which they leave something, unless
    it `may_change`.
    """
    pending, seen = [*held], set[Id]()
    for one in pending:  # it grows
        cls = type(one)
        if cls in PLAIN or one is EMPTY:
            continue
        if isinstance(one, ARRAYS):
            if isinstance(one, Tracer) or not is_end(one, cls):  # of Python objects
                return False
        elif cls is types.FunctionType:
            if id(one) in seen or is_of_library(one):
                continue
            seen.add(id(one))
            if one.__dict__ or len(seen) > 200:
                return False
            if not may_change and _leaves_something(one.__code__):
                return False
            pending += (v for _, v in globals_of(one))
            pending += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            pending += map(content, one.__closure__ or ())
        elif isinstance(one, Copied):
            if id(one) not in seen:
                seen.add(id(one))
                pending += [*one._declaration[:3], *attributes_of(one).values()]
        elif cls is tuple or (may_change and issubclass(cls, _SIZED)):
            if getattr(one, "__dict__", None):
                return False
            # A tuple of empty lists is a place to leave something in.
            is_empty = is_inert(one) if may_change else PLAIN.issuperset(map(type, one))
            if id(one) not in seen and not is_empty:
                seen.add(id(one))
                pending += [*one, *dict.values(one)] if issubclass(cls, dict) else one
        elif not is_known(one, cls):
            return False
    return True


def is_known(one: Object, cls: type) -> bool:
    """Return whether one is a module, a function or a class of a library: it leads nowhere."""
    if issubclass(cls, np.dtype | Inert | enum.Enum):
        return True
    if cls is types.ModuleType:
        return one.__name__.partition(".")[0] in _LIBRARIES
    if cls is types.BuiltinFunctionType:
        return type(one.__self__) in (*PLAIN, types.ModuleType)
    if cls is JITTED and type(one.__wrapped__) is not types.FunctionType:
        return False
    return cls in _CODE and is_of_library(one)


_CODE = frozenset({
    types.FunctionType, JITTED, type, jax.custom_jvp, jax.custom_vjp, type(jax.numpy.float32),
    type(jax.numpy.add),
})  # fmt: skip


# --- all that an object holds ---------------------------------------------------------------------


def held_by(value: Object) -> Iterator[tuple[str, Object]]:
    """Yield what an object holds, each with the step to it as the user would write it."""
    cls = type(value)
    if cls is types.FunctionType:
        code, defaults = value.__code__, value.__defaults__ or ()
        every = zip(code.co_freevars, map(content, value.__closure__ or ()), strict=True)
        yield from ((f".{name}", v) for name, v in every)
        every = zip(code.co_varnames[: code.co_argcount][::-1], defaults[::-1], strict=False)
        yield from ((f".{name}", v) for name, v in every)
        yield from ((f".{name}", v) for name, v in (value.__kwdefaults__ or {}).items())
        yield from ((f".{name}", v) for name, v in value.__dict__.items())
        if not is_of_library(value):
            yield from ((f".{name}", v) for name, v in globals_of(value))
    elif isinstance(value, Copied):
        f, variables, primal, *_ = value._declaration
        yield from (("", f), ("", primal), *((f".{k}", v) for k, v in attributes_of(value).items()))
        yield "", variables
    elif cls is types.MethodType:
        yield from (("", value.__func__), ("self", value.__self__))
    elif cls is functools.partial:
        yield from (("", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, CACHED):  # not the results: they depend on what was called before
        yield "", getattr(value, "__wrapped__", None)
    elif isinstance(value, weakref.ref):
        yield "", value()
    elif isinstance(value, (ClosedJaxpr, Jaxpr)):
        yield ".consts", getattr(value, "consts", ())
    elif isinstance(value, dict):
        # Not as the class of a user's dict would do it: no code of theirs runs.
        for k, v in dict.items(value):
            yield f"[{k!r}]" if type(k) in PLAIN else "[...]", v
            if type(k) not in PLAIN:
                yield "", k
        if cls is not dict:
            yield from _attributes(value)
    elif cls in _CONTAINERS:
        yield from ((f"[{i}]", v) for i, v in enumerate(value))
    elif isinstance(value, np.ndarray):
        yield from ((f"[{i}]", v) for i, v in enumerate(value.flat))
    elif isinstance(value, type):
        if not is_of_library(value):
            yield from (
                (f".{k}", v) for k, v in vars(value).items() if type(v) is not types.FunctionType
            )
    else:
        yield from _attributes(value)


def _attributes(value: Object) -> Iterator[tuple[str, Object]]:
    """Yield the attributes of an object, and then all that the garbage collector knows of it."""
    named: Mapping[str, Object] = {}
    with contextlib.suppress(AttributeError):  # not `vars`, which may run a `__getattribute__`
        named = object.__getattribute__(value, "__dict__")
    yield from ((f".{k}", v) for k, v in named.items())
    for name, slot in ((n, d) for c in type(value).__mro__ for n, d in vars(c).items()):
        if type(slot) is types.MemberDescriptorType:
            with contextlib.suppress(AttributeError):  # it has no value yet
                yield f".{name}", slot.__get__(value)
    if isinstance(value, contextvars.ContextVar):
        yield "", value.get(None)
    elif isinstance(value, _SIZED):
        yield from ((f"[{i}]", v) for i, v in enumerate(value))
    yield from (("", v) for v in gc.get_referents(value) if v is not named)


def is_end(value: Object, cls: type) -> bool:
    if isinstance(value, ARRAYS):
        return not (isinstance(value, np.ndarray) and value.dtype.kind == "O")  # of Python objects
    if cls in PLAIN or isinstance(value, _ENDS):
        return True
    return cls in _CONTAINERS and is_inert(value)


def is_inert(container: Object) -> bool:
    """Return whether a container holds numbers and strings alone, and such containers."""
    values: Iterable[Object] = [container]
    for _ in range(6):  # a look at many at once takes a fraction of the time of a visit to each
        kinds = set(map(type, values)) - PLAIN
        if not kinds:
            return True
        if not kinds <= _CONTAINERS:
            return False
        some: Sequence[Any] = [v for v in values if type(v) in kinds]
        of_dicts = map(dict.values, (v for v in some if type(v) is dict)) if dict in kinds else ()
        values = [*itertools.chain.from_iterable([*some, *of_dicts])]
    return False


class Variable(NamedTuple):
    """A variable of a function, and what it holds."""

    function: str
    name: str
    cell: types.CellType
    value: Object


class Survey(NamedTuple):
    """What an object leads to."""

    leads: bool  # to something that matches; True, too, if there is too much to visit
    variables: Sequence[Variable]  # of the functions among it


def visited(roots: Roots) -> Iterator[tuple[str, Object]]:
    """Yield all that the roots lead to, each once, by its shortest name, as the budget allows."""
    pending, seen = list(roots), dict[Id, Object]()
    for name, one in pending:  # it grows
        if id(one) in seen:
            continue
        if len(seen) > BUDGET:
            return
        seen[id(one)] = one
        yield name, one
        if not is_end(one, type(one)):
            every = ((s, v) for s, v in held_by(one) if type(v) not in PLAIN)
            named = ((name + s if name else s.removeprefix("."), v) for s, v in every)
            pending += itertools.islice(named, BUDGET)


def survey(value: Object, matches: Matches | None = None) -> Survey:
    """Return what an object leads to; None: functions alone."""
    leads, functions = False, list[types.FunctionType]()
    for i, (_, one) in enumerate(visited([("", value)])):
        if i >= (_BUDGET_OF_FUNCTIONS if leads or matches is None else BUDGET):
            return Survey(True, variables_of(functions))
        leads = leads or bool(matches and matches(one))
        if type(one) is types.FunctionType:
            functions.append(one)
    return Survey(leads, variables_of(functions))


def variables_of(functions: Sequence[types.FunctionType]) -> list[Variable]:
    """Return the variables of functions, but for those to which one of them assigns."""
    live = {id(cell) for f in functions for cell in live_cells(f)}
    own = [f for f in functions if not is_of_library(f)]
    return [
        Variable(f.__qualname__, name, cell, content(cell))
        for f in own
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        if id(cell) not in live and content(cell) is not EMPTY
    ]


def live_cells(f: types.FunctionType) -> Iterator[types.CellType]:
    """Yield the variables to which the code of a function assigns: they are the user's own."""
    names = assigned_in(f.__code__)
    every = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    yield from (cell for name, cell in every if name in names)


def named(roots: Roots, wanted: Iterable[Id]) -> dict[Id, str]:
    """Return the names of some values, of those that the roots lead to."""
    missing, names = set(wanted), dict[Id, str]()
    for name, one in visited(roots):
        if id(one) in missing:
            missing.remove(id(one))
            names[id(one)] = name
        if not missing:
            break
    return names
