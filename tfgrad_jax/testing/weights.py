"""The arrays that a function closes over, and the same function with others in their places.

`places` runs once, when a problem is made. `replaced` runs around every evaluation, and puts back
what was there: so a method, a global variable and an object with attributes are all reached.
"""

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.structure import spec

_MANY = 5_000  # objects to look at
Place = tuple[Any, str, str]  # a dictionary or an object, the key or attribute, its name for users


def places(roots: Sequence[Any]) -> list[tuple[Place, Any]]:
    """Return where functions hold arrays, cells, attributes and global variables, and what."""
    found, pending, seen = [], list(roots), {}
    while pending and len(seen) < _MANY:
        value = pending.pop(0)
        if id(value) in seen or _is_foreign(value):
            continue
        seen[id(value)] = value
        for place in _slots(value):
            content = _get(place)
            leaves = [leaf for _, leaf in _flat(content)]
            if any(isinstance(leaf, jax.Array) for leaf in leaves):
                found.append((place, content))
            pending += [leaf for leaf in leaves if not isinstance(leaf, jax.Array)]
    return found


def weights(held: Sequence[tuple[Place, Any]]) -> dict[int, tuple[str, Any]]:
    """Return the arrays that have a derivative, with names as the user would write them."""
    return {
        id(leaf): (place[2] + keystr(path), leaf)
        for place, content in reversed(held)
        for path, leaf in _flat(content)
        if isinstance(leaf, jax.Array) and spec(leaf).differentiable
    }


@contextlib.contextmanager
def replaced(held: Sequence[tuple[Place, Any]], new: Mapping[int, Any]) -> Iterator[None]:
    """Put other values in the places of some arrays, for a while."""
    before = [_get(place) for place, _ in held]
    try:
        for place, value in held:
            _put(place, jax.tree.map(lambda v: new.get(id(v), v), value, is_leaf=_is_leaf))
        yield
    finally:
        for (place, _), value in zip(held, before, strict=True):
            _put(place, value)


def _slots(value: Any) -> list[Place]:
    if isinstance(value, CustomGradient):
        return [(value, name, name) for name in ("_f", "_variables", "_primal")]
    if isinstance(value, types.FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        used = [n for n in _names(value.__code__) if n in value.__globals__]
        return [
            *((c, "cell_contents", n) for n, c in zip(names, cells, strict=True)),
            *((value.__globals__, n, n) for n in used),
            *((value, n, n) for n in ("__defaults__", "__kwdefaults__")),
        ]
    if isinstance(value, types.MethodType):
        return [(value, "__func__", ""), (value, "__self__", "")]
    if isinstance(value, functools.partial):
        return [(value, "func", ""), *((value.keywords, k, k) for k in value.keywords)]
    held = getattr(value, "__dict__", None)
    return [(held, k, f"self.{k}") for k in held] if isinstance(held, dict) else []


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_foreign(value: Any) -> bool:
    """Return whether to look no further: a module, a class, what JAX and NumPy are made of."""
    home = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    root = str(home).partition(".")[0]
    return isinstance(value, types.ModuleType | type) or root in ("jax", "jaxlib", "numpy")


def _is_leaf(value: Any) -> bool:
    return not isinstance(
        value, list | tuple | dict
    )  # an object's attributes are places of its own


def _flat(value: Any) -> Sequence[tuple[Any, Any]]:
    try:
        return tree_flatten_with_path(value, is_leaf=_is_leaf)[0]
    except (TypeError, ValueError):  # such as keys that cannot be sorted
        return []


def _get(place: Place) -> Any:
    owner, key, _ = place
    try:
        return owner[key] if isinstance(owner, dict) else getattr(owner, key)
    except ValueError:  # a variable that is not assigned yet
        return None


def _put(place: Place, value: Any) -> None:
    owner, key, _ = place
    if isinstance(owner, dict):
        owner[key] = value
    else:
        setattr(owner, key, value)
