"""What is checked, as functions of arrays alone: of arguments and of weights.

`Problem` is made first. Each evaluation goes through `_value`, on other arrays, and on a copy of
the function around other weights: nothing is written to what the user holds.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfgrad_jax._closure.cells import OpaqueError, Skeleton
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.grad_fn import NeedsValuesError, accepts_variables, checked_outputs
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._frontend.structure import is_array, spec, split
from tfgrad_jax._source import describe

from .vectors import OfArrays


class Problem:
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    def __init__(
        self, h: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Any
    ) -> None:
        signature = Signature(h)
        self._bound = bound = signature.bind(h, args, kwargs)
        self._leaves, self._treedef = tree_flatten((*bound.inputs, *bound.rest.values()))
        inputs = tree_unflatten(self._treedef, self._leaves)
        paths = split(inputs, (*signature.input_names(bound), *bound.rest))[-1].leaf_paths()
        if any(isinstance(v, jax.core.Tracer) for v in self._leaves):
            raise TypeError(
                f"check_gradient compares values, but {describe(h)} got an argument that JAX is "
                "tracing. Call it outside of `jax.jit`, `jax.grad` and the like."
            )
        self._moving: list[int] = []
        self._held, self._copy = (h, reference), None
        ours, rule = _custom_gradient(h), None
        with contextlib.suppress(Exception):  # not one of ours, if it returns no pair
            _, rule = self._value("pair")
        variables = ours and ours._variables
        listed = variables is None and callable(rule) and accepts_variables(rule)
        asked = not callable(rule) or listed or isinstance(variables, str)
        count = len(jax.tree.leaves(bound.inputs))  # a number that is passed by keyword is a setting
        self._moving = [
            i
            for i, v in enumerate(self._leaves)
            if (is_array(v) and (i < count or asked)) or (isinstance(v, float | complex) and i < count)
            if spec(v).differentiable
        ]
        self.xs, self.names = ([every[i] for i in self._moving] for every in (self._leaves, paths))
        self.h: OfArrays = functools.partial(self._outputs, "h")
        # For finite differences: what `primal` stands for. For plain autodiff: None if unknown.
        undecorated = functools.partial(self._outputs, "pair") if callable(rule) else None
        self.value: OfArrays = undecorated or self.h
        self.plain = functools.partial(self._outputs, "reference") if reference else undecorated
        self.has_primal = ours is not None and ours._primal is not None
        self.missed: list[str] = []  # variables that are not checked
        if listed:
            self._add_weights(self._captured(ours), False)
        elif variables is not None and not asked:
            if callable(variables) and all_leaves([variables]):
                variables = variables(*_bound_to(h))
            found = tree_flatten_with_path(variables)[0]
            self._add_weights([("variables" + keystr(path), w) for path, w in found], True)
        ys = self.value(*self.xs) if self.xs else []
        if not ys:
            raise ValueError(
                f"check_gradient found nothing to differentiate in {describe(h)}: there is no "
                f"floating array among its {'outputs' if self.xs else 'arguments'}. Pass floats, "
                "not integers; of a function of integers, or to them, there is no gradient."
            )
        got, wanted = ([y.shape for y in f] for f in (self.plain(*self.xs) if self.plain else ys, ys))
        if got != wanted:
            raise ValueError(
                f"The reference {describe(reference)} of check_gradient must return arrays of "
                f"the shapes that {describe(h)} returns, {wanted}, but returned {got}."
            )

    def _value(self, which: str, *xs: Any) -> Any:
        """Call `h`, what it decorates ("pair"), its `primal`, or the reference on other arrays."""
        given = dict(zip(self._moving, xs, strict=False))
        leaves = [given.get(i, v) for i, v in enumerate(self._leaves)]
        values = tree_unflatten(self._treedef, leaves)
        names = (*self._bound.named, *self._bound.rest)
        args, kwargs = values[: -len(names) or None], values[len(values) - len(names) :]
        h, reference = self._copy(xs[len(self._moving) :]) if self._copy else self._held
        if which in ("pair", "primal"):
            args = (*_bound_to(h), *args)
            f = h.__wrapped__ if which == "pair" else _custom_gradient(h)._primal
        else:
            f = h if which == "h" else reference
        return f(*args, **dict(zip(names, kwargs, strict=True)))

    def _outputs(self, which: str, *xs: Any) -> list[jax.Array]:
        """Return the leaves of the value that have a derivative."""
        y = self._value(which, *xs)
        y = checked_outputs(self._held[0], y[0] if which == "pair" else y)
        return [leaf for leaf in map(jnp.asarray, jax.tree.leaves(y)) if spec(leaf).differentiable]

    def primal_and_value(self, xs: Sequence[Any]) -> tuple[Any, Any]:
        return self._value("primal", *xs), self._value("pair", *xs)[0]

    def _captured(self, ours: Any) -> list[tuple[str, Any]]:
        """Return the arrays that a function holds, by name."""
        held, h = {}, self._held[0]
        for instance in _bound_to(h):
            held |= {f"self.{k}": v for k, v in getattr(instance, "__dict__", {}).items()}
        with contextlib.suppress(TypeError):  # not a function of Python
            found = inspect.getclosurevars(ours._f)
            held |= found.nonlocals
            arrays_in = {k: list(map(_is_jax, jax.tree.leaves(v))) for k, v in found.globals.items()}
            self.missed += [name for name, found in arrays_in.items() if any(found)]
        paths = tree_flatten_with_path(held)[0]
        names = {id(w): path[0].key + keystr(path[1:]) for path, w in paths}
        try:
            _, arrays = _copies([h], _is_jax)
        except OpaqueError:
            arrays = [w for _, w in paths]  # each is then found to be opaque
        known = set(map(id, self._leaves))
        arrays = [w for w in arrays if id(w) not in known]
        return [(names.get(id(w), f"captured[{i}]"), w) for i, w in enumerate(arrays)]

    def _add_weights(self, weights: Sequence[tuple[str, Any]], declared: bool) -> None:
        """Differentiate in what is closed over too, where the value is seen to follow it."""
        functions: Any = [f for f in (self.value, self.plain) if f is not None]
        before, added = [f(*self.xs) for f in functions], {}
        for name, w in weights:
            follows = False
            with contextlib.suppress(Exception):  # it cannot be copied, or is out of its domain
                self._copy, _ = _copies(self._held, lambda v, w=w: v is w)
                after = [f(*self.xs, jnp.asarray(w) * 1.25 + 0.25) for f in functions]
                pairs = zip(before, after, strict=True)
                follows = not any(all(map(np.array_equal, *ys)) for ys in pairs)
            if follows:
                added.setdefault(id(w), name)
            elif declared:
                self.missed.append(name)
        self._copy, xs = _copies(self._held, lambda v: id(v) in added)
        self.xs, self.names = self.xs + xs, self.names + [added[id(w)] for w in xs]


def _copies(values: Sequence[Any], takes: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Return what copies functions around other weights, and these; raise if Python cannot."""
    skeleton = Skeleton(takes)
    for value in values:
        skeleton.add(value)
    weights = skeleton.tracers
    skeleton.finish()
    return skeleton, weights


def _bound_to(h: Any) -> tuple[Any, ...]:
    return (h.__self__,) if isinstance(h, types.MethodType) else ()


def _custom_gradient(h: Any) -> Any:
    f = getattr(h, "__func__", h)
    found = getattr(f, "_custom_gradient", f)
    return found if isinstance(found, CustomGradient) else None


def _is_jax(value: Any) -> bool:
    return isinstance(value, jax.Array)
