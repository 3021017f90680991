"""The kinds of values that can be put together around other parts. A new kind goes here.

`opened` returns the parts of a value, and what makes it of others: of lists, (named) tuples and
dicts, of methods, partials and jitted functions, and of decorated functions. `are_alike` compares
what is made so.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .._jax.types import Copied
from .walk import JITTED, PLAIN, Id, attributes_of, held_by

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
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and not cls.__dictoffset__:
        # A rule that holds one, of settings say, would else be revived or recorded. Not as the
        # class of the user's would do it: one with a `_make` of its own that changes values gave
        # other gradients, silently.
        return tuple.__getitem__(v, slice(None)), functools.partial(tuple.__new__, cls)
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
    return None


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


def are_alike(a: Any, b: Any) -> bool:
    """Return whether two values are the same, or made of the same in the same way.

    A function that makes a decorated one at each call makes another each time, around the same.
    """
    pending, seen = [(a, b)], set[tuple[Id, Id]]()
    for a, b in pending:  # it grows
        is_equal = type(a) in PLAIN and type(b) is type(a) and a == b
        if a is b or is_equal or (id(a), id(b)) in seen:
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
