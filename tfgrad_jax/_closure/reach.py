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
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr

from tfgrad_jax._trace import TRACES, is_live, is_operand, is_staging
from tfgrad_jax._types import Wrapper

# How many objects to visit before we trace the call instead. Under staging a trace costs little,
# and `f` sees tracers anyway. Eagerly `f` would lose its values, so there it is the last resort.
_BUDGET, _BUDGET_STAGED = 10_000, 2_000
_BUDGET_INERT = 100_000  # numbers, strings and the like in one container: fast to skip

_FUNCTION, _BUILTIN = types.FunctionType, types.BuiltinFunctionType
# Objects of exactly these types hold no tracers, or are searched in another way.
INERT: set[type] = {bool, int, float, complex, str, bytes, bytearray, range, slice, type(None)}
INERT |= {type(Ellipsis), type(NotImplemented), types.ModuleType, types.CodeType, Jaxpr, np.ufunc}
INERT |= {types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType}
INERT |= {types.ClassMethodDescriptorType, types.GetSetDescriptorType}
INERT |= {type(jax.tree_util.default_registry)}
# A trace refers to the whole program that it records, and a user's object may hold one.
_LEAVES = (np.generic, np.dtype, jax.Array, Tracer, *TRACES)
JITTED = type(jax.jit(len))
CACHED = (JITTED, type(functools.cache(len)))
_SIZED = (list, tuple, dict, set, frozenset, collections.deque)


class TooMuchError(Exception):
    """There are too many objects to visit."""


class OpaqueError(Exception):
    """An object of this `kind` holds a tracer, and we cannot copy it to replace the tracer."""

    def __init__(self, holder: Any) -> None:
        super().__init__(type(holder).__qualname__)
        self.kind = type(holder)


_HOLDERS = {_FUNCTION, types.MethodType, *_SIZED}  # not searched for by any predicate
# These do not count towards the budget: a trace of the call would have to run them anyway.
_CODE = (_FUNCTION, types.MethodType, Wrapper)


def is_captured(value: Any) -> bool:
    """Return whether a value that a function holds must become an operand: a live tracer, a Ref."""
    if issubclass(type(value), Tracer):
        return is_live(value)
    return is_operand(value)


def is_leaf(cls: type) -> bool:
    """Return whether objects of a type hold nothing."""
    # Not cached: a cache would keep alive classes made in a function, and the values they hold.
    return cls in INERT or issubclass(cls, _LEAVES)


class Walk:
    """A walk from values, through the objects that they hold, to those that a predicate `takes`.

    It visits each object once, however many others hold it. `taken` has the values that it took,
    and `way` the ids of these and of all objects that lead to one. Some tracers are `unused`: the
    function reaches them, but does not use them. They are not taken; `way_to_unused` has the ids of
    the objects that lead to them. A patient walk visits more objects before it gives up.
    """

    def __init__(
        self,
        values: Sequence[Any],
        takes: Callable[[Any], bool] = is_captured,
        patient: bool = True,
        lenient: bool = False,
        unused: Container[int] = (),
    ) -> None:
        self.way: set[int] = set()
        self.way_to_unused: set[int] = set()
        self.taken: dict[int, Any] = {}  # by id
        self.takes, self.lenient, self._unused = takes, lenient, unused
        self._budget = _BUDGET if patient or not is_staging() else _BUDGET_STAGED
        self._seen: dict[int, Any] = {}  # by id; holds the objects, so that no id is used twice
        self._holders: dict[int, list[int]] = {}  # for each id, the ids of the objects that hold it
        self._pending: collections.deque[Any] = collections.deque()
        self.leads(values)

    def narrow(self, ids: Container[int]) -> None:
        """Take only the values with these ids; the others that were taken become `unused`.

        `_holders` has all the ways, so this marks them again, without another walk.
        """
        takes, reached = self.takes, self.taken
        self.takes = lambda value: id(value) in ids and takes(value)
        self.taken = {key: value for key, value in reached.items() if key in ids}
        self._unused = reached.keys() - self.taken.keys()
        self.way, self.way_to_unused = set(), set()
        for key in reached:
            self._mark(key, self.way if key in ids else self.way_to_unused)

    def leads(self, values: Sequence[Any]) -> bool:
        """Visit what the values hold; return whether they lead to a value that is taken.

        Raises `TooMuchError` if there are too many objects. Raises `OpaqueError`, unless `lenient`,
        as soon as a weak reference leads to such a value: it cannot be copied.
        """
        self._meet(values, 0)
        while self._pending:
            value = self._pending.popleft()  # the nearest ones first
            held = _held(value, self._budget)
            if not issubclass(type(value), _CODE):
                self._budget -= 1 + len(held)
            if self._budget < 0:
                raise TooMuchError
            self._meet(held, id(value))
        return any(id(value) in self.way for value in values)

    def _meet(self, held: Iterable[Any], holder: int) -> None:
        for value in held:
            cls, key = type(value), id(value)
            if cls in INERT:
                continue
            self._holders.setdefault(key, []).append(holder)
            if key in self._seen:
                for way in (self.way, self.way_to_unused):
                    if key in way:
                        self._mark(holder, way)
                continue
            self._seen[key] = value
            if cls not in _HOLDERS and self.takes(value):
                self.taken[key] = value
                self._mark(key, self.way)
            elif key in self._unused:
                self._mark(key, self.way_to_unused)
            elif not is_leaf(cls):
                self._pending.append(value)

    def _mark(self, key: int, way: set[int]) -> None:
        """Put an object on a way, with all objects that lead to it."""
        marked = [key]
        while marked:
            key = marked.pop()
            if key not in way:
                way.add(key)
                value = self._seen.get(key)
                # It cannot be copied, so we need not look further: the modules of linen refer
                # weakly to their parents, and through them to the whole model.
                if way is self.way and type(value) is weakref.ref and not self.lenient:
                    raise OpaqueError(value)
                marked += self._holders.get(key, ())


def _held(value: Any, most: int) -> Sequence[Any]:
    """Return the objects that an object holds; raise `TooMuchError` if there are more than `most`.

    A long container of numbers and strings counts as empty.
    """
    cls = type(value)
    if cls is _FUNCTION:
        held = [value.__defaults__, value.__kwdefaults__, value.__dict__ or None]
        return held + [content_of(cell) for cell in value.__closure__ or ()]
    if issubclass(cls, Wrapper):  # everything else that it holds is derived from these
        _, parts, attributes = value.unwrapped()
        return [*parts, *attributes.values()]
    if cls is _BUILTIN:
        return (value.__self__,)
    if issubclass(cls, type):
        # Only a class that is made in a function can hold a tracer.
        local = [c for c in value.__mro__ if not is_importable(c)]
        return [v for c in local for v in vars(c).values()]
    size = len(value) if cls in _SIZED else _size(value, cls)
    if size > most and size <= _BUDGET_INERT and _is_inert(value, cls):
        return ()
    if size > most:
        raise TooMuchError
    if issubclass(cls, np.ndarray):
        return list(value.flat) if value.dtype == object else ()
    if cls is weakref.ref:
        return (value(),)
    if cls in CACHED:  # not the cached results: they depend on earlier calls
        return (value.__wrapped__,)
    if issubclass(cls, dict):  # Python 3.13 shows the attributes of an object to it alone
        held = [*dict.keys(value), *dict.values(value)]
        return held if cls is dict else [*held, *gc.get_referents(value)]
    return gc.get_referents(value)


def _is_inert(value: Any, cls: type) -> bool:
    """Return whether a list, a tuple or a dict holds only numbers, strings and the like."""
    if cls is dict and not gc.is_tracked(value):
        return True  # up to Python 3.13; 3.14 tracks every dict, so we look at each entry
    if cls is dict:
        return INERT.issuperset(map(type, value)) and INERT.issuperset(map(type, value.values()))
    return cls in (list, tuple) and INERT.issuperset(map(type, value))


def _size(value: Any, cls: type) -> int:
    """Return how many items a container has, without listing them; 0 for any other object."""
    if issubclass(cls, np.ndarray):
        return value.size if value.dtype == object else 0
    sized: Any = next((base for base in _SIZED if issubclass(cls, base)), None)
    return 0 if sized is None else sized.__len__(value)  # not the `__len__` of a user's class


def is_importable(value: Any) -> bool:
    """Return whether a class or a function can be imported by its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None
