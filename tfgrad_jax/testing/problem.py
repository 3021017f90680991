"""What is checked, as functions of arrays alone: of arguments and of weights.

`Problem` is made first, and looks for the weights that can be replaced. Each evaluation then goes
through `_tree`, which puts new arrays among the arguments and in the places of the weights.
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
from jax.tree_util import keystr, tree_flatten, tree_unflatten

from tfgrad_jax._closure.residuals import is_traced
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.grad_fn import NeedsValuesError, accepts_variables, checked_outputs
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._frontend.structure import is_array, spec, split
from tfgrad_jax._source import describe

from .weights import flat, places, replaced


class Problem:
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    def __init__(
        self, h: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Any
    ) -> None:
        signature = Signature(h)
        bound = signature.bind(h, args, kwargs)
        if is_traced(jax.tree.leaves((args, kwargs))):
            raise TypeError(
                f"check_gradient compares values, but {describe(h)} got an argument that JAX is "
                "tracing. Call it outside of `jax.jit`, `jax.grad` and the like: it looks at these "
                "itself."
            )
        plain: Any = getattr(h, "__wrapped__", None)
        bound_to, ours, rule = (), h, None
        if isinstance(h, types.MethodType):
            bound_to, ours = (h.__self__,), inspect.getattr_static(h.__self__, h.__name__, None)
            ours = getattr(ours, "__func__", ours)
            plain = plain and functools.partial(plain, *bound_to)
        with contextlib.suppress(Exception):  # not one of ours, if it returns no pair
            _, rule = plain(*args, **kwargs)
        plain = plain if callable(rule) else None
        ours = ours if isinstance(ours, CustomGradient) else None
        variables = ours and ours._variables
        listed = variables is None and rule is not None and accepts_variables(rule)
        asked = plain is None or listed or isinstance(variables, str)
        arrays = {k: v for k, v in bound.rest.items() if asked and any(_arrays(v))}
        self._named = (*bound.named, *arrays)  # the last of the inputs
        self._rest = {k: v for k, v in bound.rest.items() if k not in arrays}
        inputs = (*bound.inputs, *arrays.values())
        self._leaves, self._treedef = tree_flatten(inputs)
        names = split(inputs, (*signature.input_names(bound), *arrays))[-1].leaf_paths()
        self._moving = [i for i, x in enumerate(self._leaves) if _has_derivative(x)]
        self.xs: list[Any] = [self._leaves[i] for i in self._moving]
        self.paths: list[str] = [names[i] for i in self._moving]
        self._weights: list[int] = []  # the ids of those that are replaced
        self._places: Any = places([ours, *bound_to, reference]) if ours else ()
        undecorated = functools.partial(self._run, plain, True) if plain else None
        self.h: Callable[..., list[jax.Array]] = functools.partial(self._run, h, False)
        # For finite differences: what `primal` stands for. For plain autodiff: None if unknown.
        self.value: Callable[..., list[jax.Array]] = undecorated or self.h
        self.plain: Callable[..., list[jax.Array]] | None = (
            functools.partial(self._run, reference, False) if reference else undecorated
        )
        self.primal: Any = ours and ours._primal and functools.partial(ours._primal, *bound_to)
        # The value by `primal`, and that which it stands for.
        values = (self.primal, False), (plain, True)
        self.pair: list[Callable[..., Any]] = [
            functools.partial(self._tree, *value) for value in values
        ]
        self.missed: list[str] = []  # variables that are not checked
        if listed:
            found = [(n + keystr(p), v) for *_, n, c in self._places for p, v in flat(c)]
            held = [(p, v) for p, v in found if isinstance(v, jax.Array)]
            known = set(map(id, self._leaves))
            self._add_weights([(p, w) for p, w in held[::-1] if id(w) not in known], False)
        elif ours and variables is not None and not asked:
            variables = variables(*bound_to) if callable(variables) else variables
            paths = split((variables,), ("variables",))[-1].leaf_paths()
            self._add_weights(zip(paths, jax.tree.leaves(variables), strict=True), True)
        ys = self.value(*self.xs) if self.xs else []
        if not ys:
            raise ValueError(
                f"check_gradient found nothing to differentiate in {describe(h)}: there is no "
                f"floating array among its {'outputs' if self.xs else 'arguments'}. Pass floats, "
                "not integers; of a function of integers, or to them, there is no gradient."
            )
        if reference and self.plain:
            Signature(reference).bind(reference, args, kwargs)
            got, wanted = ([spec(y).shape for y in f] for f in (self.plain(*self.xs), ys))
            if got != wanted:
                raise ValueError(
                    f"The reference {describe(reference)} of check_gradient must return arrays of "
                    f"the shapes that {describe(h)} returns, {wanted}, but returned {got}."
                )

    def _add_weights(self, weights: Any, declared: bool) -> None:
        """Differentiate in what is closed over too, where the value is seen to follow it."""
        functions = [f for f in (self.value, self.plain) if f is not None]
        before = [f(*self.xs) for f in functions]
        added: list[Any] = []
        for key, (path, w) in {id(w): (p, w) for p, w in weights if any(_arrays(w))}.items():
            self._weights, after = [key], before
            with contextlib.suppress(Exception):  # outside of its domain
                after = [f(*self.xs, jnp.asarray(w) * 1.25 + 0.25) for f in functions]
            if not any(all(map(np.array_equal, *ys)) for ys in zip(before, after, strict=True)):
                added.append((key, path, w))
            elif declared:
                self.missed.append(path)
        self._weights = [key for key, *_ in added]
        xs, paths = [*self.xs, *(w for *_, w in added)], [p for _, p, _ in added]
        try:
            jax.vjp(self.h, *xs)
        except NeedsValuesError:  # it branches on values: leave them as they are
            self._weights, self.missed = [], self.missed + paths
            return
        except Exception:  # the check will report it
            pass
        self.xs = xs
        for path in paths:  # two closures may use one name
            self.paths.append(path + "'" * self.paths.count(path))

    def _tree(self, f: Any, pair: bool, *xs: Any) -> Any:
        """Return the value on other arrays."""
        leaves = list(self._leaves)
        for i, x in zip(self._moving, xs, strict=False):
            leaves[i] = x
        values = tree_unflatten(self._treedef, leaves)
        count = len(values) - len(self._named)
        named = dict(zip(self._named, values[count:], strict=True))
        with self.at(xs):
            y = f(*values[:count], **named, **self._rest)
        return y[0] if pair else y

    def at(self, xs: Sequence[Any]) -> Any:
        """Hold the weights at a point, where a rule may read them long after the function ran."""
        weights = zip(self._weights, xs[len(self._moving) :], strict=True)
        return replaced(self._places if self._weights else (), dict(weights))

    def _run(self, f: Any, pair: bool, *xs: Any) -> list[jax.Array]:
        """Return the leaves of the value that have a derivative."""
        y = checked_outputs(f, self._tree(f, pair, *xs))
        leaves = map(jnp.asarray, jax.tree.leaves(y))
        return [leaf for leaf in leaves if spec(leaf).differentiable]


def _has_derivative(leaf: Any) -> bool:
    number = isinstance(leaf, float | complex)
    return (number or (is_array(leaf) and not isinstance(leaf, bool))) and spec(leaf).differentiable


def _arrays(value: Any) -> list[bool]:
    leaves = jax.tree.leaves(value)
    return [isinstance(v, jax.Array | np.ndarray) and spec(v).differentiable for v in leaves]
