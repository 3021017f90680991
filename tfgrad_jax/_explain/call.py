"""A call of a decorated function, as a function of the arrays that it reads."""

import contextlib
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import (
    PyTreeDef,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from tfgrad_jax._custom_gradient import CustomGradient, Declaration
from tfgrad_jax._family import is_recomputed
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.types import AnyFunction, Leaf, LeafIndex, PyTree, is_array, spec
from tfgrad_jax._messages import tool_errors
from tfgrad_jax._messages.source import Source
from tfgrad_jax.testing._arrays import Held, arrays_in, called, decorated, is_known, primal_of

TYPE = jax.ShapeDtypeStruct
ArrayIndex: TypeAlias = int  # into the arrays of a call: those it holds, then its arguments


class _Target(NamedTuple):
    """What is explained: a function, and the decorator that it has."""

    f: AnyFunction  # which `custom_gradient` got, or which `recompute_grad` returned
    bound_to: tuple[object, ...]  # `self` of a method
    recomputes: bool
    variables: PyTree = "autodiff"
    primal: AnyFunction | None = None
    convention: Literal["tf", "jax"] = "tf"


def _target(h: AnyFunction) -> _Target:
    h = called(h)
    f, bound_to = (h.__func__, (h.__self__,)) if isinstance(h, types.MethodType) else (h, ())
    owner = decorated(h)
    if owner is not None:
        d = owner._declaration
        return _Target(d.f, bound_to, False, d.variables, d.primal, d.convention)
    if is_recomputed(f):
        return _Target(f, bound_to, True)
    below = getattr(h, "__wrapped__", None)
    wraps = isinstance(below, CustomGradient) or is_recomputed(below)
    raise tool_errors.not_explainable(h, wraps)


class Pulled(NamedTuple):
    """A pull-back, and the arrays that it keeps."""

    ys: list[jax.Array]  # those that have a derivative
    pull: Callable[[Sequence[Leaf]], PyTree]
    kept: list[jax.Array]
    outputs: Mapping[str, jax.Array]  # all of `y`, by name


class Call(NamedTuple):
    """A call as a function of its arrays, on copies of what it holds."""

    target: _Target
    source: Source
    held: Held
    leaves: Sequence[Leaf]
    treedef: PyTreeDef
    given: Sequence[LeafIndex]  # which leaves are arrays or their types
    names: Sequence[str]  # of the arrays
    arrays: Sequence[Leaf]

    def kind(self, i: ArrayIndex) -> str:
        """Return where the gradient of an array comes from, if it has one."""
        is_held = i < len(self.held.arrays)
        by_autodiff = isinstance(self.target.variables, str) if is_held else self.target.recomputes
        return "autodiff" if by_autodiff else "by the rule"

    def value(self, arrays: Sequence[Leaf], plain: bool = False) -> PyTree:
        """Return the value of a copy of the function, or of the undecorated one."""
        n = len(self.held.arrays)
        f, *leaves, primal, variables = self.held(arrays[:n])
        for i, v in zip(self.given, arrays[n:], strict=True):
            leaves[i] = v
        args, kwargs = tree_unflatten(self.treedef, leaves)
        if self.target.recomputes:
            return (f.__wrapped__ if plain else f)(*args, **kwargs)
        if plain:
            return f(*args, **kwargs)[0]
        declared = Declaration.of(_watched(f), variables, primal, self.target.convention)
        h = CustomGradient(declared)
        n = len(self.target.bound_to)
        return (h.__get__(args[0]) if n else h)(*args[n:], **kwargs)

    def vjp(
        self, positions: Sequence[ArrayIndex], arrays: Sequence[Leaf], plain: bool = False
    ) -> Pulled:
        """Return the pull-back to some of the arrays."""

        def of_some(some: dict[ArrayIndex, Leaf]) -> tuple[list[Leaf], dict[str, Leaf]]:
            y = self.value([some.get(i, v) for i, v in enumerate(arrays)], plain)
            named = {f"y{keystr(path)}": jnp.asarray(v) for path, v in tree_flatten_with_path(y)[0]}
            return [v for v in named.values() if spec(v).differentiable], named

        at = {i: arrays[i] for i in positions}
        ys, pull, outputs = jax.vjp(of_some, at, has_aux=True)
        return Pulled(ys, pull, [v for v in tree_leaves(pull) if not is_ref(v)], outputs)

    def is_refused(self, positions: Sequence[ArrayIndex], arrays: Sequence[Leaf]) -> bool:
        """Return whether it is an error to differentiate some of the arrays."""
        try:
            self.vjp(positions, arrays)
        except TypeError:  # it says that a captured value has no gradient
            return True
        return False


def called_with(h: AnyFunction, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Call:
    target = _target(h)
    f, bound_to = target.f, target.bound_to
    is_self = lambda v: any(v is obj for obj in bound_to)  # noqa: E731
    leaves, treedef = tree_flatten(((*bound_to, *args), kwargs), is_leaf=is_self)
    signature, names = Signature(f), [""] * len(leaves)
    bound = signature.bind(f, *tree_unflatten(treedef, range(len(leaves))))
    first = [*signature.input_names(bound), *bound.rest]
    for path, i in tree_flatten_with_path((*bound.inputs, *bound.rest.values()))[0]:
        names[i] = first[path[0].idx] + keystr(path[1:])
    is_given = [isinstance(v, TYPE) or (is_array(v) and not is_ref(v)) for v in leaves]
    given = [i for i, is_one in enumerate(is_given) if is_one]
    settings = [(names[i], None if is_given[i] else v) for i, v in enumerate(leaves)]
    held = Held([("", f), *settings, ("", target.primal), ("variables", target.variables)])
    return Call(
        target=target,
        source=Source.of(f),
        held=held,
        leaves=leaves,
        treedef=treedef,
        given=given,
        names=[*held.names, *(names[i] for i in given)],
        arrays=[*held.arrays, *(leaves[i] for i in given)],
    )


# --- watching the rule --------------------------------------------------------------------------


class _Run(NamedTuple):
    """A run of a watched rule."""

    grad_fn: AnyFunction | None
    held: Sequence[tuple[str, jax.Array]]  # the arrays that it holds, by name


# Which array a rule keeps under which name only the rule can tell, so it notes it when it runs: its
# copy holds what the pull-back keeps. A list in a closure would not do: it holds tracers later, so
# the engine would copy it with the rule, and note the next run in the copy.
_runs: ContextVar[list[_Run]] = ContextVar("runs")


def watching() -> None:
    """Note the runs of watched rules in this context from now on."""
    _runs.set([])


def _watched(f: AnyFunction) -> AnyFunction:
    @functools.wraps(f)
    def watched(*args: PyTree, **kwargs: PyTree) -> PyTree:
        pair = f(*args, **kwargs)
        with contextlib.suppress(TypeError, ValueError):  # no pair: an error later
            y, grad_fn = pair
            return y, _noting(grad_fn) if callable(grad_fn) else grad_fn
        return pair

    return watched


def _noting(grad_fn: AnyFunction) -> AnyFunction:
    @functools.wraps(grad_fn)
    def noting(*upstreams: PyTree, **variables: PyTree) -> PyTree:
        with contextlib.suppress(LookupError):  # `costs` asks for nothing
            held = [(a.name, primal_of(a.value)) for a in arrays_in([("", grad_fn)]).values()]
            _runs.get().append(_Run(grad_fn, held))
        return grad_fn(*upstreams, **variables)

    return noting


def last_run() -> _Run:
    """Return the last run whose arrays can still be used."""
    runs = [run for run in _runs.get() if all(is_known(v) for _, v in run.held)]
    return runs[-1] if runs else _Run(None, [])
