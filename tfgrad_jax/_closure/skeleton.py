"""Copy functions and objects, with other values in the places of the tracers that they hold.

`dissect` removes the tracers from values and returns a `Skeleton`. Given other values for them, the
skeleton makes copies. It copies only objects that lead to a tracer; copies share all others with
the originals. Copies keep identities among themselves: a dict that has a copied object as a key has
the copy as its key, and a parent pointer leads to the copy of the parent.

First all copies are made: those of lists and of ordinary objects are empty, only what cannot be
changed later needs its parts. Then they are filled; tables last, which may hash their keys. Before
a frozen set is made, all that it may hash is filled.
"""

import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .objects import Fill, recipe
from .reach import CACHED, INERT, OpaqueError, TooMuchError, Walk
from .snapshot import Snapshot


class _Step(NamedTuple):
    """One step of copying: it makes an object, or puts contents into one."""

    call: Callable[..., Any]
    arguments: Sequence[int]  # places of the arguments
    place: int | None  # place of the new object; None if the step only fills one


class Skeleton:
    """A plan for copying values, with other values in the places of those that a walk has taken.

    Each object has a *place*: an index into one list. The places of shared objects hold the objects
    from the start; `copies` puts the new values at the places of the taken ones, and then runs the
    steps in order. Each step reads its arguments from their places and writes a new object to its
    own. A skeleton holds no taken value, because it must not keep a tracer alive.
    """

    def __init__(
        self,
        shared: Sequence[Any],  # objects by place, and None at all other places
        taken: Sequence[int],  # places
        steps: Sequence[_Step],
        results: Sequence[int],  # places of the copies of the values
        snapshot: Snapshot,  # of the variables of functions that lead to no tracer
    ) -> None:
        self._shared, self._taken, self._steps, self._results = shared, taken, steps, results
        self.snapshot = snapshot

    def copies(self, values: Sequence[Any], apart: bool = False) -> list[Any]:
        """Return copies of the values, with these in the places of those that were taken.

        If they are `apart`, what they assign to variables is lost: for a look at what they do.
        """
        at = [*self._shared]
        for i, value in zip(self._taken, values, strict=True):
            at[i] = value
        for call, arguments, place in self._steps:
            made = call(*[at[i] for i in arguments])
            if place is not None:
                at[place] = made
        live = self.snapshot.live if apart else {}
        return frozen([at[i] for i in self._results], {**self.snapshot.changed(), **live})


INERT.add(Skeleton)


def dissect(values: Sequence[Any], walk: Walk | None = None) -> tuple[Skeleton, list[Any]]:
    """Remove the tracers from values: return a skeleton, and the tracers.

    A `walk` from the values may say which to remove.

    Raises `OpaqueError` if an object that holds a tracer cannot be copied; but if the walk is
    lenient, that object is shared, and a jitted function is copied without the `jit`. Raises
    `TooMuchError` for hundreds of tuples, each in the next.
    """
    plan = _Plan(walk or Walk(values))
    try:
        return plan.skeleton(values), plan.taken
    except RecursionError:
        raise TooMuchError from None


def frozen(values: list[Any], contents: Mapping[int, Any]) -> list[Any]:
    """Return values whose functions read these contents, by the ids of the cells of variables."""
    if not contents:
        return values
    every = [*values, *contents.values()]  # what a variable held may read others
    walk = Walk(every, takes=lambda value: id(value) in contents, lenient=True)
    skeleton, cells = dissect(every, walk)
    new = {id(cell): types.CellType() for cell in cells}
    copies = skeleton.copies(list(new.values()))
    for key, content in zip(contents, copies[len(values) :], strict=True):
        if key in new:
            new[key].cell_contents = content
    return copies[: len(values)]


class _Plan:
    """The places and the steps of a skeleton, while they are found."""

    def __init__(self, walk: Walk) -> None:
        self.taken: list[Any] = []
        self._walk = walk
        self._shared: list[Any] = []  # by place
        self._of_taken: list[int] = []
        self._steps: list[_Step] = []
        self._tables: list[_Step] = []  # the last steps
        self._known: dict[int, tuple[Any, int | None]] = {}  # by id; None while its parts are made
        self._empty: deque[tuple[int, Fill]] = deque()  # places of copies, and what is in them

    def skeleton(self, values: Sequence[Any]) -> Skeleton:
        results = list(map(self._place, values))
        self._fill_copies()
        snapshot = Snapshot(self._walk.functions, self._walk.way)
        return Skeleton(
            self._shared, self._of_taken, [*self._steps, *self._tables], results, snapshot
        )

    def _place(self, value: Any) -> int:
        """Return the place of the copy of a value, or of the value itself."""
        known, cls = self._known.get(id(value)), type(value)
        if known is not None:
            if known[1] is None:
                raise OpaqueError(value)  # it is a part of itself
            return known[1]
        if id(value) in self._walk.taken:
            self.taken.append(value)
            self._of_taken.append(place := self._new(value))
            return place
        if id(value) not in self._walk.way:
            return self._new(value, value)
        try:
            return self._copy(value, cls)
        except OpaqueError:
            if not self._walk.lenient:
                raise
            if cls in CACHED:
                return self._place(value.__wrapped__)
            return self._new(value, value)

    def _copy(self, value: Any, cls: type) -> int:
        """Plan to copy an object; return its place."""
        if id(cls) in self._walk.way and not self._walk.lenient:
            raise OpaqueError(value)  # of a class that is made in a function
        make, parts, fills, hashes = recipe(value, cls)
        self._known[id(value)] = value, None
        arguments = list(map(self._place, parts))
        if hashes:  # so the parts must have their contents
            self._fill_copies()
        place = self._new(value)
        self._steps.append(_Step(make, arguments, place))
        for fill in fills:
            if cls is types.FunctionType:  # at once: a wrapper reads the signature of its function
                self._steps.append(self._filling(place, fill))
            else:
                self._empty.append((place, fill))
        return place

    def _fill_copies(self) -> None:
        """Plan to fill all copies that are empty."""
        while self._empty:  # not by recursion: values may be nested deeply
            place, fill = self._empty.popleft()
            (self._tables if fill.hashes else self._steps).append(self._filling(place, fill))

    def _filling(self, place: int, fill: Fill) -> _Step:
        return _Step(fill.put, [place, *map(self._place, fill.contents)], None)

    def _new(self, value: Any, shared: Any = None) -> int:
        """Return a new place for the copy of a value, or for what all copies share in its place."""
        self._shared.append(shared)
        self._known[id(value)] = value, len(self._shared) - 1
        return len(self._shared) - 1
