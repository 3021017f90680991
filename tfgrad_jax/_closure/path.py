"""Name values as the user would write them, `self.layers[0].w`, and find what code names."""

import contextlib
import functools
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from tfgrad_jax._jax.types import Copied

from .objects import Contents, Kind, Label, Object, attributes_of, content_of, kind_of, name_of
from .reach import Id
from .referents import is_leaf

_Names: TypeAlias = frozenset[str]


def path(visited: Mapping[Id, Sequence[Object]], value: Object, roots: Mapping[Id, str]) -> str:
    """Return how to write a value that a walk has found, from the nearest root; "" if not known.

    Roots have names; "" is that of what needs none, such as `f`, whose variables are its own.
    `visited` is that of a walk.
    """
    way = [value]
    while id(way[-1]) not in roots:
        _, *holders = visited.get(id(way[-1]), [None])
        if not holders or holders[0] not in visited:
            return ""
        holder = visited[holders[0]][0]  # the walk began with the nearest ones
        if len(way) > 1 and _is_table(way[-1], holder):
            way.pop()
        way.append(holder)
    name = roots[id(way[-1])]
    for holder, held in itertools.pairwise(reversed(way)):
        step = _step(holder, held)
        name = name + step if name else step.removeprefix(".")
    return name


def _is_table(value: Object, holder: Object) -> bool:
    """Return whether a value is the table of the attributes of an object.

    In Python 3.11, a walk visits it on the way to them.
    """
    try:  # not by `getattr`, which may run the code of the user's class
        return type(value) is dict and object.__getattribute__(holder, "__dict__") is value
    except AttributeError:
        return False


def _step(holder: Object, held: Object) -> str:
    """Return the step from an object to what it holds; "" if the user does not write it."""
    labels: Iterable[tuple[Label, Object]] = ()
    contents: Contents = {}
    if isinstance(holder, types.FunctionType):
        labels = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
    elif isinstance(holder, tuple):
        labels = zip(getattr(holder, "_fields", range(len(holder))), holder, strict=True)
    elif not isinstance(holder, Copied | types.CellType | types.MethodType):
        kind = kind_of(holder, type(holder))
        contents = kind.contents(holder) if isinstance(kind, Kind) else {}
        labels = contents.items()
    label = next((label for label, value in labels if value is held), None)
    return "" if label is None else step_of(holder, label, contents)


def step_of(holder: Object, label: Label, contents: Contents) -> str:
    """Return the step from an object to one of its contents; "" to the key of a table."""
    if isinstance(label, int) and isinstance(holder, dict):
        return f"[{contents[label - 1]!r}]" if label % 2 else ""
    return f".{name}" if (name := name_of(label)) else f"[{label}]"


_MOST = 1_000  # objects to look at, for a warning


def named_in(functions: Iterable[Object]) -> set[Id]:
    """Return the ids of what the code of functions names: variables, and attributes of these.

    What else an object or a container holds, such as the other weights of a model, is not read for
    certain.
    """
    seen: dict[Id, Object] = {}
    waiting: list[tuple[Object, _Names]] = [(f, frozenset()) for f in functions]
    for value, names in waiting:  # it grows
        if id(value) in seen or len(seen) > _MOST:
            continue
        seen[id(value)] = value
        if isinstance(value, types.MethodType):
            inner = _names_in(value.__func__.__code__)
            waiting += [(value.__func__, inner), (value.__self__, inner)]
        elif isinstance(value, types.FunctionType):
            inner = _names_in(value.__code__)
            waiting += [(content_of(cell), inner) for cell in value.__closure__ or ()]
        elif not is_leaf(value, type(value)):
            with contextlib.suppress(TypeError):  # of an object in C
                attributes = attributes_of(value).items()
                is_function = isinstance(value, functools.partial | Copied)
                waiting += [(v, names) for k, v in attributes if is_function or name_of(k) in names]
    return set(seen)


@functools.cache
def _names_in(code: types.CodeType) -> _Names:
    """Return the attributes that code reads, and that inside it."""
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
