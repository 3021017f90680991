"""The arrays that a function closes over: their names, and the function copied around others.

`scoped` and `arrays_in` run when a problem is made; `copies` for each choice of weights, and what
it returns at every evaluation. Nothing is written to what the user holds.
"""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from tfgrad_jax._closure.cells import Skeleton, content_of, reach
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._source import names_in

_MANY = 5_000  # objects to look at


class _Scoped:
    """A function with global variables of its own, which are copied like other attributes."""

    def __init__(self, f: types.FunctionType, scope: dict[str, Any]) -> None:
        functools.update_wrapper(self, f)
        self._f, self._scope = f, scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        f = self._f
        scope = {**f.__globals__, **self._scope}
        new = types.FunctionType(f.__code__, scope, f.__name__, f.__defaults__, f.__closure__)
        new.__kwdefaults__ = f.__kwdefaults__
        return new(*args, **kwargs)


def scoped(value: Any, seen: tuple[Any, ...] = ()) -> Any:
    """Return a function that has those global variables that hold arrays as its own."""
    if isinstance(value, CustomGradient):
        parts = value._f, value._variables, value._primal, value._convention
        f = scoped(value._f, seen)
        return value if f is value._f else CustomGradient(f, *parts[1:])
    if not isinstance(value, types.FunctionType) or value in seen or _is_foreign(value):
        return value
    scope = {}
    for name in sorted(names_in(value.__code__) & value.__globals__.keys()):
        held = value.__globals__[name]
        new = scoped(held, (*seen, value))
        if new is not held or reach([held], lambda v: isinstance(v, jax.Array)):
            scope[name] = new
    return _Scoped(value, scope) if scope else value


def arrays_in(roots: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Return the arrays that functions and objects hold, as the user would write them."""
    pending, seen = list(roots), {}
    while pending and len(seen) < _MANY:
        name, value = pending.pop(0)
        if id(value) not in seen and not _is_foreign(value):
            seen[id(value)] = value
            pending += _held(name, value)
        if isinstance(value, jax.Array):
            yield name, value


def _held(name: str, value: Any) -> Sequence[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        cells = map(content_of, value.__closure__ or ())
        return [*zip(value.__code__.co_freevars, cells, strict=True), ("", value.__defaults__)]
    if isinstance(value, types.MethodType):
        return ("", value.__func__), ("self", value.__self__)
    if isinstance(value, CustomGradient):
        return ("", value._f), ("", value._primal), ("variables", value._variables)
    if isinstance(value, _Scoped):
        return [("", value._f), *value._scope.items()]
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", v) for key, v in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{name}[{i}]", v) for i, v in enumerate(value)]
    return [(f"{name}.{key}", v) for key, v in getattr(value, "__dict__", {}).items()]


def _is_foreign(value: Any) -> bool:
    """Return whether to look no further: a module, a class, what JAX and NumPy are made of."""
    home = (value if isinstance(value, types.FunctionType) else type(value)).__module__
    root = str(home).partition(".")[0]
    return isinstance(value, types.ModuleType | type) or root in ("jax", "jaxlib", "numpy")


def copies(values: Sequence[Any], weights: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return what copies the values around other weights; raise where Python cannot copy one."""
    ids = [id(w) for w in weights]
    skeleton = Skeleton(lambda v: id(v) in ids)
    for value in values:
        skeleton.add(value)
    order = [ids.index(id(w)) for w in skeleton.tracers]
    skeleton.finish()
    return lambda new: skeleton([new[i] for i in order])
