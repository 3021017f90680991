"""Refuse what code assigns to the copies that it runs on: it would be lost, without an error.

A dropout layer that counts its calls drew one mask for all of them. So `refuse_assigned` looks,
after each run, whether the copies still hold what was put into them. All else may be assigned to:
objects that lead to no tracer, which are no copies, and those that the code itself has made.
"""

import functools
import types
from collections.abc import Iterable, Sequence

import jax

from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

from .objects import OBJECT, Kind, Label, Object, Slot, Watched, content_of, kind_of
from .reach import reach


def watched_objects(values: Iterable[Object], containers: bool = False) -> list[Watched]:
    """Watch those of these values that are ordinary objects; containers, too, if asked to."""
    pairs = [(value, kind_of(value, type(value))) for value in values]
    return [
        Watched(value, kind, kind.contents(value))
        for value, kind in pairs
        if kind is OBJECT or (containers and isinstance(kind, Kind) and kind.fill is not None)
    ]


def refuse_assigned(every: Sequence[Watched], source: Source) -> None:
    """Raise if the code of a function has assigned something to watched objects."""
    for one in every:
        if not one.is_changed():
            continue
        now, before = one.kind.contents(one.value), one.contents
        for label in {**before, **now}:
            if label in before and label in now and before[label] is now[label]:
                continue
            if label in before or not _is_computed(type(one.value), label, now[label]):
                raise errors.assigned(source, _named(one, label, every))


def _is_computed(cls: type, label: Label, value: Object) -> bool:
    """Return whether a class computes a new attribute when it is first read.

    `functools.cached_property` does, and a property `table` which keeps what it made in `_table`.
    The original will compute it again. An array in `_table` may be state, such as a running mean.
    """
    name = label.name if isinstance(label, Slot) else label
    if not isinstance(name, str):
        return False
    members = {k: v for base in reversed(cls.__mro__) for k, v in vars(base).items()}
    shown, behind = members.get(name), members.get(name.removeprefix("_"))
    if hasattr(shown, "__get__") and not hasattr(shown, "__set__") and not callable(shown):
        return True
    is_array = lambda value: isinstance(value, jax.Array)  # noqa: E731
    return isinstance(behind, property | functools.cached_property) and not (
        reach([value], is_array, lenient=True).captured
    )


def _named(one: Watched, label: Label, every: Sequence[Watched]) -> str:
    """Name what was assigned as the user knows it: the nearest attribute or variable."""
    variables = [  # other functions may have others of the same name
        (name, cell)
        for f in every
        if isinstance(f.value, types.FunctionType)
        for name, cell in zip(f.value.__code__.co_freevars, f.value.__closure__ or (), strict=True)
    ]
    if isinstance(one.value, types.CellType):
        name = next((name for name, cell in variables if cell is one.value), "")
        return f"the variable `{name}`"
    kind = type(one.value).__qualname__
    name = label.name if isinstance(label, Slot) else label
    if isinstance(name, str):
        return f"the attribute `{name}` of a `{kind}`"
    for variable, cell in variables:
        if content_of(cell) is one.value:
            return f"a `{kind}`, the variable `{variable}`"
    for holder in every:
        for within, held in holder.contents.items():
            if held is one.value and isinstance(within, str | Slot):
                return f"a `{kind}`, {_named(holder, within, every)}"
    return f"a `{kind}`"
