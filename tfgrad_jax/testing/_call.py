"""The call to check, and the leaves of its arguments by name."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path, tree_unflatten

from .._custom_gradient import CustomGradient
from .._jax.types import Leaf, PyTree
from .._messages.source import Source

Checked: TypeAlias = Any  # a function, a method or a layer, decorated or around what is
_T = TypeVar("_T")


def decorated(h: Checked) -> CustomGradient[..., Any] | None:
    """Return the `CustomGradient` that a function is, or that a method is bound from."""
    f = getattr(h, "__func__", h)
    found = getattr(f, "_custom_gradient", f)  # a wrapper has a copy of this attribute
    known = isinstance(found, CustomGradient) and (found is f or found._method is f)
    return found if known else None


def name_of(h: Checked) -> str:
    return Source.of(inspect.unwrap(h)).name.replace("<locals>.", "")  # `jax.jit(f)` has no name


class Call(NamedTuple):
    """A call of a function, or of a bound method, and the leaves of its arguments."""

    h: Checked
    bound: inspect.BoundArguments
    treedef: PyTreeDef
    leaves: Sequence[Leaf]
    names: Sequence[str]  # of the leaves, as a user writes them
    is_input: Sequence[bool]  # of the leaves; arguments that are passed by keyword alone are none

    @classmethod
    def of(cls, h: Checked, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> "Call":
        if hasattr(h, "__func__"):  # equinox has a class of its own for bound methods
            h = types.MethodType(h.__func__, h.__self__)
        owner, call = decorated(h), getattr(h, "__call__", None)  # noqa: B004
        if owner is h and owner._is_method and args:  # called on the class
            h, args = h.__get__(args[0]), args[1:]
        elif isinstance(call, types.MethodType) and not hasattr(h, "__wrapped__"):
            h = call  # of an object, such as a layer
        try:
            bound = inspect.signature(h).bind(*args, **kwargs)
        except (TypeError, ValueError):  # of a builtin, or a wrapper shows that of what it wraps
            bound = inspect.signature(lambda *args, **kwargs: None).bind(*args, **kwargs)
        flat, treedef = tree_flatten_with_path([*bound.arguments.values()])
        of = [bound.signature.parameters[[*bound.arguments][path[0].idx]] for path, _ in flat]
        names = [p.name + keystr(path[1:]) for p, (path, _) in zip(of, flat, strict=True)]
        is_input = [p.kind < p.KEYWORD_ONLY for p in of]
        return cls(h, bound, treedef, [leaf for _, leaf in flat], names, is_input)

    @property
    def bound_to(self) -> tuple[object, ...]:
        return (self.h.__self__,) if isinstance(self.h, types.MethodType) else ()

    def run(self, f: Callable[..., _T], new: Mapping[int, Leaf]) -> _T:
        """Call a function with these arguments, and new leaves among them."""
        leaves = [new.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        given = zip(self.bound.arguments, tree_unflatten(self.treedef, leaves), strict=True)
        bound = inspect.BoundArguments(self.bound.signature, dict(given))
        return f(*bound.args, **bound.kwargs)
