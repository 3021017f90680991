"""How objects are copied: one `Kind` for each way, and `kind_of`, which chooses.

Copying runs in two rounds. First every copy is made; most are empty then, so it does not matter in
which order, or whether objects refer to each other in a circle. Then the copies are filled. Only
what Python cannot change later, such as a tuple, needs its parts when it is made.

No code of a user's class runs: not its `__init__`, its properties, or its protocols for copying and
pickling. Those empty caches, reload files, and once made a likelihood 0.0 instead of -3.88.

To copy another kind of object, add a `Kind` for it: to `_KINDS` for objects of exactly one type, to
`_BASES` for those of its subclasses, too, before the classes that it derives from. What has no kind
is traced instead (`_call/transparent.py`): its gradients are right, too, but `f` sees no values.
The guide and the tables `TRACED` of the tests say what is traced.
"""

import collections
import functools
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.tree_util import Partial, all_leaves

from tfgrad_jax._jax.compat import is_of_jit
from tfgrad_jax._jax.types import Copied

# Whatever a function holds. What it is decides how it is copied, so no type says more.
Object: TypeAlias = Any


class Slot(NamedTuple):
    """A label: the name of an attribute that is not in the `__dict__` of an object."""

    name: str


class Key(NamedTuple):
    """A label: a key of a table."""

    key: Object


# What an object holds and may hold another one of later: by the name of an attribute, by a slot, by
# the position in a list, by the key of a table.
Label: TypeAlias = str | Slot | int | Key
Contents: TypeAlias = dict[Label, Object]
Maker: TypeAlias = Callable[..., Object]  # of the copies of the parts
Filler: TypeAlias = Callable[[Object, Contents], None]


class Kind(NamedTuple):
    """How objects of one kind are copied. A maker holds nothing that may lead to a tracer."""

    maker: Callable[[Object], Maker]  # of an object: what makes another one
    parts: Callable[[Object], Sequence[Object]]  # what is needed to make it
    contents: Callable[[Object], Contents]  # what is put into it afterwards
    fill: Filler | None  # puts it there; None: nothing can be


class Watched(NamedTuple):
    """An object, and what it held when it was looked at."""

    value: Object
    kind: Kind
    contents: Contents

    def is_changed(self) -> bool:
        """Return whether it holds something else now."""
        now = self.kind.contents(self.value)
        is_same = list(now) == list(self.contents)
        return not (is_same and all(map(operator.is_, now.values(), self.contents.values())))


def kind_of(value: Object, cls: type) -> Kind | str:
    """Return how to copy an object of this class, or why it is not copied."""
    found = _KINDS.get(cls)
    if found is not None:
        return found
    name, base = cls.__qualname__, next(base for base in _BASES if issubclass(cls, base))
    reason = "" if base is tuple else _why_not_copied(value, cls)
    if not reason and not _is_made_empty(base, cls):
        reason = "is written in C"
    return f"`{name}` {reason}" if reason else _BASES[base]


def _why_not_copied(value: Object, cls: type) -> str:
    """Return what is in the way of a copy of an ordinary object, or ""."""
    # A finalizer would run for the copy, too, and may close or delete what the original still uses.
    if hasattr(cls, "__del__"):
        return "defines `__del__`"
    if issubclass(cls, Copied):
        return ""
    # What refers to an object weakly leads past the copy: a linen module refers so to its parent,
    # and through it to the parameters. Not `jax.jit(layer)`: after it, a layer that was copied
    # before would be traced, and `check_gradient` would judge the same layer in another way.
    if not all(map(is_of_jit, weakref.getweakrefs(value))):
        return "is referred to weakly"
    method = _how_it_knows_its_objects(cls)
    return f"defines `{method}`" if method and all_leaves([value]) else ""


def _is_made_empty(base: Object, cls: type) -> bool:
    """Return whether `base` can make an empty object of a class: not if that is written in C."""
    try:
        base.__new__(cls)
    except TypeError:
        return False
    return True


def _how_it_knows_its_objects(cls: type) -> str:
    """Return the method by which a class decides which object is which: a singleton, say; or "".

    A copy of such an object gave 200 for 6: `config is Config()` was false for it. A hash of its
    own makes objects the keys of tables elsewhere. linen's scopes have one; they also keep books of
    the names in use, and a module that was called on a copy found its own names there. The hash of
    a dataclass, of `attrs` too, only says that it is a value. A registered pytree has a constructor
    of its own for other reasons; it is a value, and JAX copies it as well.
    """
    names = ["__new__", "__reduce__", "__reduce_ex__"]
    if not (hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__attrs_attrs__")):
        names.append("__hash__")
    is_own = lambda name: isinstance(getattr(cls, name, None), types.FunctionType)  # noqa: E731
    return next(filter(is_own, names), "")


def _nothing(_: Object) -> tuple[()]:
    return ()


# --- functions ------------------------------------------------------------------------------------


def _function_maker(f: types.FunctionType) -> Maker:
    code, scope, name, qualname = f.__code__, f.__globals__, f.__name__, f.__qualname__

    def make(*cells: types.CellType) -> types.FunctionType:
        new = types.FunctionType(code, scope, name, None, cells)
        if qualname is not code.co_qualname:
            new.__qualname__ = qualname
        return new

    return make


_DEFAULTS = ("__defaults__", "__kwdefaults__")


def _function_contents(f: types.FunctionType) -> Contents:
    found: Contents = {}
    for name in _DEFAULTS:
        if (defaults := getattr(f, name)) is not None:
            found[name] = defaults
    return {**found, **f.__dict__} if f.__dict__ else found


def _fill_function(new: types.FunctionType, contents: Contents) -> None:
    names: dict[Object, Object] = contents
    for name, value in names.items():
        if name in _DEFAULTS:
            setattr(new, name, value)
        else:
            new.__dict__[name] = value


_EMPTY = object()


def content_of(cell: types.CellType, empty: Object = None) -> Object:
    """Return what a variable holds, or `empty` if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty


def _cell_contents(cell: types.CellType) -> Contents:
    content = content_of(cell, _EMPTY)
    return {} if content is _EMPTY else {"cell_contents": content}


def _fill_cell(new: types.CellType, contents: Contents) -> None:
    for value in contents.values():
        new.cell_contents = value


def _partial_maker(value: functools.partial[Object]) -> Maker:
    # A partial cannot be made without a function: `len` stands there until it is filled.
    return functools.partial(functools.partial.__new__, type(value), len)


def _partial_contents(value: functools.partial[Object]) -> Contents:
    return {"func": value.func, "args": value.args, "keywords": value.keywords, **vars(value)}


def _fill_partial(new: Object, contents: Contents) -> None:
    attributes: dict[Object, Object] = dict(contents)
    state = [attributes.pop(name) for name in ("func", "args", "keywords")]
    new.__setstate__((*state, attributes or None))  # as `pickle` does


# --- objects --------------------------------------------------------------------------------------


def attributes_of(value: Object) -> Contents:
    """Return the attributes of an object, those in slots included, without running its code."""
    state: Object = object.__getstate__(value)  # type: ignore[attr-defined]
    if not isinstance(state, tuple):
        return dict(state or {})
    attributes, slots = state
    return {**(attributes or {}), **{Slot(name): v for name, v in slots.items()}}


def _fill_attributes(new: Object, contents: Contents) -> None:
    in_dict = {k: v for k, v in contents.items() if type(k) is str}
    if in_dict:  # not by `setattr`, which runs the properties of a user's class
        object.__getattribute__(new, "__dict__").update(in_dict)
    if len(in_dict) < len(contents):
        for label, value in contents.items():
            if type(label) is Slot:
                object.__setattr__(new, label.name, value)


def _object_maker(base: Object) -> Callable[[Object], Maker]:
    return lambda value: functools.partial(base.__new__, type(value))


def _tuple_maker(value: tuple[Object, ...]) -> Maker:
    cls = type(value)
    return lambda *items: tuple.__new__(cls, items)


def _list_contents(value: list[Object]) -> Contents:
    items: Contents = dict(enumerate(list.__iter__(value)))
    return items if type(value) is list else {**attributes_of(value), **items}


def _fill_list(new: list[Object], contents: Contents) -> None:
    list.extend(new, (v for k, v in contents.items() if type(k) is int))
    _fill_attributes(new, contents)


def _table(base: Object) -> Kind:
    def contents(value: Object) -> Contents:
        items: Contents = {Key(k): v for k, v in base.items(value)}
        if base is collections.defaultdict:
            items[Slot("default_factory")] = value.default_factory
        return items if type(value) is dict else {**attributes_of(value), **items}

    def fill(new: Object, contents: Contents) -> None:
        _fill_attributes(new, contents)
        for label, value in contents.items():
            if type(label) is Key:
                base.__setitem__(new, label.key, value)

    return Kind(_object_maker(base), _nothing, contents, fill)


_TUPLE = Kind(_tuple_maker, tuple, attributes_of, _fill_attributes)
_PARTIAL = Kind(_partial_maker, _nothing, _partial_contents, _fill_partial)

# A jitted or cached function, copied as what it wraps.
UNWRAPPED = Kind(lambda _: lambda f: f, lambda f: (f.__wrapped__,), attributes_of, None)

# By what makes an empty object; the more special ones first.
_BASES: dict[type, Kind] = {
    base: _table(base) for base in (collections.OrderedDict, collections.defaultdict, dict)
}
_BASES[tuple] = _TUPLE
_BASES[list] = Kind(_object_maker(list), _nothing, _list_contents, _fill_list)
_BASES[types.SimpleNamespace] = Kind(
    _object_maker(types.SimpleNamespace), _nothing, attributes_of, _fill_attributes
)
_BASES[object] = OBJECT = Kind(_object_maker(object), _nothing, attributes_of, _fill_attributes)

# Objects of exactly these types.
_KINDS: dict[type, Kind] = {
    types.FunctionType: Kind(
        _function_maker, lambda f: f.__closure__ or (), _function_contents, _fill_function
    ),
    types.CellType: Kind(lambda _: types.CellType, _nothing, _cell_contents, _fill_cell),
    types.MethodType: Kind(
        lambda _: types.MethodType, lambda m: (m.__func__, m.__self__), attributes_of, None
    ),
    functools.partial: _PARTIAL,
    Partial: _PARTIAL,
    tuple: Kind(lambda _: lambda *items: items, tuple, attributes_of, None),
    dict: _BASES[dict],
    list: _BASES[list],
}
