"""Whether a tracer can be reached from what a function holds.

`reach` runs at each call that is traced, on everything that the decorated function can see beside
its operands. It follows what objects really hold, as the garbage collector does.
"""

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr

from tfgrad_jax._trace import is_live, is_operand

_LIMIT = 5_000  # objects to look at; beyond these it is cheaper to trace the function

_FUNCTION, _BUILTIN = types.FunctionType, types.BuiltinFunctionType
# Objects of these very types hold nothing that could be used, or are asked in another way.
INERT = {
    bool, int, float, complex, str, bytes, bytearray, range, type(None), type(Ellipsis),
    type(NotImplemented), types.ModuleType, types.CodeType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, np.ufunc, type(jax.tree_util.default_registry), Jaxpr,
}  # fmt: skip
_LEAVES = (np.generic, np.dtype, jax.Array, Tracer)
JITTED = type(jax.jit(len))
CACHED = (JITTED, type(functools.cache(len)))
_CONTAINERS = (list, tuple, dict, set, frozenset)


def is_captured(value: Any) -> bool:
    """Return whether JAX must be given a value that a function holds as an operand."""
    return is_operand(value) and (not isinstance(value, Tracer) or is_live(value))


@functools.cache
def is_leaf(cls: type) -> bool:
    """Return whether objects of a type hold nothing."""
    return cls in INERT or issubclass(cls, _LEAVES)


def reach(values: Sequence[Any], takes: Callable[[Any], bool] = is_captured) -> bool | None:
    """Return whether a value that a predicate `takes` can be reached from others.

    True if there is one, False if there is none, None if there is too much to look at.
    """
    pending = list(values)
    seen: dict[int, Any] = {}  # by id, and kept, so that no id is used twice
    while pending:
        value = pending.pop()
        cls = type(value)
        if cls in INERT or id(value) in seen:
            continue
        if takes(value):
            return True
        seen[id(value)] = value
        held = () if is_leaf(cls) else _held(value, cls)
        if held is None or len(seen) > _LIMIT or len(held) > _LIMIT:
            return None
        pending += held
    return False


def _held(value: Any, cls: type) -> Sequence[Any] | None:
    """Return what an object holds, or None if it is too much."""
    if cls is _FUNCTION:
        if value.__closure__ is None and value.__defaults__ is None and not value.__dict__:
            return () if value.__kwdefaults__ is None else (value.__kwdefaults__,)
        held = [value.__defaults__, value.__kwdefaults__, value.__dict__]
        return held + [content_of(cell) for cell in value.__closure__ or ()]
    if cls is _BUILTIN:
        return (value.__self__,)
    if isinstance(value, type):
        # Only a class that is made in a function can hold a tracer.
        local = [c for c in value.__mro__ if not is_importable(c)]
        return [v for c in local for v in vars(c).values()]
    if isinstance(value, np.ndarray):
        return list(value.flat) if value.dtype == object else ()
    if isinstance(value, _CONTAINERS) and len(value) > _LIMIT:
        return None
    if cls is weakref.ref:
        return (value(),)
    if cls in CACHED:  # not what is cached: it depends on what was called before
        return (value.__wrapped__,)
    if isinstance(value, dict):  # Python 3.13 shows the attributes of an object to it alone
        return [*gc.get_referents(value), *value.values()]
    return gc.get_referents(value)


def is_importable(value: Any) -> bool:
    """Return whether a module has a class or a function under its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None
