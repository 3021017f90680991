"""Name arrays as the user would write them, `self.layers[0].w`."""

import contextlib
import functools
import inspect
import itertools
import types
from collections import deque
from collections.abc import Iterator, MappingView, Sequence
from typing import NamedTuple, TypeAlias

import jax
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from tfgrad_jax._jax.trace import is_live
from tfgrad_jax._jax.types import Copied

from .objects import OBJECT, Contents, Kind, Label, Object, content_of, name_of
from .reach import Id, Reached
from .referents import CACHED, is_leaf

Roots: TypeAlias = Sequence[tuple[str, Object]]  # with their names; "": it needs none

# An object without a name is `self`; these have none, and what they hold needs none in front.
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial, Copied, *CACHED)
_DECLARED = ".variables"
_LIBRARIES = ("jax", "jaxlib", "numpy", __name__.partition(".")[0])


class Named(NamedTuple):
    """An array that a function or an object holds."""

    name: str
    value: Object
    why: str  # copies keep this very array; "" if they do not


def is_known(value: Object) -> bool:
    """Return whether a value is an array that can be used now."""
    return isinstance(value, jax.Array) and (not isinstance(value, Tracer) or is_live(value))


def named(roots: Roots, found: Reached) -> dict[Id, Named]:
    """Name the arrays that a walk from the roots has captured.

    The nearest name counts, but for what is declared as `variables`: one that it has elsewhere.
    """
    pending, declared, names = deque[Named](), deque[Named](), dict[Id, Named]()
    pending += [Named(name, value, "") for name, value in roots]
    while pending or declared:
        one = (pending or declared).popleft()
        name, value, why = one
        kind = found.way.get(id(value))
        if (kind is None and not _is_new(value, found)) or id(value) in names:
            continue
        names[id(value)] = one
        if id(value) in found.captured:
            continue
        if not (name or isinstance(value, _CALLABLES)):
            name = "self"
        why = why or (f"{kind}: not copied" if isinstance(kind, str) else "")
        for step, held in _steps(value, kind):
            path = name + step if name else step.removeprefix(".")
            (declared if step == _DECLARED else pending).append(Named(path, held, why))
    return {key: one for key, one in names.items() if key in found.captured}


def is_of_library(value: Object) -> bool:
    """Return whether a class or a function has no names of the user's for what it holds."""
    return str(value.__module__).partition(".")[0] in _LIBRARIES


def _is_new(value: Object, found: Reached) -> bool:
    """Return whether a property has made a value, such as `__wrapped__` of `eqx.filter_jit`."""
    if id(value) in found.visited or not found.is_complete:
        return False
    return not (isinstance(value, type) or is_leaf(value, type(value)))


def _steps(value: Object, kind: Kind | str | None) -> Iterator[tuple[str, Object]]:
    """Yield what a value holds, each with the step to it, as the user would write it."""
    # A new value may have a new one, and so on; and no `__getattr__` of the user's is to run.
    if kind is not None and inspect.getattr_static(value, "__wrapped__", None) is not None:
        # First: the variable that holds what a wrapper wraps is the wrapper's own.
        yield "", getattr(value, "__wrapped__", None)
    if isinstance(value, Copied):
        yield "", value._declaration.primal
        yield _DECLARED, value._declaration.variables
    elif isinstance(value, types.FunctionType):
        yield from ((f".{name}", held) for name, held in _variables(value))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, deque | set | frozenset):
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif not (is_of_library(type(value)) or isinstance(value, MappingView | Iterator)):
        inside = itertools.count()  # JAX asks first for the value itself, which may hold itself
        with contextlib.suppress(TypeError, ValueError):  # such as keys that cannot be sorted
            leaves = tree_flatten_with_path(value, is_leaf=lambda _: next(inside) > 0)[0]
            yield from ((keystr(path), held) for path, held in leaves)
        recipe = kind if isinstance(kind, Kind) else OBJECT
        yield from (("", part) for part in recipe.parts(value))
        with contextlib.suppress(TypeError):  # an object in C has no attributes
            contents = recipe.contents(value)
            yield from ((_step(value, label, contents), v) for label, v in contents.items())


def _step(holder: Object, label: Label, contents: Contents) -> str:
    """Return the step from an object to one of its contents; "" to the key of a table."""
    if isinstance(label, int) and isinstance(holder, dict):
        return f"[{contents[label - 1]!r}]" if label % 2 else ""
    return f".{name}" if (name := name_of(label)) else f"[{label}]"


def _variables(f: types.FunctionType) -> Iterator[tuple[str, Object]]:
    """Yield the variables of a function that it has before it is called."""
    code, defaults = f.__code__, f.__defaults__ or ()
    yield from zip(code.co_freevars, map(content_of, f.__closure__ or ()), strict=True)
    yield from zip(code.co_varnames[: code.co_argcount][::-1], defaults[::-1], strict=False)
    yield from (f.__kwdefaults__ or {}).items()
