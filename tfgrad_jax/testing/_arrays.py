"""The arrays that functions and objects hold, by name, and copies of these around other arrays."""

import contextlib
import dis
import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from tfgrad_jax._closure.objects import Object, content_of, kind_of
from tfgrad_jax._closure.reach import CACHED, Id, reach
from tfgrad_jax._closure.skeleton import hoist_tracers
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_live
from tfgrad_jax._jax.types import Leaf, Tangents
from tfgrad_jax._messages.text import type_name

_MOST_OBJECTS = 5_000  # to look at for names

Roots: TypeAlias = Iterable[tuple[str, Object]]  # with their names; "": it needs none


class Array(NamedTuple):
    """An array that a function or an object holds."""

    name: str
    value: Object
    why: str  # copies keep this very array, if it is not among those of `Held`


class Held:
    """The arrays that values hold, by name. Called with others, it returns copies that hold these.

    What cannot be copied is shared: its arrays, and those in global variables, are `constants`.
    A jitted function is copied without the `jit`.
    """

    def __init__(self, roots: Sequence[tuple[str, Object]]) -> None:
        values = [value for _, value in roots]
        found = reach(values, lambda v: is_known(v) or is_ref(v), lenient=True)
        self._skeleton, self._taken = hoist_tracers(values, found)
        named = arrays_in(roots)
        self.arrays = [v for v in self._taken if not is_ref(v)]
        found = [named.pop(id(v), None) for v in self.arrays]
        self.names = [
            a.name if a else f"(unnamed {type_name(v)})"
            for a, v in zip(found, self.arrays, strict=True)
        ]
        self.whys = [a.why if a else "" for a in found]  # of a second place that holds it
        self.constants = list(named.values())

    def __call__(self, arrays: Iterable[Leaf]) -> Sequence[Object]:
        """Return the values, copied around other arrays. A Ref stays itself."""
        rest = iter(arrays)
        return self._skeleton.copies([v if is_ref(v) else next(rest) for v in self._taken]).values


def decorated(h: Object) -> CustomGradient[..., Any] | None:
    """Return the `CustomGradient` that a function is, or that a method is bound from."""
    f = getattr(h, "__func__", h)
    found = getattr(f, "_custom_gradient", f)  # a wrapper has a copy of this attribute
    known = isinstance(found, CustomGradient) and (found is f or found._method is f)
    return found if known else None


def called(h: Object) -> Object:
    """Return what runs when `h` is called: of an object, such as a layer, its bound method."""
    call = getattr(h, "__call__", None)  # noqa: B004
    return call if isinstance(call, types.MethodType) and not hasattr(h, "__wrapped__") else h


def is_known(value: Object) -> bool:
    """Return whether a value is an array that can be used now."""
    return isinstance(value, jax.Array) and (not isinstance(value, Tracer) or is_live(value))


def primal_of(value: Leaf) -> Leaf:
    """Return the primal of a tracer of a derivative, and any other value itself."""
    # What a rule keeps is a tracer of the level at which it was made, and the pull-back keeps its
    # primal. JAX has no public function for that, but the rule of a `custom_jvp` gets the primals.
    found = []
    probe = jax.custom_jvp(lambda value: value)

    @probe.defjvp
    def _(primals: Tangents, tangents: Tangents) -> tuple[Leaf, Leaf]:
        found.append(primal_of(primals[0]))
        return primals[0], tangents[0]

    probe(value)
    return found[0] if found else value


def arrays_in(roots: Roots) -> dict[Id, Array]:
    """Return the arrays that values with names hold, by id, named as the user would write them.

    An object without a name is `self`. What is declared as `variables` keeps the name that it has
    elsewhere.
    """
    pending, declared, seen = deque[Array](), deque[Array](), dict[Id, Array]()
    for name, value in roots:
        (declared if name == "variables" else pending).append(Array(name, value, ""))
    while (pending or declared) and len(seen) < _MOST_OBJECTS:
        one = (pending or declared).popleft()
        name, value, why = one
        if id(value) in seen or isinstance(value, type | types.ModuleType):
            continue
        seen[id(value)] = one
        if isinstance(value, jax.Array):
            continue
        why = why or _why_not_copied(value)
        if not (name or isinstance(value, _CALLABLES)):
            name = "self"
        for step, held in _steps(value):
            path = name + step if name else step.lstrip(".")
            (declared if step == ".variables" else pending).append(Array(path, held, why))
        for step, held in _globals(value).items():
            path = f"{name}.{step}" if name else step
            pending.append(Array(path, held, why or "a global variable"))
    return {i: one for i, one in seen.items() if is_known(one.value)}


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial, CustomGradient, *CACHED)


def _why_not_copied(value: Object) -> str:
    """Return why an object cannot be copied by its attributes, or ""."""
    if isinstance(value, _CALLABLES) or not all_leaves([value]):
        return ""
    kind = kind_of(value, type(value))
    return f"{kind}: not copied" if isinstance(kind, str) else ""


def _globals(value: Object) -> dict[str, Object]:
    """Return the global variables that a function, or one written in it, may read."""
    if not isinstance(value, types.FunctionType) or _package_of(value) in _LIBRARIES:
        return {}
    space = value.__globals__
    return {name: space[name] for name in _names_of_globals(value.__code__) if name in space}


@functools.cache
def _names_of_globals(code: types.CodeType) -> list[str]:
    """Return the names that code reads as global variables; `co_names` has attributes, too."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = [i.argval for i in dis.get_instructions(code) if i.opname in loads]
    inner = [_names_of_globals(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return list(dict.fromkeys(itertools.chain(names, *inner)))


_LIBRARIES = ("jax", "jaxlib", "numpy", __name__.partition(".")[0])


def _package_of(value: Object) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _steps(value: Object) -> Iterable[tuple[str, Object]]:
    """Return what a value holds, each with the step to it."""
    if isinstance(value, types.FunctionType):
        code, defaults = value.__code__, value.__defaults__ or ()
        cells = map(content_of, value.__closure__ or ())
        found = dict(zip(code.co_freevars, cells, strict=True))
        found |= zip(code.co_varnames[: code.co_argcount][::-1], defaults[::-1], strict=False)
        found |= value.__kwdefaults__ or {}
        wrapped = vars(value).get("__wrapped__")  # first: the variable that holds it is a wrapper's
        return [("", wrapped), *((f".{n}", v) for n, v in found.items())]
    if isinstance(value, types.MethodType):
        return ("", value.__func__), ("", value.__self__)
    if isinstance(value, CustomGradient):
        f, variables, primal, *_ = value._declaration
        return ("", f), (".variables", variables), ("", primal)
    if _package_of(type(value)) in _LIBRARIES:
        return [("", getattr(value, "__wrapped__", None))]  # of a jitted function
    if isinstance(value, functools.partial):
        return ("", value.func), (".args", value.args), (".keywords", value.keywords)
    if isinstance(value, deque | set | frozenset):
        return [(f"[{i}]", held) for i, held in enumerate(value)]
    steps = [("", getattr(value, "__wrapped__", None))]
    with contextlib.suppress(TypeError, ValueError):  # such as keys that cannot be sorted
        leaves = tree_flatten_with_path(value, is_leaf=lambda v: v is not value)[0]
        steps += [(keystr(path), leaf) for path, leaf in leaves]  # static fields are attributes
    slots = [getattr(c, "__slots__", ()) for c in type(value).__mro__]
    names = [n for s in slots for n in ([s] if isinstance(s, str) else s)]
    names += getattr(value, "__dict__", ())
    steps += [
        ("" if n in ("__func__", "__self__") else f".{n}", getattr(value, n, None)) for n in names
    ]
    return steps
