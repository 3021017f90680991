"""The arrays that a function closes over, and the same function with others in their places.

`places` runs once, when a problem is made; `replaced` around every evaluation. It puts back what
was there: so global variables, methods and objects with attributes are reached.
"""

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._source import names_in

_MANY = 5_000  # objects to look at
Place = tuple[Any, str, str, Any]  # an owner, the key or attribute, its name for users, the content


def places(roots: Sequence[Any]) -> list[Place]:
    """Return where functions hold arrays: in cells, defaults, attributes and global variables."""
    found, pending, seen = [], list(roots), {}
    while pending and len(seen) < _MANY:
        value = pending.pop(0)
        if id(value) not in seen and not _is_foreign(value):
            seen[id(value)] = value
            for owner, key, name in _slots(value):
                content = _get(owner, key)
                leaves = [leaf for _, leaf in flat(content)]
                if any(isinstance(leaf, jax.Array) for leaf in leaves):
                    found.append((owner, key, name, content))
                pending += leaves
    return found


@contextlib.contextmanager
def replaced(found: Sequence[Place], new: Mapping[int, Any]) -> Iterator[None]:
    """Put other values in the places of the arrays with these ids, for a while."""
    before = [(owner, key, _get(owner, key)) for owner, key, *_ in found]
    try:
        for owner, key, _, value in found:
            _put(owner, key, jax.tree.map(lambda v: new.get(id(v), v), value, is_leaf=_is_leaf))
        yield
    finally:
        for place in before:
            _put(*place)


def flat(value: Any) -> Sequence[tuple[Any, Any]]:
    """Return what containers hold, with paths; the attributes of an object are other places."""
    try:
        return tree_flatten_with_path(value, is_leaf=_is_leaf)[0]
    except (TypeError, ValueError):  # such as keys that cannot be sorted
        return []


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, list | tuple | dict)


def _is_foreign(value: Any) -> bool:
    """Return whether to look no further: a module, a class, what JAX and NumPy are made of."""
    home = (value if isinstance(value, types.FunctionType) else type(value)).__module__
    root = str(home).partition(".")[0]
    return isinstance(value, types.ModuleType | type) or root in ("jax", "jaxlib", "numpy")


def _slots(value: Any) -> list[tuple[Any, str, str]]:
    if isinstance(value, CustomGradient):
        return [(value, name, name) for name in ("_f", "_variables", "_primal")]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__closure__ or (), value.__code__.co_freevars, strict=True)
        used = [n for n in names_in(value.__code__) if n in value.__globals__]
        held = [(cell, "cell_contents", name) for cell, name in cells]
        return [*held, *((value.__globals__, n, n) for n in used), (value, "__defaults__", "")]
    if isinstance(value, types.MethodType):
        return [(value, "__func__", ""), (value, "__self__", "")]
    held = getattr(value, "__dict__", {})
    return [(held, key, f"self.{key}") for key in held]


def _get(owner: Any, key: str) -> Any:
    # A cell of a variable that is not assigned yet has no contents.
    with contextlib.suppress(ValueError):
        return owner[key] if isinstance(owner, dict) else getattr(owner, key)


def _put(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[key] = value
    else:
        setattr(owner, key, value)
