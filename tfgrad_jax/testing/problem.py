"""What is checked, as functions of arrays alone: of arguments and of weights.

`Problem` is made first, and looks for the weights that can be replaced. Each evaluation then goes
through `Problem._tree`, which puts new arrays among the arguments and in the places of the weights.
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
from jax.tree_util import tree_flatten, tree_unflatten

from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.grad_fn import NeedsValuesError, accepts_variables
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._frontend.structure import is_array, spec, split

from .weights import places, replaced, weights


class Problem:
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    def __init__(
        self, h: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Any
    ) -> None:
        signature = Signature(h)
        self._bound = bound = signature.bind(h, args, kwargs)
        plain, bound_to, ours, rule = getattr(h, "__wrapped__", None), (), h, None
        if isinstance(h, types.MethodType):
            bound_to, ours = (h.__self__,), inspect.getattr_static(h.__self__, h.__name__, None)
            ours = getattr(ours, "__func__", ours)
            plain = plain and functools.partial(plain, *bound_to)
        with contextlib.suppress(Exception):  # not one of ours, if it returns no pair
            _, rule = self._call(plain, bound.inputs, bound.rest)
        plain = plain if callable(rule) else None
        ours = ours if isinstance(ours, CustomGradient) else None
        variables = ours and ours._variables
        declared = variables is not None and not isinstance(variables, str)
        listed = variables is None and rule is not None and accepts_variables(rule)
        asked = plain is None or listed or isinstance(variables, str)
        self._arrays = {k: v for k, v in bound.rest.items() if asked and _has_array(v)}
        values = (*bound.inputs, *self._arrays.values())
        names = (*signature.input_names(bound), *self._arrays)
        self._leaves, self._treedef = tree_flatten(values)
        paths = split(values, names)[-1].leaf_paths()
        self._moving = [i for i, x in enumerate(self._leaves) if _has_derivative(x)]
        self._weights: list[int] = []  # the ids of those that are replaced
        self._found: list[Any] = []  # where they are
        self.xs = [self._leaves[i] for i in self._moving]
        self.paths = [paths[i] for i in self._moving]
        undecorated = functools.partial(self._run, plain, True) if plain else None
        self.h = functools.partial(self._run, h, False)
        # For finite differences: what `primal` stands for. For plain autodiff: None if unknown.
        self.value: Callable[..., list[jax.Array]] = undecorated or self.h
        self.plain = functools.partial(self._run, reference, False) if reference else undecorated
        self.primal = None
        if ours and ours._primal:
            primal = functools.partial(ours._primal, *bound_to)
            self.primal = functools.partial(self._tree, primal, False)
            self.whole = functools.partial(self._tree, plain, True)
        self.missed: list[str] = []  # variables that are not checked
        if ours and (declared or listed):
            self._found = places([ours, *bound_to, reference])
            candidates = weights(self._found)
            for leaf in self._leaves:
                candidates.pop(id(leaf), None)
            if declared:
                variables = variables(*bound_to) if callable(variables) else variables
                names = split((variables,), ("variables",))[-1].leaf_paths()
                leaves = zip(names, jax.tree.leaves(variables), strict=True)
                candidates = {id(w): (p, w) for p, w in leaves if _has_array(w)}
            for path, w in candidates.values():
                self._add_weight(path, w, declared)
            try:
                jax.vjp(self.h, *self.xs)
            except NeedsValuesError:
                self._leave_weights()
            except Exception:  # the check will report it
                pass

    def _add_weight(self, path: str, w: Any, declared: bool) -> None:
        """Differentiate with respect to what is closed over, if the value is seen to follow it."""
        functions = [f for f in (self.value, self.plain) if f is not None]
        before = [f(*self.xs) for f in functions]
        self._weights.append(id(w))
        after = [f(*self.xs, jnp.asarray(w) * 1.25 + 0.25) for f in functions]
        if any(all(map(np.array_equal, *ys)) for ys in zip(before, after, strict=True)):
            self._weights.pop()
            if declared:
                self.missed.append(path)
        else:
            self.xs, self.paths = [*self.xs, w], [*self.paths, path]

    def _leave_weights(self) -> None:
        count = len(self.xs) - len(self._weights)
        self.missed += self.paths[count:]
        self.xs, self.paths, self._weights = self.xs[:count], self.paths[:count], []

    def _call(self, f: Any, inputs: Sequence[Any], rest: Mapping[str, Any]) -> Any:
        split_at = len(inputs) - len(self._bound.named)
        named = dict(zip(self._bound.named, inputs[split_at:], strict=True))
        return f(*inputs[:split_at], **named, **rest)

    def _tree(self, f: Any, pair: bool, *xs: Any) -> Any:
        """Return the value on other arrays."""
        leaves = list(self._leaves)
        for i, x in zip(self._moving, xs, strict=False):
            leaves[i] = x
        values = tree_unflatten(self._treedef, leaves)
        inputs, arrays = values[: len(self._bound.inputs)], values[len(self._bound.inputs) :]
        rest = {**self._bound.rest, **dict(zip(self._arrays, arrays, strict=True))}
        with self.at(xs):
            y = self._call(f, inputs, rest)
        return y[0] if pair else y

    def at(self, xs: Sequence[Any]) -> Any:
        """Hold the weights at a point, where a rule may read them long after the function ran."""
        weights = zip(self._weights, xs[len(self._moving) :], strict=True)
        return replaced(self._found if self._weights else (), dict(weights))

    def _run(self, f: Any, pair: bool, *xs: Any) -> list[jax.Array]:
        """Return the leaves of the value that have a derivative."""
        leaves = map(jnp.asarray, jax.tree.leaves(self._tree(f, pair, *xs)))
        return [leaf for leaf in leaves if spec(leaf).differentiable]


def _has_derivative(leaf: Any) -> bool:
    """Return whether a leaf of the arguments can be differentiated."""
    if isinstance(leaf, bool | int):
        return False
    return (is_array(leaf) or isinstance(leaf, float | complex)) and spec(leaf).differentiable


def _has_array(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(v, jax.Array | np.ndarray) and spec(v).differentiable for v in leaves)
