"""A rule as a function of the arrays that it holds.

`taken_apart` takes them out: through the variables of functions, their defaults and attributes,
methods, partials, decorated functions, and exact lists, (named) tuples and dicts. `Apart.rebuilt`
puts the rule together around others. What a function held when it was taken apart it holds then,
too: layers that are made in a loop keep their own weight. A variable to which the code itself
assigns is the user's own.

Behind anything else, such as an object, nothing can be put together; the caller decides.
"""

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from .._jax.types import Copied
from .._messages import errors
from .._messages.source import Source
from .walk import (
    EMPTY,
    JITTED,
    PLAIN,
    Id,
    Matches,
    Object,
    Variable,
    attributes_of,
    content,
    globals_of,
    is_end,
    is_known,
    live_cells,
    reaches_nothing,
    survey,
)

Make: TypeAlias = Callable[[Sequence[Any]], Any]  # a value, of other parts


class _Part:
    """How to put a value together. It holds no tracer: JAX keeps it."""

    place: int | None = None  # of what was taken
    leads = False  # to something that was taken
    moves = False  # or to a function with variables
    cells: Sequence[types.CellType | None] = ()  # of a function; None: a live one
    code: Any = None
    is_outer = False  # a list or dict that was there before the function ran
    inner: "Sequence[_Part]" = ()
    make: Make | None = None

    def __init__(self, value: Any) -> None:
        self.value = value


class Apart(NamedTuple):
    """A rule, taken apart."""

    taken: list[Any]  # the arrays that it holds
    root: _Part
    is_whole: bool  # False: something else leads to such an array
    held: Sequence[Any]  # of those taken, what variables of the rule itself hold
    functions: Sequence[_Part]  # with variables
    hidden: Sequence[Variable]  # of functions behind other objects
    every: Sequence[_Part]

    def refuse_rebound(self, source: Source) -> None:
        """Raise if a variable behind an object holds something else now."""
        for v in self.hidden:
            if content(v.cell) is not v.value:
                raise errors.rebound(source, v.function, v.name)

    def forget(self) -> "Apart":
        """Hold no array that was taken, and nothing that leads to one."""
        for part in self.every:
            if part.leads:
                part.value = None
        return self._replace(taken=[], held=(), every=())

    def rebuilt(self, new: Sequence[Any] | None) -> tuple[Any, Callable[[], bool]]:
        """Return the rule around other arrays; None: around its own.

        Also what tells whether it has left lists and dicts of outer functions as they were.
        """
        making = _Rebuilt(new, any(map(_is_changed, self.functions)))
        root = making.of(self.root)
        while making.unfilled:
            cell, part = making.unfilled.pop()
            cell.cell_contents = making.of(part)
        return root, making.is_unchanged


class _Rebuilt:
    """A rule while it is put together. Functions in each other would be a reference cycle."""

    def __init__(self, new: Sequence[Any] | None, changed: bool) -> None:
        self.new, self.changed = new, changed
        self.made: dict[Id, Any] = {}
        # The variables of functions: they may lead in a circle.
        self.unfilled: list[tuple[types.CellType, _Part]] = []
        self.outer: list[tuple[Any, Any]] = []

    def of(self, part: _Part) -> Any:
        if part.place is not None:
            return part.value if self.new is None else self.new[part.place]
        if not ((part.leads and self.new is not None) or (self.changed and part.moves)):
            return part.value
        if id(part) not in self.made:
            if part.code is not None:
                self.function(part)
            elif part.make in (list, _filled):
                empty: Any = [] if part.make is list else {}
                self.made[id(part)] = empty
                inner = self.now(part) if part.value is not None else map(self.of, part.inner)
                empty.extend(inner) if part.make is list else empty.update(_filled([*inner]))
                if part.is_outer:
                    self.outer.append((empty, empty.copy()))
            else:
                assert part.make is not None
                self.made[id(part)] = part.make(list(map(self.of, part.inner)))
        return self.made[id(part)]

    def now(self, part: _Part) -> list[Any]:
        """Return what a container holds now, with its functions as they were."""
        known = {id(p.value): p for p in part.inner}
        values = _values_of(part.value)
        return [self.of(known[id(v)]) if id(v) in known else v for v in values]

    def function(self, part: _Part) -> None:
        code, namespace, names = part.code
        cells = [cell or types.CellType() for cell in part.cells]
        every = zip(part.cells, cells, part.inner, strict=False)
        self.unfilled += [(cell, p) for kept, cell, p in every if kept is None]
        g = types.FunctionType(code, namespace, names[0], None, tuple(cells))
        self.made[id(part)] = g
        g.__qualname__, g.__module__, g.__doc__ = names[1:]
        g.__defaults__, g.__kwdefaults__, held = map(self.of, part.inner[len(cells) :])
        g.__dict__.update(held)

    def is_unchanged(self) -> bool:
        both = ((_values_of(a), _values_of(b)) for a, b in self.outer)
        return all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in both)


def _is_changed(part: _Part) -> bool:
    """Return whether a variable of a function holds something else now."""
    # What leads to an array has no value here: it is rebuilt in any case.
    cells = getattr(part.value, "__closure__", None) or ()
    every: Any = zip(cells, part.cells, part.inner, strict=False)
    return any(kept is None and content(c) is not p.value for c, kept, p in every)


def taken_apart(rule: Any, takes: Matches, f: Sequence[Object], *, looks: bool) -> Apart:
    """Take the arrays out of a rule that `takes` accepts.

    `f` has what the function that returned it holds: containers there were not made by it. `looks`
    is whether to look into other objects, and global variables, for such arrays; if not, there may
    be one.
    """
    walk = _Walk(takes, looks)
    try:
        root = walk.part_of(rule)
    except RecursionError:
        return Apart([], _Part(rule), False, (), (), (), ())
    taken, functions = walk.taken, walk.functions
    for part in functions:  # the cells of others are filled anew
        # What has no value yet gets one later, as in every function.
        cells = [c for c in part.cells if c is not None]
        part.cells = [c if id(c) in walk.live or content(c) is EMPTY else None for c in cells]
        part.moves = None in part.cells
    every = [*walk.parts.values()]
    changes = True
    while changes:
        changes = False
        for part in reversed(every):  # what a value holds comes after it
            for p in part.inner:
                if (p.leads and not part.leads) or (p.moves and not part.moves):
                    part.leads, part.moves = part.leads or p.leads, part.moves or p.moves
                    changes = True
    mutable = [p for p in every if p.leads and p.make in (list, _filled)]
    if mutable:
        before = _containers(f)
        for part in mutable:
            part.is_outer = id(part.value) in before
    own = _variables(root)
    held = [taken[p.place] for p in own if p.place is not None]
    # A variable that the code assigns to stays the user's own, with what it holds.
    live_ones = (p for f in functions for c, p in zip(f.cells, f.inner, strict=False) if c)
    is_whole = walk.is_whole and (looks or not any(p.leads for p in live_ones))
    moving = [p for p in functions if p.moves]
    return Apart(taken, root, is_whole, held, moving, walk.hidden, every)


class _Walk:
    """A rule while it is taken apart."""

    def __init__(self, takes: Matches, looks: bool) -> None:
        self.takes, self.looks, self.is_whole = takes, looks, True
        self.taken: list[Any] = []
        self.parts: dict[Id, _Part] = {}
        self.keep: list[Any] = []  # so that no id is used twice
        self.functions: list[_Part] = []
        self.hidden: list[Variable] = []
        self.open: set[Id] = set()  # values that cannot be made before their parts
        self.live: set[Id] = set()

    def part_of(self, v: Any) -> _Part:
        cls = type(v)
        if cls in PLAIN:
            return _Part(v)
        if id(v) in self.parts:
            self.is_whole = self.is_whole and id(v) not in self.open
            return self.parts[id(v)]
        self.keep.append(v)
        part = self.parts[id(v)] = _Part(v)
        if self.takes(v):
            part.place, part.leads = len(self.taken), True
            self.taken.append(v)
        elif is_known(v, cls) or is_end(v, cls):
            return part
        elif cls is types.FunctionType:
            if v.__closure__ or v.__defaults__ or v.__kwdefaults__ or v.__dict__:
                self.of_function(part, v)
            for _, one in globals_of(v):
                if self.is_whole and not reaches_nothing([one], may_change=True):
                    self.is_whole = self.looks and not survey(one, self.takes).leads
        elif (opened := _opened(v, cls)) is None:
            found = survey(v, self.takes if self.looks else None)
            self.is_whole = self.is_whole and self.looks and not found.leads
            self.hidden.extend(found.variables)
        else:
            inner, part.make = opened
            if cls not in (list, dict):
                self.open.add(id(v))
            part.inner = list(map(self.part_of, inner))
            self.open.discard(id(v))
        return part

    def of_function(self, part: _Part, v: types.FunctionType) -> None:
        cells = v.__closure__ or ()
        self.live.update(map(id, live_cells(v)))
        part.cells = cells
        names = v.__name__, v.__qualname__, v.__module__, v.__doc__
        part.code = v.__code__, v.__globals__, names
        self.functions.append(part)
        inner = [*map(content, cells), v.__defaults__, v.__kwdefaults__, v.__dict__]
        # What its variables hold is put in later.
        was, self.open = self.open, set()
        part.inner = list(map(self.part_of, inner))
        self.open = was


def _variables(root: _Part) -> Sequence[_Part]:
    """Return the parts for the variables and defaults of the function in a rule."""
    while root.code is None and root.inner:  # a method or a partial
        root = root.inner[0]
    defaults = (p for part in root.inner if part.make is tuple for p in part.inner)
    return [*root.inner, *defaults]


def _containers(roots: Sequence[Object]) -> set[Id]:
    """Return the lists and dicts that functions hold, directly and in one another."""
    found: set[Id] = set()
    pending: list[Any] = [*roots]
    for one in pending:  # it grows
        if type(one) in (list, dict, tuple):
            if id(one) not in found:
                found.add(id(one))
                pending += one.values() if type(one) is dict else one
        elif type(one) is types.FunctionType and id(one) not in found:
            found.add(id(one))
            pending += map(content, one.__closure__ or ())
            pending += [one.__defaults__, one.__kwdefaults__]
    return found


# --- the kinds of values that can be put together around other parts: a new one goes here ---------


def _values_of(container: Any) -> Sequence[Any]:
    """Return what a list or a dict holds, of a dict keys and values in turn."""
    if type(container) is not dict:
        return container
    return [v for pair in container.items() for v in pair]


def _opened(v: Any, cls: type) -> tuple[Sequence[Any], Make] | None:
    """Return the parts of a value, and what makes it of others; None if nothing can."""
    if cls is tuple or cls is list:
        return v, cls
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and not cls.__dictoffset__:
        # A rule that holds one, of settings say, would else be revived or recorded. Not as the
        # class of the user's would do it: one with a `_make` of its own that changes values gave
        # other gradients, silently.
        return tuple.__getitem__(v, slice(None)), functools.partial(tuple.__new__, cls)
    if cls is dict:
        return _values_of(v), _filled
    if cls is types.MethodType:
        return (v.__func__, v.__self__), lambda parts: types.MethodType(*parts)
    if cls is JITTED:  # rebuilt without the `jit`
        return (v.__wrapped__,), lambda parts: parts[0]
    if cls is functools.partial:
        return (v.func, v.args, v.keywords), lambda p: functools.partial(p[0], *p[1], **p[2])
    if isinstance(v, Copied):
        return _of_declared(v)
    return None


def _filled(pairs: Sequence[Any]) -> Any:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def _of_declared(h: Any) -> tuple[Sequence[Any], Make]:
    (f, variables, primal, *options), cls = h._declaration, type(h)
    declaration = type(h._declaration)

    def make(parts: Sequence[Any]) -> Any:
        made = cls(declaration(*parts[:3], *options))
        vars(made).update(parts[3])
        return made

    return [f, variables, primal, attributes_of(h)], make
