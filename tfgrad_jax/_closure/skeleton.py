"""Copy functions and objects, with other values in the places of the tracers that they hold.

`hoist_tracers` removes the tracers from values and returns a `Skeleton`. Given other values for
them, the skeleton makes copies. It copies only the objects that lead to a tracer; copies share all
others with the originals. Copies keep identities among themselves: a parent pointer leads to the
copy of the parent.
"""

import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._jax.types import Inert
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import describe

from .objects import Filler, Kind, Label, Maker, Object, content_of
from .reach import Id, Reached, reach, survey
from .snapshot import Owned, Snapshot, Watched

Place: TypeAlias = int  # of an object, in the one list of those that a skeleton knows


class _Make(NamedTuple):
    """How to make a copy, which is empty or has its parts."""

    place: Place
    maker: Maker
    parts: Sequence[Place]


class _Fill(NamedTuple):
    """What to put into a copy."""

    place: Place
    fill: Filler
    contents: Mapping[Label, Place]
    watched: Kind | None  # what shows later what the copy holds, if nothing may be assigned to it


class Copies(NamedTuple):
    """Copies of values, and those objects among them to which nothing may be assigned."""

    values: Sequence[Object]
    watched: list[Watched]


class Skeleton(Inert):
    """A plan for copying values. It holds none that were removed: it must keep no tracer alive."""

    __slots__ = ("_also", "_fills", "_makes", "_removed", "_results", "_shared", "_snapshot")

    def __init__(
        self,
        shared: Sequence[Object],  # by place: what copies share with the originals, or None
        removed: Sequence[Place],
        steps: tuple[Sequence[_Make], Sequence[_Fill]],
        results: Sequence[Place],
        also_watched: Sequence[Watched],  # of the shared ones
        snapshot: Snapshot,
    ) -> None:
        self._shared, self._removed, self._results = shared, removed, results
        self._makes, self._fills = steps
        self._also, self._snapshot = also_watched, snapshot

    def copies(self, values: Sequence[Object]) -> Copies:
        """Return copies, with these values in the places of those that were removed."""
        at = [*self._shared]
        for place, value in zip(self._removed, values, strict=True):
            at[place] = value
        for place, maker, parts in self._makes:
            at[place] = maker(*[at[i] for i in parts])
        watched = [*self._also]
        for place, fill, labels, kind in self._fills:
            contents = {label: at[i] for label, i in labels.items()}
            if contents:
                fill(at[place], contents)
            if kind is not None:
                watched.append(Watched(at[place], kind, contents, type(at[place])))
        results = frozen([at[i] for i in self._results], self._snapshot.changed())
        return Copies(results, watched)


def hoist_tracers(
    values: Sequence[Object],
    reached: Reached | None = None,
    watched: Sequence[Watched] | None = None,
    *,
    also: Sequence[Object] = (),
    runs_now: bool = False,
    owned: Owned | None = None,
) -> tuple[Skeleton, list[Object]]:
    """Remove the tracers from values that have no obstacle: return a skeleton, and the tracers.

    `reached` is what a walk from the values, and from those to be removed `also`, has found:
    tracers, or whatever else it looked for. A survey has no obstacle where an object is not copied;
    the copies then share that object with the originals.

    Nothing may be assigned to the copies. If a list of `watched` objects is given, this holds only
    for these objects and their copies. The code in the values runs later, unless it `runs_now`: on
    what they hold now. What the user `owned` it reads when it runs.
    """
    reached = reached or reach(values)
    plan = _Plan(reached, watched, owned or Owned(), Snapshot(reached, runs_now, owned))
    return plan.skeleton(values, also), plan.removed


def frozen(values: Sequence[Object], changed: Sequence[Watched]) -> Sequence[Object]:
    """Return values that lead to what has changed as it was: they are copied around that."""
    if not changed:
        return values
    held = [v for w in changed for v in w.contents.values()]  # it may lead to what has changed, too
    before = {id(w.value): w for w in changed}
    found = survey([*values, *held], ends=before)
    found.lead_to(before)
    for key, kind in found.way.items():
        if isinstance(kind, str) and key not in found.captured:
            through = found.visited[key][0]
            raise errors.changed_behind(_shown(found, changed), type(through).__qualname__)
    skeleton, originals = hoist_tracers([*values, *held], found)
    new = {id(v): before[id(v)].kind.maker(v)() for v in originals}
    copies, _ = skeleton.copies(list(new.values()))
    rest = iter(copies[len(values) :])
    for w in changed:
        contents = {label: next(rest) for label in w.contents}
        if id(w.value) in new and contents and w.kind.fill is not None:
            w.kind.fill(new[id(w.value)], contents)
    return copies[: len(values)]


def _shown(found: Reached, changed: Sequence[Watched]) -> str:
    """Name what has changed: a variable, or what it holds."""
    values = {id(w.value) for w in changed}
    for f in found.functions:
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if id(cell) in values or id(content_of(cell)) in values:
                return f"The variable {name!r} of {describe(f)}"
    return f"A `{type(changed[0].value).__qualname__}` that it has made"


class _Plan:
    """The places and the steps of a skeleton, while they are found."""

    def __init__(
        self,
        reached: Reached,
        watched: Sequence[Watched] | None,
        owned: Owned,
        snapshot: Snapshot,
    ) -> None:
        self.removed: list[Object] = []
        self._reached = reached
        self._owned = owned
        self._snapshot = snapshot
        self._watched = None if watched is None else {id(w.value): w for w in watched}
        self._shared: list[Object] = []
        self._of_removed: list[Place] = []
        self._makes: list[_Make] = []
        self._fills: list[_Fill] = []
        self._places: dict[Id, Place] = {}
        self._unfilled: list[tuple[Object, Kind, Filler]] = []

    def skeleton(self, values: Sequence[Object], also: Sequence[Object]) -> Skeleton:
        results = [self._place(value) for value in values]
        for value in also:
            self._place(value)
        for value, kind, fill in self._unfilled:  # it grows
            contents = kind.contents(value)
            labels = {label: self._place(held) for label, held in contents.items()}
            watched = kind if self._is_watched(value) else None
            self._fills.append(_Fill(self._places[id(value)], fill, labels, watched))
        others = self._reached.visited.keys() - self._reached.way.keys()
        shared = [w for key, w in (self._watched or {}).items() if key in others]
        steps = self._makes, self._fills
        return Skeleton(self._shared, self._of_removed, steps, results, shared, self._snapshot)

    def _is_watched(self, value: Object) -> bool:
        # Only code that assigns to a variable can change it, and such code is known. So a call of a
        # plain closure, which most are, is not looked at again.
        is_assigned = type(value) is types.CellType and id(value) in self._reached.assigned
        if self._watched is None:
            return is_assigned or type(value) is not types.CellType
        # A rule that adds to a `nonlocal` variable has left a tracer there in an earlier call.
        return id(value) in self._watched or (is_assigned and id(value) in self._owned.all)

    def _place(self, value: Object) -> Place:
        """Return the place of the copy of a value, or of the value itself."""
        place = self._places.get(id(value))
        if place is not None:
            return place
        waiting = [value]
        while waiting:  # not by recursion: tuples may be nested deeply
            value = waiting[-1]
            found = self._reached.way.get(id(value))
            kind = found if isinstance(found, Kind) else None
            parts = () if kind is None else kind.parts(value)
            missing = [part for part in parts if id(part) not in self._places]
            if missing:
                waiting += reversed(missing)  # the first one first
                continue
            waiting.pop()
            if id(value) not in self._places:
                self._add(value, kind, [self._places[id(part)] for part in parts])
        return self._places[id(value)]

    def _add(self, value: Object, kind: Kind | None, parts: Sequence[Place]) -> None:
        place = self._places[id(value)] = len(self._shared)
        if id(value) in self._reached.captured:
            self._shared.append(None)
            self.removed.append(value)
            self._of_removed.append(place)
        elif kind is None:
            self._shared.append(value)
        else:
            self._shared.append(None)
            self._makes.append(_Make(place, kind.maker(value), parts))
            if kind.fill is not None:
                self._unfilled.append((value, kind, kind.fill))
