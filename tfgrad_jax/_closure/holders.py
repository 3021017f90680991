"""The kinds of values that can be put together around other parts. A new kind goes here.

`opened` returns the parts of a value, and what makes it of others: of lists, tuples and dicts, of
methods, partials and jitted functions, of decorated functions, and of pytrees without hidden state.
`are_alike` compares what is made so.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.tree_util import tree_flatten, tree_unflatten

from .._jax.types import Copied
from .walk import EMPTY, JITTED, PLAIN, Id, attributes_of, held_by, reaches_nothing

Make: TypeAlias = Callable[[Sequence[Any]], Any]  # a value, of other parts


def values_of(container: Any) -> Sequence[Any]:
    """Return what a list or a dict holds, of a dict keys and values in turn."""
    if type(container) is not dict:
        return container
    return [v for pair in container.items() for v in pair]


def opened(v: Any, cls: type) -> tuple[Sequence[Any], Make] | None:
    """Return the parts of a value, and what makes it of others; None if nothing can."""
    if cls is tuple or cls is list:
        return v, cls
    if cls is dict:
        return values_of(v), filled
    if cls is types.MethodType:
        return (v.__func__, v.__self__), lambda parts: types.MethodType(*parts)
    if cls is JITTED:  # rebuilt without the `jit`
        return (v.__wrapped__,), lambda parts: parts[0]
    if cls is functools.partial:
        return (v.func, v.args, v.keywords), lambda p: functools.partial(p[0], *p[1], **p[2])
    if isinstance(v, Copied):
        return _of_declared(v)
    return _of_pytree(v, cls)


def filled(pairs: Sequence[Any]) -> Any:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def _of_declared(h: Any) -> tuple[Sequence[Any], Make]:
    (f, variables, primal, *options), cls = h._declaration, type(h)
    declaration = type(h._declaration)

    def make(parts: Sequence[Any]) -> Any:
        made = cls(declaration(*parts[:3], *options))
        vars(made).update(parts[3])
        return made

    return [f, variables, primal, attributes_of(h)], make


def _of_pytree(v: Any, cls: type) -> tuple[Sequence[Any], Make] | None:
    """Return the children of a pytree, and what makes it; None if that loses something.

    What a class keeps beside its children, `unflatten` may make anew, in its first state; a
    `defaultdict` has other keys first then. So it is tried on the children themselves.
    """
    try:
        children, treedef = tree_flatten(v, is_leaf=lambda part: part is not v)
        if len(children) == 1 and children[0] is v:
            return None
        again = tree_unflatten(treedef, children)
    except Exception:  # keys that cannot be sorted; a constructor that does not take its own
        return None
    if type(again) is not cls or not _are_same(_state(v), _state(again)):
        return None
    _, static = treedef.node_data()
    if not reaches_nothing([static], may_change=True):  # its static part may hold an array
        return None
    return children, functools.partial(tree_unflatten, treedef)


def _state(v: Any) -> list[Any]:
    slots = (s for c in type(v).__mro__ for s in vars(c).get("__slots__", ()))
    named = {**getattr(v, "__dict__", {}), **{s: getattr(v, s, EMPTY) for s in slots}}
    items = [x for pair in dict.items(v) for x in pair] if isinstance(v, dict) else ()
    return [*named, *named.values(), *items, *(v if isinstance(v, (list, tuple)) else ())]


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(_is_same, these, those))


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values are one, or equal numbers or strings."""
    return a is b or (type(a) in PLAIN and type(b) is type(a) and a == b)


def are_alike(a: Any, b: Any) -> bool:
    """Return whether two values are the same, or made of the same in the same way.

    A function that makes a decorated one at each call makes another each time, around the same.
    """
    pending, seen = [(a, b)], set[tuple[Id, Id]]()
    for a, b in pending:  # it grows
        if _is_same(a, b) or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b) or type(a) not in _MADE:
            return False
        if type(a) is types.FunctionType and a.__code__ is not b.__code__:
            return False
        these, those = ([v for _, v in held_by(one)] for one in (a, b))
        if len(these) != len(those):
            return False
        pending += zip(these, those, strict=True)
    return True


_MADE = types.FunctionType, types.MethodType, functools.partial, tuple, list, dict
