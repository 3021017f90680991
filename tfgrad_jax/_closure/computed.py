"""Tell what a class computes when it is first read from what a function assigns.

`functools.cached_property` keeps what it has computed in an attribute; so do a property `table`
that makes `_table` if it is missing, and the cached properties of `attrs`, in slots. On a copy that
is no loss: the original computes it again. But nothing else may assign to that attribute: a random
key that was split behind a cached property was the same at each call. Neither names nor values tell
these apart, but code does. So `is_computed` looks through the code that may have run.
"""

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from tfgrad_jax._messages.source import Source, codes_inside, is_within, names_in

from .objects import Object
from .reach import BUDGET, survey
from .referents import CACHED, is_leaf

_Codes: TypeAlias = set[types.CodeType]

# What assigns to an attribute whose name is a string; the first ones do nothing else.
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
_STORES = "STORE_ATTR", "DELETE_ATTR"
_BY_NAME = {*_SETTERS, "__dict__", "vars"}


def is_computed(value: Object, name: str, values: Sequence[Object], source: Source) -> bool:
    """Return whether the class of a value computed a new attribute of it, when it was first read.

    `values` lead to the functions that have run; so does the class.
    """
    getter = _getter(type(value), name)
    functions = None if getter is None else _functions(type(value), values, source)
    if getter is None or functions is None:
        return False
    methods = _codes(f for f in _members(type(value)) if type(f) is types.FunctionType)
    every = _codes(functions) - getter
    is_named = any(not {name, name.lstrip("_")}.isdisjoint(_strings(code)) for code in every)
    for code in every:
        # A method that gets a name, as that of a pytree does, is called by code that has the name.
        by_name = _BY_NAME if is_named else set() if code in methods else _SETTERS
        if name in names_in(code, *_STORES) or not by_name.isdisjoint(code.co_names):
            return False
    return True


def _getter(cls: type, name: str) -> _Codes | None:
    """Return the code in a class that keeps what it computes in an attribute; None if none does."""
    members = {k: v for base in reversed(cls.__mro__) for k, v in vars(base).items()}
    shown = members.get(name)
    get = getattr(type(shown), "__get__", None)
    if get is functools.cached_property.__get__ or _is_cached_by_attrs(cls, name):
        return set()
    if isinstance(get, types.FunctionType) and not hasattr(type(shown), "__set__"):
        return {get.__code__}  # a lazy property of a library, which assigns by name
    for member in members.values():
        code = getattr(getattr(member, "fget", None), "__code__", None)
        if code is not None and name in names_in(code, *_STORES) and _asks_first(code, name):
            return {code}
    return None


def _is_cached_by_attrs(cls: type, name: str) -> bool:
    """Return whether `attrs` has made a slot for a cached property: one that is no field."""
    for base in cls.__mro__:
        fields = vars(base).get("__attrs_attrs__")
        if fields is not None and type(vars(base).get(name)) is types.MemberDescriptorType:
            return name not in {field.name for field in fields}
    return False


def _asks_first(code: types.CodeType, name: str) -> bool:
    """Return whether a getter asks for an attribute, and then whether to assign to it.

    One that counts asks for it, and assigns.
    """
    is_read = is_tested = False
    for one in dis.get_instructions(code):
        if one.opname == "STORE_ATTR" and one.argval == name:
            return is_tested
        is_read |= one.argval == name
        is_branch = one.opcode in dis.hasjrel and not one.opname.startswith("JUMP")
        is_tested |= is_read and is_branch
    return False


# --- the code that may run ------------------------------------------------------------------------


def _functions(
    cls: type, values: Sequence[Object], source: Source
) -> list[types.FunctionType] | None:
    """Return the functions that may have run; None if it would take long to find them.

    The classes of the values, and what these hold, lead to them; and what the code of the user's
    modules names among its global variables.
    """
    classes = {cls, *(type(v) for v in values if not is_leaf(v, type(v)))}
    scopes, every = {id(vars(sys.modules.get(cls.__module__, sys)))}, {}
    waiting = [*values, *(member for c in classes for member in _members(c))]
    while waiting:
        found = survey(waiting, ends=every, budget=10 * BUDGET)
        if not found.is_complete:
            return None
        seen = (v for key, (v, *_) in found.visited.items() if key not in every)
        new = [v for v in seen if type(v) is types.FunctionType]
        every |= {id(f): f for f in new}
        for f in new:
            code = f.__code__
            if code is source.code or is_within(source.code, code) or is_within(code, source.code):
                scopes.add(id(f.__globals__))
        waiting = [g for f in new if id(f.__globals__) in scopes for g in _globals(f)]
    return [f for f in every.values() if f.__name__ != "__init__"]  # it fills another object


def _members(cls: type) -> Iterator[Object]:
    for base in cls.__mro__:
        yield from vars(base).values()


def _globals(f: types.FunctionType) -> Iterator[Object]:
    """Yield the functions that a function names, and the members of classes of its own module."""
    names = {name for code in _codes([f]) for name in code.co_names}
    for value in map(f.__globals__.get, names):
        if isinstance(value, types.ModuleType):
            of_module = map(vars(value).get, names)
            yield from (v for v in of_module if isinstance(v, types.FunctionType))
        elif isinstance(value, (types.FunctionType, *CACHED)):
            yield value
        elif value is not None:
            cls = value if isinstance(value, type) else type(value)
            if cls.__module__ == f.__globals__.get("__name__"):
                yield from _members(cls)


def _codes(functions: Iterable[types.FunctionType]) -> _Codes:
    """Return the code of functions, and of those inside them."""
    return {c for f in functions for c in (f.__code__, *codes_inside(f.__code__))}


def _strings(code: types.CodeType) -> set[str]:
    """Return the strings in code, such as names of keywords."""
    waiting, found = list(code.co_consts), set()
    for value in waiting:
        if type(value) is str:
            found.add(value)
        elif type(value) is tuple or type(value) is frozenset:
            waiting += value
    return found
