"""A call as a function of arrays: those among its arguments, and those that it holds.

`check_gradient` and `explain` both work on such a call. Other arrays are tried on copies, so
nothing that the user holds is written.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef, tree_flatten, tree_leaves, tree_unflatten

from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._frontend.structure import split
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree, has_gradient, is_array
from tfgrad_jax._messages import errors

from .held import HeldArrays

Checked: TypeAlias = Any  # a function, a method or a layer, decorated or around what is
ValueIndex: TypeAlias = int  # into the values of a call
_T = TypeVar("_T")


class UserCodeError(Exception):
    """The user's code raised an error, or JAX did that ran it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


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


def bound(h: Checked, args: tuple[PyTree, ...]) -> tuple[Checked, tuple[PyTree, ...]]:
    """Return what runs when `h` is called, and its arguments without the instance.

    Of an object, such as a layer, that is its bound method.
    """
    call = getattr(h, "__call__", None)  # noqa: B004
    if isinstance(call, types.MethodType) and not hasattr(h, "__wrapped__"):
        return call, args
    if decorated(h) is h and args and Signature(h).names[:1] == ("self",):
        return h.__get__(args[0]), args[1:]  # a function of a class, as the call itself binds it
    return h, args


def differentiable(y: PyTree) -> list[jax.Array]:
    """Return the leaves that have a derivative."""
    return [jnp.asarray(leaf) for leaf in tree_leaves(y) if has_gradient(leaf)]


class Made(NamedTuple):
    """A call with other values in it."""

    h: Checked
    reference: AnyFunction | None
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]

    @property
    def bound_to(self) -> tuple[object, ...]:
        return (self.h.__self__,) if isinstance(self.h, types.MethodType) else ()

    def value(self) -> PyTree:
        return self.h(*self.args, **self.kwargs)

    def undecorated(self) -> PyTree:
        """Call what `h` decorates: of a `custom_gradient`, it returns a pair."""
        return self.h.__wrapped__(*self.bound_to, *self.args, **self.kwargs)

    def plain(self) -> PyTree:
        return self.undecorated()[0]

    def primal(self) -> PyTree:
        owner: Any = decorated(self.h)
        return owner._declaration.primal(*self.bound_to, *self.args, **self.kwargs)

    def of_reference(self) -> PyTree:
        f: Any = self.reference
        return f(*self.args, **self.kwargs)


class CallOnArrays(NamedTuple):
    """A call, and all values that can be replaced in it: leaves of arguments, then held arrays."""

    h: Checked
    reference: AnyFunction | None
    leaves: Sequence[Leaf]
    inputs: int  # how many of these are of inputs; the others are passed by keyword alone
    treedef: PyTreeDef
    keywords: Sequence[str]  # the names of the last arguments
    held: HeldArrays  # what the functions hold, and the objects among the leaves
    names: Sequence[str]  # of the values
    omitted: Mapping[str, PyTree]  # defaults of parameters that the call leaves out

    @classmethod
    def of(
        cls,
        h: Checked,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        reference: AnyFunction | None = None,
    ) -> "CallOnArrays":
        h, args = bound(h, args)
        signature = Signature(h)
        try:
            found = signature.bind(h, args, kwargs)
        except TypeError:
            if decorated(h) is not None:
                raise
            # A wrapper may show the signature of what it wraps, of a method with `self`.
            signature = Signature(h if signature.names[:1] == ("self",) else _any, bound=1)
            found = signature.bind(h, args, kwargs)
        arguments = (*found.inputs, *found.rest.values())
        leaves, treedef = tree_flatten(arguments)
        first = (*signature.input_names(found), *found.rest)
        paths = split(arguments, first)[-1].leaf_paths()
        settings = [None if is_array(v) else v for v in leaves]
        held = HeldArrays([("", h), ("", reference), *zip(paths, settings, strict=True)])
        n_inputs, keywords = len(tree_leaves(found.inputs)), (*found.named, *found.rest)
        names = [*paths, *held.names]
        omitted = {signature.names[i]: default for i, default in found.omitted.items()}
        return cls(h, reference, leaves, n_inputs, treedef, keywords, held, names, omitted)

    @property
    def values(self) -> list[Leaf]:
        return [*self.leaves, *self.held.arrays]

    def made(self, new: Mapping[ValueIndex, Leaf]) -> Made:
        """Return the call with new values in it; on copies, if they are in place of held ones."""
        h, reference, leaves, n = self.h, self.reference, self.leaves, len(self.leaves)
        if any(i >= n for i in new):
            arrays = (new.get(i, v) for i, v in enumerate(self.held.arrays, n))
            h, reference, *copied = self.held(arrays)
            both = zip(leaves, copied, strict=True)
            leaves = [v if is_array(v) else setting for v, setting in both]
        values = tree_unflatten(self.treedef, [new.get(i, v) for i, v in enumerate(leaves)])
        end = len(values) - len(self.keywords)
        kwargs = dict(zip(self.keywords, values[end:], strict=True))
        return Made(h, reference, values[:end], kwargs)

    def refused(
        self, possible: Sequence[ValueIndex], values: Mapping[ValueIndex, Leaf]
    ) -> list[ValueIndex]:
        """Return which of the values it is an error to differentiate, as they have no gradient."""

        def is_refused(some: Sequence[ValueIndex]) -> bool:
            f = lambda new: differentiable(self.made({**values, **new}).value())  # noqa: E731
            try:
                attempt(jax.vjp, f, {i: values[i] for i in some})
            except UserCodeError as failure:  # of any other kind: it raises again
                return errors.is_of_captured(failure.error)
            return False

        is_any = bool(possible) and is_refused(possible)
        return [i for i in possible if is_refused([i])] if is_any else []


def _any(self: object, *args: PyTree, **kwargs: PyTree) -> None: ...
