"""Refuse what code assigns to the copies that it runs on: it would be lost, without an error.

A dropout layer that counts its calls drew one mask for all of them. So `refuse_assigned` looks,
after each run, whether the copies still hold what was put into them. All else may be assigned to:
objects that lead to no tracer, which are no copies, those that the code itself has made, and what a
class computes when it is first read (`computed.py`).
"""

import collections
import types
from collections.abc import Iterable, Sequence

from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

from .computed import is_computed
from .objects import OBJECT, Kind, Label, Object, content_of, kind_of, name_of
from .snapshot import Watched


def watched_objects(values: Iterable[Object], containers: bool = False) -> list[Watched]:
    """Watch those of these values that are ordinary objects; containers, too, if asked to."""
    pairs = [(value, kind_of(value, type(value))) for value in values]
    return [
        Watched(value, kind, kind.contents(value))
        for value, kind in pairs
        if kind is OBJECT or (containers and isinstance(kind, Kind) and kind.fill is not None)
    ]


_CONTAINERS = (list, dict, set, collections.deque, bytearray)


def refuse_assigned(every: Sequence[Watched], source: Source, ran: Sequence[Object]) -> None:
    """Raise if the code of a function has assigned something to watched objects.

    It `ran` around these values, which lead to the functions that it may have called.
    """
    for one in every:
        if not one.is_changed():
            continue
        if one.cls is not None and one.cls is not type(one.value):
            raise errors.assigned(source, f"the class of a `{one.cls.__qualname__}`")
        now, before = one.kind.contents(one.value), one.contents
        for label in {**before, **now}:
            if label in before and label in now and before[label] is now[label]:
                continue
            name, what = name_of(label), _named(one, label, every)
            holders = [*ran, *(w.value for w in every)]
            if name and label not in before and is_computed(one.value, name, holders, source):
                if not isinstance(now[label], _CONTAINERS):
                    continue
                # The original makes one of its own later, without what is in this one.
                what += ", which it computed: read it before the call"
            raise errors.assigned(source, what)
        for label, other in zip(before, [label for label in now if label in before], strict=True):
            if label != other:  # the order counts
                raise errors.assigned(source, _named(one, label, every))


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
    if name := name_of(label):
        return f"the attribute `{name}` of a `{kind}`"
    for variable, cell in variables:
        if content_of(cell) is one.value:
            return f"a `{kind}`, the variable `{variable}`"
    for holder in every:
        for within, held in holder.contents.items():
            if held is one.value and name_of(within):
                return f"a `{kind}`, {_named(holder, within, every)}"
    return f"a `{kind}`"
