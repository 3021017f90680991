"""Find the arrays that values hold, and the way to each of them: for messages and tools.

`survey` visits every object that a function holds, directly and through others, once, as the
garbage collector does. The objects that lead to an array are *on the way*: `skeleton.py` copies
only these.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from tfgrad_jax._jax.types import Copied

from .objects import UNWRAPPED, Kind, Object, can_be_key, kind_of
from .referents import CACHED, CODE, INERT, REFERENTS, is_leaf, referents_of

Id: TypeAlias = int  # of an object that is kept alive meanwhile

# How many objects to visit.
BUDGET = 10_000


@dataclasses.dataclass(slots=True)
class Reached:
    """What values hold, directly and through others."""

    captured: dict[Id, Object]  # the tracers, or whatever else was looked for, in order
    # These, and all objects that lead to one, with how each is copied, or why it is not.
    way: dict[Id, Kind | str]
    # An object, and the ids of those that hold it. As it has the objects, no id is used twice.
    visited: dict[Id, list[Object]]
    tables: dict[Id, list[Object]]  # with those of their keys that may lead to what is captured
    is_complete: bool = True  # False if the visit was given up

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
            is_unwrapped = type(value) in CACHED
            self.way[key] = UNWRAPPED if is_unwrapped else kind_of(value, type(value))

    def look_at_keys(self) -> None:
        """Find tables on the way that are not copied, for their keys."""
        for key, keys in self.tables.items():
            # The hash may read what a key holds, and copies are empty when the tables are filled.
            if key in self.way and not all(can_be_key(k, self.way) for k in keys):
                self.way[key] = "a `dict` with a key whose class has a `__hash__`"


def survey(
    values: Sequence[Object],
    takes: Callable[[Object], bool] = lambda _: False,
    *,
    ends: Container[Id] = (),
    budget: int = BUDGET,
) -> Reached:
    """Visit all that the values hold; `ends` says what not to look into, `takes` what to capture.

    The caller decides what to do about objects on the way that are not copied. A jitted function
    will be copied without the `jit`.
    """
    found = Reached({}, {}, {}, {})
    visited, way = found.visited, found.way
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
            more = (of_type or referents_of)(value, budget)
            if more is None or budget < 0:
                found.is_complete = False
                return found
            if more and issubclass(cls, dict):
                found.tables[key] = [k for k in dict.__iter__(value) if type(k) not in INERT]
            waiting.append((key, more))
    found.look_at_keys()
    return found
