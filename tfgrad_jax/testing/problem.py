"""What is checked, as functions of arrays alone: of arguments and of weights.

`Problem` is made first. Each evaluation goes through `_value`, on other arrays, and on a copy of
the function around other weights: nothing is written to what the user holds.
"""

import contextlib
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfgrad_jax import _errors
from tfgrad_jax._arrays import Held
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.grad_fn import accepts_variables, checked_outputs
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._frontend.structure import split
from tfgrad_jax._types import is_array, spec


class Problem:
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    def __init__(self, h: Any, args: Any, kwargs: Mapping[str, Any], reference: Any) -> None:
        signature = Signature(h)
        self._bound = bound = signature.bind(h, args, kwargs)
        inputs = (*bound.inputs, *bound.rest.values())
        self._leaves, self._treedef = tree_flatten(inputs)
        paths = split(inputs, (*signature.input_names(bound), *bound.rest))[-1].leaf_paths()
        if any(isinstance(v, jax.core.Tracer) for v in self._leaves):
            raise _errors.checks_values(h)
        self._roots, self._moving, self._weights, rule = (h, reference), [], [], None
        with contextlib.suppress(Exception):  # not one of ours, if it returns no pair
            _, rule = self._value("pair")
        ours = _custom_gradient(h)
        variables = ours and ours._variables
        listed = variables is None and callable(rule) and accepts_variables(rule)
        asked = not callable(rule) or listed or isinstance(variables, str)
        count = len(jax.tree.leaves(bound.inputs))  # by keyword, numbers are settings
        for i, v in enumerate(self._leaves):
            moves = is_array(v) and (asked or i < count)
            moves |= isinstance(v, float | complex) and i < count
            self._moving += [i] * (moves and spec(v).differentiable)
        self.xs, self.names = ([every[i] for i in self._moving] for every in (self._leaves, paths))
        self.h: Any = functools.partial(self._outputs, "h")
        # For finite differences: what `primal` stands for. For plain autodiff: None if unknown.
        undecorated = functools.partial(self._outputs, "pair") if callable(rule) else None
        self.value: Any = undecorated or self.h
        self.plain = functools.partial(self._outputs, "reference") if reference else undecorated
        self.has_primal = ours is not None and ours._primal is not None
        self.missed: list[str] = []  # variables that are not checked
        if listed or (variables is not None and not asked):
            self._add_weights(variables, _bound_to(h))
        ys = self.value(*self.xs) if self.xs else []
        if not ys:
            raise _errors.nothing_to_check(h, "outputs" if self.xs else "arguments")
        got, wanted = ([y.shape for y in f] for f in ((self.plain or self.value)(*self.xs), ys))
        if got != wanted:
            raise _errors.bad_reference(reference, h, wanted, got)

    def _value(self, which: str, *xs: Any) -> Any:
        """Call `h`, what it decorates ("pair"), its `primal`, or the reference on other arrays."""
        leaves, n = dict(enumerate(self._leaves)), len(self._moving)
        leaves |= zip(self._moving, xs, strict=False)
        values = tree_unflatten(self._treedef, leaves.values())
        names = (*self._bound.named, *self._bound.rest)
        args, kwargs = values[: len(values) - len(names)], values[len(values) - len(names) :]
        h, reference = self._roots
        if self._weights:
            arrays = dict(enumerate(self._held.arrays))
            arrays |= zip(self._weights, xs[n:], strict=True)
            *_, h, reference = self._held(arrays.values())
        f = reference if which == "reference" else h
        if which in ("pair", "primal"):
            args = (*_bound_to(h), *args)
            f = h.__wrapped__ if which == "pair" else _custom_gradient(h)._primal
        return f(*args, **dict(zip(names, kwargs, strict=True)))

    def _outputs(self, which: str, *xs: Any) -> list[jax.Array]:
        """Return the leaves of the value that have a derivative."""
        y = self._value(which, *xs)
        y = checked_outputs(self._roots[0], y[0] if which == "pair" else y)
        return [leaf for leaf in map(jnp.asarray, jax.tree.leaves(y)) if spec(leaf).differentiable]

    def primal_and_value(self, xs: Sequence[Any]) -> tuple[Any, Any]:
        return self._value("primal", *xs), self._value("pair", *xs)[0]

    def _add_weights(self, variables: Any, bound_to: tuple[Any, ...]) -> None:
        """Differentiate in what is closed over too, where the value is seen to follow it."""
        roots = [*(("self", v) for v in bound_to), *(("", v) for v in self._roots)]
        held, known = Held(roots), set(map(id, self._leaves))
        self._held, declared = held, variables is not None
        names = {id(w): name for name, w in zip(held.names, held.arrays, strict=True)}
        if declared:
            if callable(variables) and all_leaves([variables]):
                variables = variables(*bound_to)
            found = tree_flatten_with_path(variables)[0]
            names = {id(w): "variables" + keystr(path) for path, w in found}
        functions = [self.value, self.plain or self.value]
        before, weights = [f(*self.xs) for f in functions], []
        for i, w in enumerate(held.arrays):
            if id(w) in names and id(w) not in known and spec(w).differentiable:
                self._weights = [i]
                with contextlib.suppress(Exception):  # outside of its domain
                    after = [f(*self.xs, w * 1.25 + 0.25) for f in functions]
                    same = [all(map(np.array_equal, *ys)) for ys in zip(before, after, strict=True)]
                    weights += [i] * (not any(same))
        self._weights, xs = weights, [held.arrays[i] for i in weights]
        self.xs, self.names = self.xs + xs, self.names + [names.pop(id(w)) for w in xs]
        self.missed = list(names.values()) if declared else [name for name, _ in held.constants]


def _bound_to(h: Any) -> tuple[Any, ...]:
    return (h.__self__,) if isinstance(h, types.MethodType) else ()


def _custom_gradient(h: Any) -> Any:
    f = getattr(h, "__func__", h)
    found = getattr(f, "_custom_gradient", f)
    return found if isinstance(found, CustomGradient) else None
