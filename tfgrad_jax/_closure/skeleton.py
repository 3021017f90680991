"""Copy functions and objects, with other values in the places of the tracers that they hold.

`hoist_tracers` removes the tracers from values and returns a `Skeleton`. Given other values for
them, the skeleton makes copies. It copies only the objects that lead to a tracer; copies share all
others with the originals. Copies keep identities among themselves: a parent pointer leads to the
copy of the parent.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._jax.types import Inert

from .objects import Filler, Kind, Label, Maker, Object
from .reach import Id, Reached

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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Skeleton(Inert):
    """A plan for copying values. It holds none that were removed: it must keep no tracer alive."""

    shared: Sequence[Object]  # by place: what copies share with the originals, or None
    removed: Sequence[Place]
    makes: Sequence[_Make]
    fills: Sequence[_Fill]
    results: Sequence[Place]

    def copies(self, values: Sequence[Object]) -> Sequence[Object]:
        """Return copies, with these values in the places of those that were removed."""
        at = [*self.shared]
        for place, value in zip(self.removed, values, strict=True):
            at[place] = value
        for place, maker, parts in self.makes:
            at[place] = maker(*[at[i] for i in parts])
        for place, fill, labels in self.fills:
            if labels:
                fill(at[place], {label: at[i] for label, i in labels.items()})
        return [at[i] for i in self.results]


def hoist_tracers(
    values: Sequence[Object], reached: Reached
) -> tuple[Skeleton, list[Object]]:
    """Remove what a survey has looked for from values: return a skeleton, and what was removed.

    Where an object is not copied, the copies share it with the originals.
    """
    way = reached.way
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

    results = [place_of(value) for value in values]
    for place, value, kind, fill in unfilled:  # it grows
        contents = kind.contents(value)
        labels = {label: place_of(held) for label, held in contents.items()}
        fills.append(_Fill(place, fill, labels))
    return Skeleton(shared, of_removed, makes, fills, results), removed
