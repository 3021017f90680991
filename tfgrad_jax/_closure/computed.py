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
from collections.abc import Iterator, Sequence

from tfgrad_jax._messages.source import Source, is_within

from .objects import Object, content_of
from .reach import BUDGET, CACHED, is_leaf, reach

# What assigns to an attribute whose name is a string; the first ones do nothing else.
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
_BY_NAME = {*_SETTERS, "__dict__", "vars"}
_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_RAISES = ("RAISE_VARARGS", "RERAISE")


def is_computed(value: Object, name: str, values: Sequence[Object], source: Source) -> bool:
    """Return whether the class of a value computed a new attribute of it, when it was first read.

    `values` lead to the functions that have run; so does the class.
    """
    getters = _getters(type(value), name)
    if getters is None:
        return False
    found = _functions(type(value), values, source)
    if found is None:
        return False
    methods, others = found
    words = {name, name.lstrip("_")}
    every = (f for f in (*methods, *others) if f.__code__ not in getters)
    is_named = any(not words.isdisjoint(_strings(f)) for f in every)
    # A method that gets a name, as that of a pytree does, is called by code that has the name.
    for functions, by_name in ((methods, set()), (others, _SETTERS)):
        for code in frozenset().union(*(_codes(f.__code__) for f in functions)) - getters:
            words = _BY_NAME if is_named else by_name
            if name in _stored(code) or not words.isdisjoint(code.co_names):
                return False
    return True


def _getters(cls: type, name: str) -> set[types.CodeType] | None:
    """Return the code in a class that keeps what it computes in an attribute; None if none does."""
    members = {k: v for base in reversed(cls.__mro__) for k, v in vars(base).items()}
    shown = members.get(name)
    get = getattr(type(shown), "__get__", None)
    if get is functools.cached_property.__get__ or _is_cached_by_attrs(cls, name):
        return set()
    if isinstance(get, types.FunctionType) and not hasattr(type(shown), "__set__"):
        # A lazy property of a library, which assigns by name.
        by_setattr = {"setattr", "__setattr__"}.intersection(get.__code__.co_names)
        by_item = "__dict__" in get.__code__.co_names and "STORE_SUBSCR" in _operations(
            get.__code__
        )
        return {get.__code__} if by_setattr or by_item else None
    for member in members.values():
        is_property = issubclass(type(member), property)
        if is_property or issubclass(type(member), functools.cached_property):
            getter = member.fget if is_property else member.func
            code = getter.__code__ if type(getter) is types.FunctionType else None
            if code and name in _stored(code) and (_is_lazy(code, name) or not is_property):
                return {code}
    return None


def _is_cached_by_attrs(cls: type, name: str) -> bool:
    """Return whether `attrs` has made a slot for a cached property: one that is no field."""
    for base in cls.__mro__:
        fields = vars(base).get("__attrs_attrs__")
        if fields is not None and type(vars(base).get(name)) is types.MemberDescriptorType:
            return name not in {field.name for field in fields}
    return False


def _is_lazy(code: types.CodeType, name: str) -> bool:
    """Return whether a getter asks for an attribute before it assigns to it, and need not assign.

    One that counts assigns each time. (What follows an exception needs no question.)
    """
    every = list(dis.get_instructions(code))
    place = {instruction.offset: i for i, instruction in enumerate(every)}
    is_lazy, waiting, seen = False, [(0, 0)], set()
    while waiting:
        i, asked = state = waiting.pop()
        one = every[i]
        if state in seen:
            continue
        seen.add(state)
        if one.opname == "STORE_ATTR" and one.argval == name:
            if asked < 2:
                return False
            continue
        is_lazy |= one.opname.startswith("RETURN_")
        is_branch = one.opcode in dis.hasjrel and one.opname not in _JUMPS
        if one.argval == name or (asked and is_branch):  # 1: the name was read; 2: and then tested
            asked = max(asked, 1 + is_branch)
        if one.opcode in dis.hasjrel:
            waiting.append((place[one.argval], asked))
        if not one.opname.startswith(("RETURN_", *_JUMPS, *_RAISES)):
            waiting.append((i + 1, asked))
    return is_lazy


# --- the code that may run ------------------------------------------------------------------------


def _functions(
    cls: type, values: Sequence[Object], source: Source
) -> tuple[list[types.FunctionType], list[types.FunctionType]] | None:
    """Return the methods of classes, and other functions, that may have run; None if too many.

    These are those of the class and of the values; what the values hold; and what the code of the
    user's modules names among its global variables, and calls of other modules.
    """
    classes = {cls, *(type(v) for v in values if not is_leaf(v, type(v)))}
    scopes, every = {id(vars(sys.modules.get(cls.__module__, sys)))}, {}
    found: list[list[types.FunctionType]] = []
    waiting = [member for c in classes for member in _members(c)]
    while waiting:
        reached = reach(waiting, lambda _: False, ends=every, budget=10 * BUDGET, lenient=True)
        if not reached.is_complete:
            return None
        seen = (v for key, (v, *_) in reached.visited.items() if key not in every)
        new = [v for v in seen if type(v) is types.FunctionType]
        every |= {id(f): f for f in new}
        for f in new:
            inner = is_within(source.code, f.__code__) or is_within(f.__code__, source.code)
            if inner or f.__code__ is source.code:
                scopes.add(id(f.__globals__))
        waiting = [g for f in new if id(f.__globals__) in scopes for g in _globals(f)]
        waiting += () if found else values
        found.append([f for f in new if f.__name__ != "__init__"])  # it fills another object
    return found[0], [f for some in found[1:] for f in some]


def _members(cls: type) -> Iterator[Object]:
    for base in cls.__mro__:
        yield from vars(base).values()


_CALLED = (types.FunctionType, *CACHED)


def _globals(f: types.FunctionType) -> Iterator[Object]:
    """Yield the functions that a function names, and the members of classes of its own module."""
    names = {name for code in _codes(f.__code__) for name in code.co_names}
    for value in map(f.__globals__.get, names):
        if isinstance(value, types.ModuleType):
            of_module = map(vars(value).get, names)
            yield from (v for v in of_module if isinstance(v, types.FunctionType))
        elif isinstance(value, _CALLED):
            yield value
        elif value is not None:
            cls = value if isinstance(value, type) else type(value)
            if cls.__module__ == f.__globals__.get("__name__"):
                yield from _members(cls)


@functools.cache
def _codes(code: types.CodeType) -> frozenset[types.CodeType]:
    """Return the code of a function and of those inside it."""
    inner = [_codes(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset({code}).union(*inner)


@functools.cache
def _stored(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes to which code assigns."""
    stores = ("STORE_ATTR", "DELETE_ATTR")
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in stores)


@functools.cache
def _operations(code: types.CodeType) -> frozenset[str]:
    return frozenset(i.opname for i in dis.get_instructions(code))


def _strings(f: types.FunctionType) -> set[str]:
    """Return the strings in the code of a function, such as names of keywords, and in its cells."""
    waiting: list[Object] = [*map(content_of, f.__closure__ or ()), f.__defaults__]
    waiting += (code.co_consts for code in _codes(f.__code__))
    found = set()
    for value in waiting:
        if type(value) is str:
            found.add(value)
        elif type(value) is tuple or type(value) is frozenset:
            waiting += value
    return found
