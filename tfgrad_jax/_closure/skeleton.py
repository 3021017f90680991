"""Copy functions and objects around other values for the tracers that they hold.

`dissect` takes the tracers out of values; the `Skeleton` that is left makes `Copies` of these
around other values, as `objects.py` says. Only what leads to a tracer is copied, and every function
with cells, because a rule must see its closure as it was at the call, as it does under `jit`. All
else stays itself. What is copied keeps its identities: a dict that has a copied object as a key has
the copy as its key, and a parent pointer leads to the copy of the parent.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from .objects import OpaqueError, Wrapper, recipe
from .reach import CACHED, INERT, ManyError, Walk, content_of, is_captured, is_leaf

_FUNCTION, _CELL = types.FunctionType, types.CellType

# Copies a value: from the values for the tracers, and from what is already copied.
Plan: TypeAlias = Callable[[Sequence[Any], dict[Any, Any]], Any]
# The user's variables, by the ids of the cells that are copies of theirs.
Cells: TypeAlias = Mapping[int, types.CellType]


def _same(value: Any) -> Plan:
    return lambda values, made: value


class _Object:
    """Copies one object, by the plans for the values of its recipe."""

    make: Callable[..., Any]
    parts: Sequence[Plan] = ()
    fill: Sequence[tuple[Callable[..., None], Sequence[Plan]]] = ()

    def __call__(self, values: Sequence[Any], made: dict[Any, Any]) -> Any:
        if self not in made:
            parts = [part(values, made) for part in self.parts]
            if self not in made:  # or else one of its parts holds it
                made[self] = new = self.make(*parts)
                for put, contents in self.fill:
                    put(new, *(content(values, made) for content in contents))
        return made[self]


class _Cell:
    """Copies the cell of a variable that functions close over."""

    def __init__(self, variable: types.CellType | None) -> None:
        # The user's: what a copy assigns is assigned to it, too. None if it leads to a tracer.
        self.variable = variable
        self.content: Plan = _same(None)

    def __call__(self, values: Sequence[Any], made: dict[Any, Any]) -> Any:
        if self not in made:
            new = _CELL()
            made[self] = new, None
            new.cell_contents = content = self.content(values, made)
            made[self] = new, content
        return made[self][0]

    def update(self, new: types.CellType, content: Any) -> None:
        """Assign to the variable what a copy of it got after it had this content."""
        variable = self.variable
        if variable is not None and content_of(new) is not content:
            variable.cell_contents = new.cell_contents
            # From now on, its present value counts: the next copy goes on from there.
            self.content = lambda values, made: content_of(variable)


class Copies:
    """Copies of the values of a skeleton."""

    def __init__(self, plans: Sequence[Plan], values: Sequence[Any]) -> None:
        made: dict[Any, Any] = {}
        self.values = [plan(values, made) for plan in plans]
        self._cells = [(plan, *made[plan]) for plan in made if isinstance(plan, _Cell)]

    def cells(self) -> Cells:
        """Return the user's variables, by the ids of the copies of their cells."""
        return {id(new): plan.variable for plan, new, _ in self._cells if plan.variable}

    def assign(self) -> None:
        """Assign to the user's variables (`nonlocal`) what the copies have assigned to theirs."""
        for plan, new, content in self._cells:
            plan.update(new, content)


class Skeleton:
    """Values, and what they hold, without the values that a predicate `takes`.

    With no predicate, only functions with cells are copied. `lenient`, an object that cannot be
    copied stays itself, and a jitted function is copied without the `jit`.
    """

    def __init__(
        self,
        values: Sequence[Any],
        takes: Callable[[Any], bool] | None = is_captured,
        cells: Cells | None = None,
        lenient: bool = False,
        patient: bool = True,
        most: int | None = None,
    ) -> None:
        self.taken: list[Any] = []
        self._takes, self._lenient, self._cells = takes, lenient, cells or {}
        self._known: dict[int, tuple[Any, Plan]] = {}  # by id, with the value of that id
        self._walk: Walk | None = None
        if takes is not None:
            self._walk = Walk(takes, patient)
            self._walk.leads(values)
            if most is not None and len(self._walk.taken) > most:
                raise ManyError(self._walk.taken)
        self._plans = [self._plan(value) for value in values]

    def finish(self) -> "Skeleton":
        """Forget what was taken out: tracers must not outlive their trace."""
        self.taken, self._known, self._walk, self._cells = [], {}, None, {}
        return self

    def copies(self, values: Sequence[Any]) -> Copies:
        """Return the values, copied around others for those that were taken out."""
        return Copies(self._plans, values)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        return self.copies(values).values

    def _plan(self, value: Any) -> Plan:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if self._takes is not None and self._takes(value):
            i = len(self.taken)
            self.taken.append(value)
            return self._note(value, lambda values, made: values[i])
        cls = type(value)
        if cls is _CELL:
            return self._cell(value)
        if not self._is_copied(value) or is_leaf(cls):
            return _same(value)
        try:
            return self._object(value, cls)
        except OpaqueError:
            if not self._lenient:
                raise
            wrapped: Any = getattr(value, "__wrapped__", None)
            return self._note(value, self._plan(wrapped) if cls in CACHED else _same(value))

    def _leads(self, value: Any) -> bool:
        return self._walk is not None and id(value) in self._walk.way

    def _is_copied(self, value: Any) -> bool:
        """Return whether a value leads to a tracer, or is a function with cells."""
        inner = value.__wrapped__ if isinstance(value, Wrapper) else value
        has_cells = type(inner) is _FUNCTION and inner.__closure__ is not None
        return has_cells or self._leads(value)

    def _note(self, value: Any, plan: Any) -> Any:
        self._known[id(value)] = value, plan
        return plan

    def _object(self, value: Any, cls: type) -> Plan:
        if self._leads(cls) and not self._lenient:  # a class that is made in a function
            raise OpaqueError(value)
        make, parts, fill = recipe(value, cls, self._walk)
        plan = self._note(value, _Object())
        plan.make = make
        plan.fill = [(put, list(map(self._plan, contents))) for put, contents in fill]
        plan.parts = list(map(self._plan, parts))
        return plan

    def _cell(self, cell: types.CellType) -> Plan:
        try:
            content = cell.cell_contents
        except ValueError:  # it is assigned later: it stays shared
            return self._note(cell, _same(cell))
        variable = None if self._leads(content) else self._cells.get(id(cell), cell)
        plan = self._note(cell, _Cell(variable))
        plan.content = self._plan(content)
        return plan


INERT.add(Skeleton)


def dissect(
    values: Sequence[Any],
    cells: Cells | None = None,
    patient: bool = True,
    takes: Callable[[Any], bool] = is_captured,
    most: int | None = None,
) -> tuple[Skeleton, list[Any]]:
    """Return the values without the tracers in them, and these.

    Raises `OpaqueError` where one cannot be taken out, `TooMuchError` where there is too much to
    look at (sooner, under staging, unless `patient`), `ManyError` where there are more than `most`.
    """
    try:
        skeleton = Skeleton(values, takes, cells, patient=patient, most=most)
    except RecursionError:
        raise OpaqueError(values[0]) from None
    captured = skeleton.taken
    return skeleton.finish(), captured


def snapshot(values: Sequence[Any], cells: Cells | None = None) -> Skeleton:
    """Return a skeleton that copies nothing but functions, as their closures are now."""
    return Skeleton(values, None, cells).finish()
