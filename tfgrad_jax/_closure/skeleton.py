"""Copy functions and objects, with other values in the places of the tracers that they hold.

`dissect` removes the tracers from values and returns a `Skeleton`. Given other values for them, the
skeleton makes `Copies`; `objects.py` says how each object is copied. It copies only objects that
lead to a tracer, and functions whose variables other code may still assign to, because a rule must
see its closure as it was at the call, as it does under `jit`. Copies share all other objects with
the originals. Copies keep identities among themselves: a dict that has a copied object as a key has
the copy as its key, and a parent pointer leads to the copy of the parent.
"""

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer

from tfgrad_jax._types import Wrapper

from .objects import Recipe, recipe
from .reach import (
    CACHED,
    INERT,
    OpaqueError,
    TooMuchError,
    Walk,
    content_of,
    is_importable,
)

_FUNCTION, _CELL = types.FunctionType, types.CellType

# The cells of the user's variables, by the ids of their copies.
Cells: TypeAlias = Mapping[int, types.CellType]


class _Step(NamedTuple):
    """One step of copying: it makes an object, or puts contents into one."""

    call: Callable[..., Any]
    arguments: Sequence[int]  # places of the arguments
    place: int | None  # place of the new object; None if the step only fills one


class _Later(NamedTuple):
    """What to do with an object once its parts have places."""

    run: Callable[[], None]


class _Cell:
    """The cell of a variable that functions close over."""

    def __init__(self, variable: types.CellType | None, place: int) -> None:
        # The user's cell, which gets what a copy assigns. None if the cell leads to a tracer.
        self.variable, self.place = variable, place
        # The same, after a copy has assigned to it: the next copy starts from the current value.
        self._assigned: types.CellType | None = None

    def made(self, content: Any) -> types.CellType:
        return _CELL(content if self._assigned is None else content_of(self._assigned))

    def fill(self, new: types.CellType, content: Any) -> None:
        new.cell_contents = content if self._assigned is None else content_of(self._assigned)

    def update(self, new: types.CellType, content: Any) -> None:
        """Assign to the user's variable what a copy has assigned, if that is not `content`."""
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
        self.unused = unused  # ids of tracers that stay in the copies, as `f` does not use them
        self._cells = [(cell, new, new.cell_contents) for cell, new in cells]

    def cells(self) -> Cells:
        """Return the user's variables, by the ids of the copies of their cells."""
        return {id(new): cell.variable for cell, new, _ in self._cells if cell.variable}

    def assign(self) -> None:
        """Assign to the user's `nonlocal` variables what the copies have assigned to theirs."""
        for cell, new, content in self._cells:
            cell.update(new, content)


class Skeleton:
    """A plan for copying values, with other values in the places of those that a walk has taken.

    Each object has a *place*: an index into one list. The places of shared objects hold the objects
    from the start; `copies` puts the new values at the places of the taken ones, and then runs the
    steps in order. Each step reads its arguments from their places and writes a new object to its
    own. A flat list of steps needs no recursion, however deep the values are nested.

    Without a walk, only functions whose variables may change are copied. If the walk is lenient, an
    object that cannot be copied is shared, and a jitted function is copied without the `jit`.
    """

    def __init__(
        self, values: Sequence[Any], walk: Walk | None, cells: Cells | None = None
    ) -> None:
        self.taken: list[Any] = []
        self._walk, self._variables = walk, cells or {}
        self._lenient = walk is not None and walk.lenient
        self._places: list[Any] = []  # shared objects, and None at all other places
        self._of_taken: list[int] = []
        # The tracers that `f` does not use: their places, weak references and types.
        self._unused: list[tuple[int, weakref.ref[Any], Any]] = []
        self._steps: list[_Step] = []
        self._cells: list[_Cell] = []
        self._known: dict[int, tuple[Any, int]] = {}  # by id: a value, and the place of its copy
        self._begun: dict[int, int] = {}  # by id: how many steps there were
        self._plan(values)
        self._results = self._at(values)

    def finish(self) -> "Skeleton":
        """Drop the references to what was taken: a skeleton must not keep tracers alive."""
        self.taken, self._known, self._walk, self._variables = [], {}, None, {}
        return self

    def copies(self, values: Sequence[Any]) -> Copies:
        """Return copies of the values, with these in the places of those that were taken."""
        at = self._places.copy()
        for i, value in zip(self._of_taken, values, strict=True):
            at[i] = value
        for i, known, aval in self._unused:
            tracer = known()
            at[i] = jax.ShapeDtypeStruct(aval.shape, aval.dtype) if tracer is None else tracer
        for call, arguments, place in self._steps:
            made = call(*[at[i] for i in arguments])
            if place is not None:
                at[place] = made
        cells = [(cell, at[cell.place]) for cell in self._cells]
        unused = {id(at[i]) for i, *_ in self._unused}
        return Copies([at[i] for i in self._results], cells, unused)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        return list(self.copies(values).values)

    def _plan(self, values: Sequence[Any]) -> None:
        """Record the steps that copy values: the parts of an object come before the object."""
        waiting = self._waiting = [*reversed(values)]  # a stack
        while waiting:
            value = waiting.pop()
            cls = type(value)
            if cls is _Later:
                value.run()
            elif id(value) not in self._known and not self._place_atom(value, cls):
                if cls is _CELL:
                    self._copy_cell(value)
                else:
                    self._copy(value, cls)

    def _place_atom(self, value: Any, cls: type) -> bool:
        """Give a value a place if it is taken, unused or shared; return whether it is."""
        if self._walk is not None and id(value) in self._walk.taken:
            self.taken.append(value)
            self._of_taken.append(self._place(value))
        elif self._leads(value):
            if not issubclass(cls, Tracer):
                return False
            # It is not used, and must not be kept alive.
            self._unused.append((self._place(value), weakref.ref(value), value.aval))
        elif cls is _CELL or (issubclass(cls, (_FUNCTION, Wrapper)) and self._is_copied(value)):
            return False
        else:
            self._place(value, value)
        return True

    def _copy(self, value: Any, cls: type) -> None:
        """Plan to copy an object, after its parts."""
        try:
            made = self._recipe(value, cls)
        except OpaqueError:
            if not self._leads(value, to_unused=False):  # it may keep an unused tracer
                self._place(value, value)
            elif not self._lenient:
                raise
            elif cls in CACHED:
                wrapped = value.__wrapped__
                self._waiting += _Later(lambda: self._stand_in(value, wrapped)), wrapped
            else:
                self._place(value, value)
        else:
            self._waiting.append(_Later(lambda: self._make(value, made)))
            self._waiting += reversed(made.parts)

    def _stand_in(self, value: Any, other: Any) -> None:
        """Take the copy of another object for that of a value."""
        self._known[id(value)] = value, self._known[id(other)][1]

    def _make(self, value: Any, made: Recipe) -> None:
        """Record the step that makes an object; plan to fill it, after its contents."""
        if id(value) in self._known:  # one of its parts holds it and has made the copy
            return
        arguments = self._at(made.parts)
        place = self._place(value)
        self._steps.append(_Step(made.make, arguments, place))
        for put, contents in reversed(made.fill):
            self._fill(put, place, contents)

    def _fill(self, put: Callable[..., None], place: int, contents: Sequence[Any]) -> None:
        """Plan to put contents into the object at a place, once they have places."""

        def record() -> None:
            self._steps.append(_Step(put, [place, *self._at(contents)], None))

        self._waiting.append(_Later(record))
        self._waiting += reversed(contents)

    def _is_copied(self, value: Any) -> bool:
        """Return whether to copy a function that leads to no tracer.

        What it closes over may be assigned to: by a scope that still runs, or by a copy of one. A
        scope that has ended, such as that of a function that made this one, assigns no more: then
        nothing else refers to the cell. A function of a module, such as one under a decorator,
        stays itself.
        """
        f = value.__wrapped__ if isinstance(value, Wrapper) else value
        if type(f) is not _FUNCTION or not f.__closure__:
            return False
        may_change = max(_references(f)) > _ALONE or any(
            id(cell) in self._variables for cell in f.__closure__
        )
        return may_change and not is_importable(value)

    def _leads(self, value: Any, to_unused: bool = True) -> bool:
        """Return whether a value leads to a taken tracer, or (`to_unused`) to an unused one."""
        walk, key = self._walk, id(value)
        return walk is not None and (key in walk.way or (to_unused and key in walk.way_to_unused))

    def _place(self, value: Any, itself: Any = None) -> int:
        """Return a new place for the copy of a value, or for the value itself."""
        self._places.append(itself)
        self._known[id(value)] = value, len(self._places) - 1
        return len(self._places) - 1

    def _at(self, values: Iterable[Any]) -> list[int]:
        """Return the places of values."""
        return [self._known[id(value)][1] for value in values]

    def _recipe(self, value: Any, cls: type) -> Recipe:
        is_local = self._leads(cls, to_unused=False)  # a class made in a function
        if is_local and not self._lenient:
            raise OpaqueError(value)
        if self._begun.get(id(value)) == len(self._steps):  # no step since: it is a part of itself
            raise OpaqueError(value)
        self._begun[id(value)] = len(self._steps)
        return recipe(value, cls, self._walk)

    def _copy_cell(self, cell: types.CellType) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet: the copies share the cell
            self._place(cell, cell)
            return
        variable = None if self._leads(content) else self._variables.get(id(cell), cell)
        is_placed = id(content) in self._known or self._place_atom(content, type(content))
        place = self._place(cell)
        self._cells.append(copied := _Cell(variable, place))
        if is_placed:
            self._steps.append(_Step(copied.made, self._at([content]), place))
        else:  # the content may lead back to the cell
            self._steps.append(_Step(_CELL, (), place))
            self._fill(copied.fill, place, [content])


def _references(f: types.FunctionType) -> list[int]:
    """Return how many references there are to each cell of a function."""
    return list(map(sys.getrefcount, f.__closure__ or ()))


# So many to a cell that one function alone refers to.
_ALONE = max(_references((lambda x: lambda: x)(0)))


INERT.add(Skeleton)


def dissect(
    values: Sequence[Any], walk: Walk | None = None, cells: Cells | None = None
) -> tuple[Skeleton, list[Any]]:
    """Remove the tracers from values: return a skeleton, and the tracers.

    A `walk` from the values may say which to remove. Raises `OpaqueError` if an object that holds
    one cannot be copied.
    """
    skeleton = Skeleton(values, walk or Walk(values), cells)
    captured = skeleton.taken
    return skeleton.finish(), captured


def snapshot(
    values: Sequence[Any], cells: Cells | None = None, unused: Container[int] = ()
) -> Skeleton:
    """Return a skeleton that copies only functions, to keep their closures as they are now.

    It keeps no `unused` tracer alive, except in objects that cannot be copied.
    """
    walk = None
    if unused:
        with contextlib.suppress(TooMuchError):
            walk = Walk(values, lambda _: False, unused=unused)
    return Skeleton(values, walk, cells).finish()
