"""A call, and the leaves of its arguments by name: what `check_gradient` and `explain` work on."""

import contextlib
import dis
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from ._custom_gradient import CustomGradient
from ._jax.types import Leaf, PyTree, has_gradient
from ._messages.source import Source

Checked: TypeAlias = Any  # a function, a method or a layer, decorated or around what is
_T = TypeVar("_T")


class UserCodeError(Exception):
    """The user's code raised an error, or JAX did that ran it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def formats(self) -> str:
        """Return the line that formats an array, as `f"{x:g}"` does, if it raised the error.

        Python raises a mere `TypeError`, in the instruction that formats: a tracer has no format.
        """
        tb = self.error.__traceback__
        while tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
        if tb is None or not isinstance(self.error, TypeError):
            return ""
        code = tb.tb_frame.f_code
        raised = (i.opname for i in dis.get_instructions(code) if i.offset == tb.tb_lasti)
        return f"{code.co_filename}:{tb.tb_lineno}" if next(raised, "")[:6] == "FORMAT" else ""


def attempt(code: Callable[..., _T], *args: Any) -> _T:
    """Run code of the user's, which may raise anything: then raise `UserCodeError`.

    The tools catch `UserCodeError` alone, so that their own errors are not taken for the user's.
    """
    try:
        return code(*args)
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError(error) from error


def decorated(h: Checked) -> CustomGradient[..., Any] | None:
    """Return the `CustomGradient` that a function is, or that a method is bound from."""
    f = getattr(h, "__func__", h)
    found = getattr(f, "_custom_gradient", f)  # a wrapper has a copy of this attribute
    known = isinstance(found, CustomGradient) and (found is f or found._method is f)
    return found if known else None


def name_of(h: Checked) -> str:
    return Source.of(inspect.unwrap(h)).name.replace("<locals>.", "")  # `jax.jit(f)` has no name


def differentiable(y: PyTree) -> list[jax.Array]:
    """Return the leaves that have a derivative."""
    return [jnp.asarray(leaf) for leaf in tree_leaves(y) if has_gradient(leaf)]


class Call(NamedTuple):
    """A call of a function, or of a bound method, and the leaves of its arguments."""

    h: Checked
    treedef: PyTreeDef
    leaves: Sequence[Leaf]
    arguments: Sequence[str]  # of the leaves
    names: Sequence[str]  # of the leaves, as a user writes them
    is_input: Sequence[bool]  # of the leaves; arguments that are passed by keyword alone are none

    @classmethod
    def of(cls, h: Checked, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> "Call":
        call = getattr(h, "__call__", None)  # noqa: B004
        if isinstance(call, types.MethodType) and not hasattr(h, "__wrapped__"):
            h = call  # of an object, such as a layer
        parameters: Mapping[str, inspect.Parameter] = {}
        with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
            parameters = inspect.signature(h).parameters
        if decorated(h) is h and args and next(iter(parameters), "") == "self":
            h, args = h.__get__(args[0]), args[1:]  # as the call itself binds it
            parameters = inspect.signature(h).parameters
        first = [p.name for p in parameters.values() if p.kind < p.VAR_POSITIONAL]
        rest = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), "args")
        if len(args) > len(first) and rest not in parameters:  # a wrapper shows what it wraps
            first = []
        positional = [*first, *(f"{rest}[{i}]" for i in range(len(args) - len(first)))]
        flat, treedef = tree_flatten_with_path((args, dict(kwargs)))
        of = [at.key if kind.idx else positional[at.idx] for (kind, at, *_), _ in flat]
        names = [name + keystr(path[2:]) for name, (path, _) in zip(of, flat, strict=True)]
        is_input = [name in positional or name in first for name in of]
        return cls(h, treedef, [leaf for _, leaf in flat], of, names, is_input)

    @property
    def bound_to(self) -> tuple[object, ...]:
        return (self.h.__self__,) if isinstance(self.h, types.MethodType) else ()

    def run(self, f: Callable[..., _T], new: Mapping[int, Leaf]) -> _T:
        """Call a function with these arguments, and new leaves among them."""
        leaves = [new.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(self.treedef, leaves)
        return f(*args, **kwargs)
