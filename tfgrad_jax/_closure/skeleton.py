"""Copy functions and objects, with other values in the places of the tracers that they hold.

`hoist_tracers` removes the tracers from values and returns a `Skeleton`. Given other values for
them, the skeleton makes copies. It copies only the objects that lead to a tracer; copies share all
others with the originals. Copies keep identities among themselves: a parent pointer leads to the
copy of the parent.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._jax.types import Inert
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import describe

from .objects import Filler, Kind, Label, Maker, Object, content_of
from .reach import Id, Reached, survey
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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Skeleton(Inert):
    """A plan for copying values. It holds none that were removed: it must keep no tracer alive."""

    shared: Sequence[Object]  # by place: what copies share with the originals, or None
    removed: Sequence[Place]
    makes: Sequence[_Make]
    fills: Sequence[_Fill]
    results: Sequence[Place]
    also_watched: Sequence[Watched]  # of the shared ones
    snapshot: Snapshot

    def copies(self, values: Sequence[Object]) -> Copies:
        """Return copies, with these values in the places of those that were removed."""
        at = [*self.shared]
        for place, value in zip(self.removed, values, strict=True):
            at[place] = value
        for place, maker, parts in self.makes:
            at[place] = maker(*[at[i] for i in parts])
        watched = [*self.also_watched]
        for place, fill, labels, kind in self.fills:
            contents = {label: at[i] for label, i in labels.items()}
            if contents:
                fill(at[place], contents)
            if kind is not None:
                watched.append(Watched(at[place], kind, contents, type(at[place])))
        results = frozen([at[i] for i in self.results], self.snapshot.changed())
        return Copies(results, watched)


def hoist_tracers(
    values: Sequence[Object],
    reached: Reached,
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
    way, snapshot = reached.way, Snapshot(reached, runs_now, owned)
    watches = None if watched is None else {id(w.value) for w in watched}
    removed: list[Object] = []
    of_removed: list[Place] = []
    shared: list[Object] = []
    makes: list[_Make] = []
    fills: list[_Fill] = []
    unfilled: list[tuple[Place, Object, Kind, Filler]] = []
    places: dict[Id, Place] = {}

    def place_of(value: Object) -> Place:
        """Return the place of the copy of a value, or of the value itself."""
        if id(value) in places:
            return places[id(value)]
        waiting = [value]
        while waiting:  # not by recursion: tuples may be nested deeply
            value = waiting[-1]
            key = id(value)
            kind = way.get(key)
            parts = kind.parts(value) if isinstance(kind, Kind) else ()
            if missing := [part for part in parts if id(part) not in places]:
                waiting += reversed(missing)  # the first one first
                continue
            waiting.pop()
            if key in places:
                continue
            places[key] = place = len(shared)
            shared.append(None)
            if isinstance(kind, Kind):
                makes.append(_Make(place, kind.maker(value), [places[id(part)] for part in parts]))
                if kind.fill is not None:
                    unfilled.append((place, value, kind, kind.fill))
            elif key in reached.captured:
                removed.append(value)
                of_removed.append(place)
            else:
                shared[place] = value
        return places[id(value)]

    def is_watched(value: Object) -> bool:
        # Only code that assigns to a variable can change it, and such code is known. So a call of a
        # plain closure, which most are, is not looked at again.
        is_assigned = type(value) is types.CellType and id(value) in reached.assigned
        if watches is None:
            return is_assigned or type(value) is not types.CellType
        # A rule that adds to a `nonlocal` variable has left a tracer there in an earlier call.
        of_user = owned.all if owned is not None and is_assigned else ()
        return id(value) in watches or id(value) in of_user

    results = [place_of(value) for value in values]
    for value in also:
        place_of(value)
    for place, value, kind, fill in unfilled:  # it grows
        contents = kind.contents(value)
        labels = {label: place_of(held) for label, held in contents.items()}
        fills.append(_Fill(place, fill, labels, kind if is_watched(value) else None))
    others = [w for w in watched or () if id(w.value) in reached.visited and id(w.value) not in way]
    return Skeleton(shared, of_removed, makes, fills, results, others, snapshot), removed


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
