"""The arrays that functions and objects hold, by name, and copies of these around other arrays."""

import contextlib
import dis
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from tfgrad_jax._closure.objects import OBJECT, Kind, Object, content_of
from tfgrad_jax._closure.path import step_of
from tfgrad_jax._closure.reach import Id, Reached, survey
from tfgrad_jax._closure.referents import CACHED, is_leaf
from tfgrad_jax._closure.skeleton import hoist_tracers
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_live
from tfgrad_jax._jax.types import Leaf
from tfgrad_jax._messages.source import codes_inside
from tfgrad_jax._messages.text import type_name

Roots: TypeAlias = Sequence[tuple[str, Object]]  # with their names; "": it needs none


class Named(NamedTuple):
    """An array that a function or an object holds."""

    name: str
    value: Object
    why: str  # copies keep this very array; "" if they do not


class HeldArrays:
    """The arrays that values hold, by name. Called with others, it returns copies that hold these.

    What cannot be copied is shared: its arrays, and those in global variables, are `constants`.
    A jitted function is copied without the `jit`.
    """

    def __init__(self, roots: Roots) -> None:
        values = [value for _, value in roots]
        found = survey(values, lambda v: is_known(v) or is_ref(v))
        self._skeleton, self._taken = hoist_tracers(values, found)
        names = named(roots, found)
        self.arrays = [v for v in self._taken if not is_ref(v)]
        unnamed = (Named(f"(unnamed {type_name(v)})", v, "") for v in self.arrays)
        self.names = [names.get(id(one.value), one).name for one in unnamed]
        self.places = {**names, **_in_global_variables(values)}
        taken = {id(v) for v in self._taken}
        self.constants = [v for key, v in self.places.items() if key not in taken]

    def __call__(self, arrays: Iterable[Leaf]) -> Sequence[Object]:
        """Return the values, copied around other arrays. A Ref stays itself."""
        rest = iter(arrays)
        return self._skeleton.copies([v if is_ref(v) else next(rest) for v in self._taken]).values


def is_known(value: Object) -> bool:
    """Return whether a value is an array that can be used now."""
    return isinstance(value, jax.Array) and (not isinstance(value, Tracer) or is_live(value))


# --- names ----------------------------------------------------------------------------------------

# An object without a name is `self`; these have none, and what they hold needs none in front.
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial, CustomGradient, *CACHED)
_DECLARED = ".variables"


def named(roots: Roots, found: Reached) -> dict[Id, Named]:
    """Name the arrays that a walk from the roots has found, as the user would write them.

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
    return {key: one for key, one in names.items() if is_known(one.value)}


def _is_new(value: Object, found: Reached) -> bool:
    """Return whether a property has made a value, such as `__wrapped__` of `eqx.filter_jit`."""
    if id(value) in found.visited or not found.is_complete:
        return False
    return not (isinstance(value, type) or is_leaf(value, type(value)))


def _steps(value: Object, kind: Kind | str | None) -> Iterator[tuple[str, Object]]:
    """Yield what a value holds, each with the step to it, as the user would write it."""
    if kind is not None:  # a new value may have a new one, and so on
        # First: the variable that holds what a wrapper wraps is the wrapper's own.
        yield "", getattr(value, "__wrapped__", None)
    if isinstance(value, CustomGradient):
        yield "", value._declaration.primal
        yield _DECLARED, value._declaration.variables
    elif isinstance(value, types.FunctionType):
        yield from ((f".{name}", held) for name, held in _variables(value))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, deque | set | frozenset):
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif _package_of(type(value)) not in _LIBRARIES:  # what these hold has no name of the user's
        with contextlib.suppress(TypeError, ValueError):  # such as keys that cannot be sorted
            leaves = tree_flatten_with_path(value, is_leaf=lambda v: v is not value)[0]
            yield from ((keystr(path), held) for path, held in leaves)
        recipe = kind if isinstance(kind, Kind) else OBJECT
        yield from (("", part) for part in recipe.parts(value))
        with contextlib.suppress(TypeError):  # an object in C has no attributes
            contents = recipe.contents(value)
            yield from ((step_of(value, label, contents), v) for label, v in contents.items())


def _variables(f: types.FunctionType) -> Iterator[tuple[str, Object]]:
    """Yield the variables of a function that it has before it is called."""
    code, defaults = f.__code__, f.__defaults__ or ()
    yield from zip(code.co_freevars, map(content_of, f.__closure__ or ()), strict=True)
    yield from zip(code.co_varnames[: code.co_argcount][::-1], defaults[::-1], strict=False)
    yield from (f.__kwdefaults__ or {}).items()


# --- global variables -----------------------------------------------------------------------------

_LIBRARIES = ("jax", "jaxlib", "numpy", __name__.partition(".")[0])


def _in_global_variables(values: Sequence[Object]) -> dict[Id, Named]:
    """Return the arrays in global variables of the functions that values hold, and so on."""
    roots: dict[Id, tuple[str, Object]] = {}
    while True:
        more = [value for _, value in roots.values()]
        found = survey([*values, *more], is_known)
        functions = [f for f, *_ in found.visited.values() if isinstance(f, types.FunctionType)]
        every = {id(v): (name, v) for f in functions for name, v in _globals(f)}
        if every.keys() <= roots.keys():
            arrays = named([*roots.values()], found).items()
            return {key: one._replace(why=one.why or "a global variable") for key, one in arrays}
        roots |= every


def _globals(f: types.FunctionType) -> Iterator[tuple[str, Object]]:
    """Yield the global variables that a function, or one written in it, may read."""
    if _package_of(f) not in _LIBRARIES:
        space = f.__globals__
        yield from ((name, space[name]) for name in _names_of_globals(f.__code__) if name in space)


def _package_of(value: Object) -> str:
    return str(value.__module__).partition(".")[0]


@functools.cache
def _names_of_globals(code: types.CodeType) -> list[str]:
    """Return the names that code reads as global variables; `co_names` has attributes, too."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    every = (i for c in (code, *codes_inside(code)) for i in dis.get_instructions(c))
    return list(dict.fromkeys(i.argval for i in every if i.opname in loads))
