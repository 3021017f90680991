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
import contextlib
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.tree_util import Partial, all_leaves

from tfgrad_jax._jax.compat import is_of_jit
from tfgrad_jax._jax.types import Copied

# Whatever a function holds. What it is decides how it is copied, so no type says more.
Object: TypeAlias = Any


Slot: TypeAlias = types.MemberDescriptorType  # two classes may have slots of the same name

# What an object holds and may hold another one of later: by the name of an attribute, by a slot, by
# the position in a list; in a table, keys are at even positions and values at odd ones.
Label: TypeAlias = str | Slot | int
Contents: TypeAlias = dict[Label, Object]


def name_of(label: Label) -> str:
    """Return the name of an attribute; "" for what has a position."""
    name = label.__name__ if isinstance(label, Slot) else label
    return name if isinstance(name, str) else ""


Maker: TypeAlias = Callable[..., Object]  # of the copies of the parts
Filler: TypeAlias = Callable[[Object, Contents], None]


class Kind(NamedTuple):
    """How objects of one kind are copied. A maker holds nothing that may lead to a tracer."""

    maker: Callable[[Object], Maker]  # of an object: what makes another one
    parts: Callable[[Object], Sequence[Object]]  # what is needed to make it
    contents: Callable[[Object], Contents]  # what is put into it afterwards
    fill: Filler | None  # puts it there; None: nothing can be


def kind_of(value: Object, cls: type) -> Kind | str:
    """Return how to copy an object of this class, or why it is not copied."""
    found = _KINDS.get(cls)
    if found is not None:
        return found
    name, base = cls.__qualname__, next(base for base in _BASES if issubclass(cls, base))
    reason = _why_not_copied(value, cls, base)
    if not reason and not _is_made_empty(base, cls):
        reason = "is written in C"
    return f"`{name}` {reason}" if reason else _BASES[base]


def _why_not_copied(value: Object, cls: type, base: type) -> str:
    """Return what is in the way of a copy of an ordinary object, or ""."""
    # A finalizer would run for the copy, too, and may close or delete what the original still uses.
    if hasattr(cls, "__del__"):
        return "defines `__del__`"
    if issubclass(cls, Copied | tuple):
        return ""
    # What refers to an object weakly leads past the copy: a linen module refers so to its parent,
    # and through it to the parameters. Not `jax.jit(layer)`: after it, a layer that was copied
    # before would be traced, and `check_gradient` would judge the same layer in another way.
    if not all(map(is_of_jit, weakref.getweakrefs(value))):
        return "is referred to weakly"
    method = _how_it_knows_its_objects(cls)
    if method and all_leaves([value]):
        return f"defines `{method}`"
    if not all(isinstance(name, str) for name in _dict_of(value) or ()):
        return "has an attribute whose name is no string"
    return "hides what is in its slots" if base is object and _hides_slots(value) else ""


def _is_made_empty(base: Object, cls: type) -> bool:
    """Return whether `base` can make an empty object of a class: not if that is written in C."""
    try:
        base.__new__(cls)
    except TypeError:
        return False
    return True


def _hides_slots(value: Object) -> bool:
    """Return whether an object holds what no attribute shows: its class has lost a descriptor."""
    if not any("__slots__" in vars(base) for base in type(value).__mro__):
        return False
    shown = [*attributes_of(value).values(), _dict_of(value), type(value)]
    return not set(map(id, gc.get_referents(value))) <= set(map(id, shown))


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


def can_be_key(key: Object, way: Container[int]) -> bool:
    """Return whether the copy of a key may be one before it has been filled: by its identity.

    `way` has the ids of what is copied. A class may hash what its objects hold.
    """
    if id(key) not in way:
        return True
    if type(key).__hash__ is tuple.__hash__:
        return all(can_be_key(item, way) for item in tuple.__iter__(key))
    if type(key) is types.MethodType:
        return can_be_key(key.__func__, way)
    return type(key).__hash__ is object.__hash__


def _nothing(_: Object) -> tuple[()]:
    return ()


# --- functions ------------------------------------------------------------------------------------


def _function_maker(f: types.FunctionType) -> Maker:
    code, scope = f.__code__, f.__globals__
    return lambda *cells: types.FunctionType(code, scope, None, None, cells)


# What a function has besides its code, and what one has that was made of the same code.
_OF_CODE = ("__name__", "__qualname__", "__doc__", "__module__", "__type_params__")
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_ANNOTATIONS = ("__annotate__", "__annotations__")


def _annotations(f: Object) -> Contents:
    """Return the annotations of a function, or from Python 3.14 on what computes them.

    Copies share them, and no walk looks into them: they are not what the function reads.
    """
    if (compute := getattr(f, "__annotate__", None)) is not None:
        return {"__annotate__": compute}
    return {"__annotations__": f.__annotations__} if f.__annotations__ else {}


def _function_contents(f: types.FunctionType) -> Contents:
    found = _annotations(f)
    for name in _DEFAULTS:
        if (defaults := getattr(f, name)) is not None:
            found[name] = defaults
    bare = types.FunctionType(f.__code__, f.__globals__, None, None, f.__closure__)
    for name in _OF_CODE:
        if (value := getattr(f, name, None)) is not getattr(bare, name, None):
            found[name] = value
    return {**found, **f.__dict__} if f.__dict__ else found


def _fill_function(new: types.FunctionType, contents: Contents) -> None:
    names: dict[Object, Object] = contents
    for name, value in names.items():
        if name in (*_DEFAULTS, *_ANNOTATIONS, *_OF_CODE):
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
    """Return the attributes of an object, those in slots included, without running its code.

    (`object.__getstate__` calls `getattr`, and so the `__getattr__` of a class for an empty slot;
    that of `attrs` then computes a cached property. A subclass may have a property for a slot.)
    """
    found: Contents = dict(_dict_of(value) or {})
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            for slot in vars(base).values():
                if type(slot) is Slot:
                    with contextlib.suppress(AttributeError):  # it is empty
                        found[slot] = slot.__get__(value)
    return found


def _dict_of(value: Object) -> Contents | None:
    """Return the `__dict__` of an object, for which its class may have a property."""
    for base in type(value).__mro__:
        found = vars(base).get("__dict__")
        if type(found) is types.GetSetDescriptorType or type(found) is Slot:
            return found.__get__(value)
    return None


def _fill_attributes(new: Object, contents: Contents) -> None:
    in_dict = {k: v for k, v in contents.items() if isinstance(k, str)}
    # Not by `setattr`, which runs the properties of a user's class.
    if in_dict and (attributes := _dict_of(new)) is not None:
        attributes.update(in_dict)
    for label, value in contents.items():
        if type(label) is Slot:
            label.__set__(new, value)


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


_FACTORY: Slot = vars(collections.defaultdict)["default_factory"]


def _table(base: Object) -> Kind:
    def contents(value: Object) -> Contents:
        items: Contents = dict(enumerate(itertools.chain.from_iterable(base.items(value))))
        if base is collections.defaultdict:
            items[_FACTORY] = _FACTORY.__get__(value)
        return items if type(value) is dict else {**attributes_of(value), **items}

    def fill(new: Object, contents: Contents) -> None:
        _fill_attributes(new, contents)
        items = [v for k, v in contents.items() if type(k) is int]
        for key, value in zip(items[::2], items[1::2], strict=True):
            base.__setitem__(new, key, value)

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
