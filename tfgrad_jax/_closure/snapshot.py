"""What code that runs later reads, as it was left for it.

A rule must see its variables as they were when `f` returned, as it does under `jit`; but a loop, or
a scope that still runs, may have assigned to them since. And what `f` has made for its rule, such
as a list of activations that the rule pops, must be there in full each time the rule runs. (What
the user owns, an object or a dict from outside, a rule reads when it runs.)

Nothing of the user's is written, not even for a while: when 8 threads pulled back layers that were
made in one loop, 1,229 of 1,600 gradients were wrong. Instead the functions that lead to something
that has changed are copied around what it held.

Variables of an outer scope to which the code itself assigns, such as a counter, are the user's own,
and live.
"""

import collections
import functools
import operator
import types
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from .objects import Contents, Kind, Object, content_of, kind_of
from .reach import Id, Reached, survey
from .referents import globals_of

_CELL = kind_of(types.CellType(), types.CellType)
# Where these lead to a tracer, they are not copied, so `kind_of` does not know them.
_COLLECTIONS: dict[type, Kind] = {
    set: Kind(
        lambda value: set,
        lambda value: (),
        lambda value: dict(enumerate(value)),
        lambda new, contents: new.update(contents.values()),
    ),
    collections.deque: Kind(
        lambda value: functools.partial(collections.deque, maxlen=value.maxlen),
        lambda value: (),
        lambda value: dict(enumerate(value)),
        lambda new, contents: new.extend(contents.values()),
    ),
}


class Watched(NamedTuple):
    """An object, and what it held when it was looked at."""

    value: Object
    kind: Kind
    contents: Contents
    cls: type | None = None  # None: not noted

    def is_changed(self) -> bool:
        """Return whether it holds something else now."""
        if type(self.value) is not (self.cls or type(self.value)):
            return True
        now = self.kind.contents(self.value)
        is_same = list(now) == list(self.contents)
        return not (is_same and all(map(operator.is_, now.values(), self.contents.values())))


class Owned:
    """What the user holds: what a call has, and what the globals lead to that its code names.

    (`f` may take a global log into a variable. A rule that appends to it did not make it.)
    """

    def __init__(self, held: Sequence[Object] = ()) -> None:
        self.held = held  # by the call
        self._parts = [held, *held]

    @functools.cached_property
    def all(self) -> Mapping[Id, Sequence[Object]]:
        """All of it by its ids, each with those that hold it: a walk through a model, maybe."""
        visited = survey(self._parts).visited
        functions = [v for v, *_ in visited.values() if type(v) is types.FunctionType]
        variables = [value for f in functions for value in globals_of(f).values()]
        return visited | survey(variables).visited

    def not_seen_in(self, reached: Reached) -> Container[Id]:
        """Return the ids of what a walk has found, but not through what is nearest of this.

        A rule that reads `self` reaches a whole model, of which all is the user's.
        """
        near = set(map(id, self._parts))
        for part in self._parts:
            inside = part.values() if isinstance(part, Mapping) else part
            near.update(map(id, inside if isinstance(part, Mapping | tuple | list) else ()))
            if type(part) is types.FunctionType:
                cells = part.__closure__ or ()
                near.update(map(id, (*cells, *map(content_of, cells), *(part.__defaults__ or ()))))
        others = set()
        for key, (_, *holders) in reached.visited.items():  # holders come first
            if key not in near and near.isdisjoint(holders):
                others.add(key)
            else:
                near.add(key)
        return others


class Snapshot:
    """What code reads that leads to no tracer, as it is now.

    These are the variables of functions; and if it is known what the user `owned`, what `f` has
    made: all other containers and objects, and variables to which the code assigns.

    What code reads that `runs_now` cannot change before. Then nothing is held: the call of a layer
    would keep the batch that its callback reads alive, as long as the gradient is not computed.
    """

    def __init__(
        self, reached: Reached, runs_now: bool = False, owned: Owned | None = None
    ) -> None:
        self._held: list[Watched] = []
        if runs_now:
            return
        assigned, way = reached.assigned, reached.way
        cells = {id(c): c for f in reached.functions for c in f.__closure__ or ()}
        noted: list[tuple[Object, Kind | str]] = [
            (c, _CELL) for key, c in cells.items() if not (key in assigned or key in way)
        ]
        if owned is not None:
            live = [*reached.mutable, *(c for key, c in cells.items() if key in assigned)]
            others = owned.not_seen_in(reached) if live else ()
            live = [v for v in live if id(v) in others and id(v) not in way]
            made = [(v, type(v)) for v in live if id(v) not in owned.all]
            noted += [(v, _COLLECTIONS.get(cls) or kind_of(v, cls)) for v, cls in made]
        for value, kind in noted:
            if isinstance(kind, Kind):
                contents = kind.contents(value)
                # A variable that is not assigned yet has its value later.
                if contents or kind is not _CELL:
                    self._held.append(Watched(value, kind, contents))

    def changed(self) -> Sequence[Watched]:
        """Return what holds something else now, with what it held."""
        return [w for w in self._held if w.is_changed()]
