"""Find the tracers that values hold, and the way to each of them.

`reach` visits every object that a function holds, directly and through others, once, as the garbage
collector does. The objects that lead to a tracer are *on the way*: `skeleton.py` copies only these.
If one of them is not copied, or there is too much to visit, `Reached.obstacle` says so, and the
function must be traced.
"""

import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from jax.core import Tracer

from tfgrad_jax._jax.trace import is_below, is_live, is_operand
from tfgrad_jax._jax.types import Copied
from tfgrad_jax._messages.source import names_in

from .objects import UNWRAPPED, Kind, Object, can_be_key, content_of, kind_of
from .referents import CACHED, CODE, INERT, REFERENTS, globals_of, is_leaf, referents_of

Id: TypeAlias = int  # of an object that is kept alive meanwhile

# How many objects to visit. Then a function is traced, and sees no values.
BUDGET = 10_000
TOO_MUCH = "beside many thousands of objects, which may all hold others"


@dataclasses.dataclass(slots=True)
class Reached:
    """What values hold, directly and through others."""

    captured: dict[Id, Object]  # the tracers, or whatever else was looked for, in order
    # These, and all objects that lead to one, with how each is copied, or why it is not.
    way: dict[Id, Kind | str]
    functions: list[types.FunctionType]  # that were visited, and have variables
    mutable: list[Object]  # what else was visited and may be changed: containers, objects
    assigned: dict[Id, str]  # the variables to which these assign: cells, with their names
    # An object, and the ids of those that hold it. As it has the objects, no id is used twice.
    visited: dict[Id, list[Object]]
    tables: dict[Id, list[Object]]  # with those of their keys that may lead to what is captured
    stops: bool  # at the first obstacle
    # Why the values cannot be copied around others; "" if they can be.
    obstacle: str = ""
    is_complete: bool = True  # False if the visit was given up

    @property
    def is_copied(self) -> bool:
        """Return whether all objects on the way are copied. Always, if there is no obstacle."""
        return all(isinstance(kind, Kind) or k in self.captured for k, kind in self.way.items())

    def on_way(self) -> list[Object]:
        """Return the objects that lead to a captured value."""
        return [self.visited[key][0] for key in self.way if key not in self.captured]

    def lead_to(self, keys: Container[Id]) -> None:
        """Capture those of these objects that were visited."""
        for key in [key for key in self.visited if key in keys]:
            value, *holders = self.visited[key]
            self.captured[key], self.way[key] = value, ""
            self._mark(holders)
        self.look_at_keys()

    def hold(self, key: Id, holder: Id) -> None:
        """Note one more object that holds another one."""
        self.visited[key].append(holder)
        if key in self.way:
            self._mark([holder])

    def _mark(self, marked: list[Id]) -> None:
        while marked:
            key = marked.pop()
            if not key or key in self.way:
                continue
            value, *holders = self.visited[key]
            marked += holders
            is_unwrapped = not self.stops and type(value) in CACHED
            kind = self.way[key] = UNWRAPPED if is_unwrapped else kind_of(value, type(value))
            if self.stops and isinstance(kind, str):
                # Look no further: the modules of linen refer weakly to their parents, and through
                # them to the whole model. 64 layers would each walk through all of it.
                self.obstacle = f"in an object that is not copied: {kind}"
                self.is_complete = False
                return

    def look_at_keys(self) -> None:
        """Find tables on the way that are not copied, for their keys."""
        for key, keys in self.tables.items():
            # The hash may read what a key holds, and copies are empty when the tables are filled.
            if key in self.way and not all(can_be_key(k, self.way) for k in keys):
                self.way[key] = "a `dict` with a key whose class has a `__hash__`"
                if self.stops:
                    self.obstacle = "in a key of a `dict`, whose class has a `__hash__`"


def is_captured(value: Object) -> bool:
    """Return whether a value that a function holds must become an operand: a live tracer, a Ref."""
    return is_live(value) if isinstance(value, Tracer) else is_operand(value)


def reach(values: Sequence[Object], takes: Callable[[Object], bool] = is_captured) -> Reached:
    """Visit what the values hold, up to the first obstacle. `takes` says what to capture."""
    return _walk(values, takes, (), BUDGET, stops=True)


def survey(
    values: Sequence[Object],
    takes: Callable[[Object], bool] = lambda _: False,
    *,
    ends: Container[Id] = (),
    budget: int = BUDGET,
) -> Reached:
    """Visit all that the values hold; `ends` says what not to look into.

    Only too much to visit is an obstacle. The caller decides what to do about objects on the way
    that are not copied. A jitted function will be copied without the `jit`.
    """
    return _walk(values, takes, ends, budget, stops=False)


def _walk(
    values: Sequence[Object],
    takes: Callable[[Object], bool],
    ends: Container[Id],
    budget: int,
    stops: bool,
) -> Reached:
    found = Reached({}, {}, [], [], {}, {}, {}, stops)
    visited, way, assigned = found.visited, found.way, found.assigned
    waiting: list[tuple[Id, Iterable[Object]]] = [(0, values)]  # what these objects hold
    for holder, held in waiting:  # it grows: the nearest ones come first
        for value in held:
            cls = type(value)
            if cls in INERT:
                continue
            key = id(value)
            if key in visited:
                found.hold(key, holder)
                continue
            visited[key] = [value, holder]
            of_type = REFERENTS.get(cls)
            is_code = cls in CODE or (of_type is None and issubclass(cls, Copied))
            budget -= not is_code
            if key in ends:
                continue
            if of_type is None and is_leaf(value, cls):
                if takes(value):
                    found.captured[key], way[key] = value, ""
                    if holder not in way:  # most often it has others, too
                        found._mark([holder])
                continue
            if cls is types.FunctionType:
                if value.__closure__:
                    found.functions.append(value)
                    assigned.update(assigned_by(value))
            elif cls is types.GeneratorType:
                assigned.update(_own_variables(value))
            elif key in assigned and is_below(content_of(value)):
                continue
            more = (of_type or referents_of)(value, budget)
            if more is None or budget < 0:
                found.obstacle, found.is_complete = TOO_MUCH, False
                return found
            if not (is_code or cls is tuple):
                found.mutable.append(value)
                if more and issubclass(cls, dict):
                    found.tables[key] = [k for k in dict.__iter__(value) if type(k) not in INERT]
            waiting.append((key, more))
        if found.obstacle:
            return found
    found.look_at_keys()
    return found


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
    assigned, stored = assigned_by(f), names_in(f.__code__, "STORE_GLOBAL")
    cells = [cell for cell in f.__closure__ or () if id(cell) not in assigned]
    variables = [value for name, value in globals_of(f).items() if name not in stored]
    variables += map(content_of, cells)
    return [*variables, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]


@functools.cache
def _assigned(code: types.CodeType) -> frozenset[str]:
    """Return the variables of outer scopes to which a function, or one inside it, assigns."""
    names = set(names_in(code, "STORE_DEREF", "DELETE_DEREF"))
    inner = [_assigned(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(names.union(*inner).intersection(code.co_freevars))


def _own_variables(generator: Object) -> dict[Id, str]:
    """Return the cells of a generator that waits, without those of outer scopes: they are live."""
    held = gc.get_referents(generator)
    functions = [
        f for f in held if type(f) is types.FunctionType and f.__code__ is generator.gi_code
    ]
    outer = {id(cell) for f in functions for cell in f.__closure__ or ()}
    return {id(c): "" for c in held if type(c) is types.CellType and id(c) not in outer}
