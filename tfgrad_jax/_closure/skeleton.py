"""Copy functions and objects around other values for the tracers that they hold.

`dissect` takes the tracers out of values; the `Skeleton` that is left makes `Copies` of these
around other values, as `objects.py` says. Only what leads to a tracer is copied, and every function
with cells, because a rule must see its closure as it was at the call, as it does under `jit`. All
else stays itself. What is copied keeps its identities: a dict that has a copied object as a key has
the copy as its key, and a parent pointer leads to the copy of the parent.
"""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer

from .objects import recipe
from .reach import (
    CACHED,
    INERT,
    OpaqueError,
    TooMuchError,
    Walk,
    Wrapper,
    content_of,
    is_leaf,
)

_FUNCTION, _CELL = types.FunctionType, types.CellType

# The user's variables, by the ids of the cells that are copies of theirs.
Cells: TypeAlias = Mapping[int, types.CellType]


class _Step(NamedTuple):
    """Makes an object, or puts contents into one."""

    call: Callable[..., Any]
    arguments: Sequence[int]  # their places
    place: int | None  # of the new object


class _Cell:
    """The cell of a variable that functions close over."""

    def __init__(self, variable: types.CellType | None, place: int) -> None:
        # The user's: what a copy assigns is assigned to it, too. None if it leads to a tracer.
        self.variable, self.place = variable, place
        # The same, once a copy has assigned to it: the next copy goes on from its present value.
        self._assigned: types.CellType | None = None

    def fill(self, new: types.CellType, content: Any) -> None:
        new.cell_contents = content if self._assigned is None else content_of(self._assigned)

    def update(self, new: types.CellType, content: Any) -> None:
        """Assign to the variable what a copy of it got after it had this content."""
        variable = self.variable
        if variable is not None and content_of(new) is not content:
            variable.cell_contents = new.cell_contents
            self._assigned = variable


class Copies:
    """Copies of the values of a skeleton."""

    def __init__(
        self, values: Sequence[Any], cells: Sequence[tuple[_Cell, types.CellType]], unused: set[int]
    ) -> None:
        self.values = values
        self.unused = unused  # the ids of tracers in them for which there was no value
        self._cells = [(cell, new, new.cell_contents) for cell, new in cells]

    def cells(self) -> Cells:
        """Return the user's variables, by the ids of the copies of their cells."""
        return {id(new): cell.variable for cell, new, _ in self._cells if cell.variable}

    def assign(self) -> None:
        """Assign to the user's variables (`nonlocal`) what the copies have assigned to theirs."""
        for cell, new, content in self._cells:
            cell.update(new, content)


class Skeleton:
    """Values, and what they hold, without the values that a walk has taken.

    It is a list of steps, one after the other, however deep the values lie: each works on what
    stands at some places, and may give another its object. With no walk, only functions with cells
    are copied. Where the walk is lenient, an object that cannot be copied stays itself, and a
    jitted function is copied without the `jit`.
    """

    def __init__(
        self, values: Sequence[Any], walk: Walk | None, cells: Cells | None = None
    ) -> None:
        self.taken: list[Any] = []
        self._walk, self._variables = walk, cells or {}
        self._lenient = walk is not None and walk.lenient
        self._places: list[Any] = []  # what stays itself, and None for the rest
        self._of_taken: list[int] = []
        self._unused: list[int] = []  # places of the tracers that the walk has left
        self._steps: list[_Step] = []
        self._cells: list[_Cell] = []
        self._known: dict[int, tuple[Any, int]] = {}  # by id: a value, and the place of its copy
        self._begun: dict[int, int] = {}  # by id: how many steps there were
        self._plan(values)
        self._results = self._at(values)

    def finish(self) -> "Skeleton":
        """Forget what was taken out: tracers must not outlive their trace."""
        self.taken, self._known, self._walk, self._variables = [], {}, None, {}
        return self

    def copies(self, values: Sequence[Any]) -> Copies:
        """Return the values, copied around others for those that were taken out."""
        at = self._places.copy()
        for i, value in zip(self._of_taken, values, strict=True):
            at[i] = value
        for call, arguments, place in self._steps:
            made = call(*[at[i] for i in arguments])
            if place is not None:
                at[place] = made
        results, unused = ([at[i] for i in places] for places in (self._results, self._unused))
        return Copies(results, [(c, at[c.place]) for c in self._cells], set(map(id, unused)))

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        return list(self.copies(values).values)

    def _plan(self, values: Sequence[Any]) -> None:
        """Write down the steps that copy values: what an object is made from comes before it."""
        waiting: list[Iterator[Any]] = [iter(values)]
        while waiting:
            for value in waiting[-1]:
                if id(value) not in self._known and not self._place_atom(value):
                    waiting.append(self._steps_of(value))
                    break
            else:
                waiting.pop()

    def _place_atom(self, value: Any) -> bool:
        """Give a value its place if it was taken or left, or stays itself; return whether."""
        cls, walk = type(value), self._walk
        if walk is not None and id(value) in walk.taken:
            self.taken.append(value)
            self._of_taken.append(self._place(value))
        elif issubclass(cls, Tracer) and self._leads(value):  # it must not outlive its trace
            self._unused.append(self._place(value))
            recall = functools.partial(_recalled, weakref.ref(value), value.aval)
            self._steps.append(_Step(recall, (), self._unused[-1]))
        elif cls is not _CELL and (is_leaf(cls) or not self._is_copied(value)):
            self._place(value, value)
        else:
            return False
        return True

    def _steps_of(self, value: Any) -> Iterator[Any]:
        """Write down the steps that copy a value, and yield what must be copied before the next."""
        cls = type(value)
        if cls is _CELL:
            yield from self._cell(value)
        else:
            try:
                steps = self._object(value, cls)
            except OpaqueError:
                if not self._leads(value, to_unused=False):  # what it holds outlives its trace then
                    self._place(value, value)
                    return
                if not self._lenient:
                    raise
                wrapped: Any = getattr(value, "__wrapped__", None)
                if cls not in CACHED:
                    self._place(value, value)
                else:
                    yield wrapped
                    self._known[id(value)] = value, self._known[id(wrapped)][1]
            else:
                yield from steps

    def _leads(self, value: Any, to_unused: bool = True) -> bool:
        """Return whether a value leads to a tracer that is taken, or left."""
        walk, key = self._walk, id(value)
        return walk is not None and (key in walk.way or (to_unused and key in walk.way_to_unused))

    def _is_copied(self, value: Any) -> bool:
        """Return whether a value leads to a tracer, or is a function with cells."""
        inner = value.__wrapped__ if issubclass(type(value), Wrapper) else value
        has_cells = type(inner) is _FUNCTION and inner.__closure__ is not None
        return has_cells or self._leads(value)

    def _place(self, value: Any, itself: Any = None) -> int:
        """Return a new place for the copy of a value, or for the value itself."""
        self._places.append(itself)
        self._known[id(value)] = value, len(self._places) - 1
        return len(self._places) - 1

    def _at(self, values: Iterable[Any]) -> list[int]:
        """Return the places of values."""
        return [self._known[id(value)][1] for value in values]

    def _object(self, value: Any, cls: type) -> Iterator[Any]:
        is_local = self._leads(cls, to_unused=False)  # a class that is made in a function
        if is_local and not self._lenient:
            raise OpaqueError(value)
        if self._begun.get(id(value)) == len(self._steps):  # it is made from itself
            raise OpaqueError(value)
        self._begun[id(value)] = len(self._steps)
        return self._made(value, *recipe(value, cls, self._walk))

    def _made(
        self, value: Any, make: Any, parts: Sequence[Any], fill: Sequence[tuple[Any, Any]]
    ) -> Iterator[Any]:
        yield from parts
        if id(value) in self._known:  # one of its parts holds it
            return
        arguments = self._at(parts)
        place = self._place(value)
        self._steps.append(_Step(make, arguments, place))
        for put, contents in fill:
            yield from contents
            self._steps.append(_Step(put, [place, *self._at(contents)], None))

    def _cell(self, cell: types.CellType) -> Iterator[Any]:
        try:
            content = cell.cell_contents
        except ValueError:  # it is assigned later: it stays shared
            self._place(cell, cell)
            return
        variable = None if self._leads(content) else self._variables.get(id(cell), cell)
        place = self._place(cell)
        self._cells.append(copied := _Cell(variable, place))
        self._steps.append(_Step(_CELL, (), place))
        yield content
        self._steps.append(_Step(copied.fill, [place, *self._at([content])], None))


INERT.add(Skeleton)


def _recalled(known: weakref.ref[Any], aval: Any) -> Any:
    """Return a tracer, or its type once the tracer is gone."""
    tracer = known()
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype) if tracer is None else tracer


def dissect(
    values: Sequence[Any], walk: Walk | None = None, cells: Cells | None = None
) -> tuple[Skeleton, list[Any]]:
    """Return the values without the tracers in them, or what a walk from them took, and these.

    Raises `OpaqueError` where one cannot be taken out.
    """
    skeleton = Skeleton(values, walk or Walk(values), cells)
    captured = skeleton.taken
    return skeleton.finish(), captured


def snapshot(
    values: Sequence[Any], cells: Cells | None = None, unused: Container[int] = ()
) -> Skeleton:
    """Return a skeleton that copies nothing but functions, as their closures are now.

    It holds no tracer that a walk has `left`, unless in what is not copied.
    """
    walk = None
    if unused:
        with contextlib.suppress(TooMuchError):
            walk = Walk(values, lambda _: False, unused=unused)
    return Skeleton(values, walk, cells).finish()
