"""What is checked, as functions of arrays alone: of arguments and of weights.

`Problem` is made first. It names the leaves of the arguments, and looks for the weights that the
function follows where it is copied around others (`_weights`). Each evaluation then goes through
`_call`, on new arrays and on such a copy: what the user holds is never written to.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfgrad_jax import _errors
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.grad_fn import NeedsValuesError, accepts_variables, checked_outputs
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._frontend.structure import is_array, spec
from tfgrad_jax._source import describe

from .vectors import OfArrays
from .weights import arrays_in, copies, scoped


class Problem:
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    def __init__(
        self, h: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Any
    ) -> None:
        self._copies: Any = None
        self._leaves, self._treedef = tree_flatten((args, dict(kwargs)))
        names, by_keyword = self._names(h)
        if any(isinstance(v, jax.core.Tracer) for v in self._leaves):
            raise TypeError(
                f"check_gradient compares values, but {describe(h)} got an argument that JAX is "
                "tracing. Call it outside of `jax.jit`, `jax.grad` and the like: it looks at these "
                "itself."
            )
        ours, rule = _custom_gradient(h), None
        self._held = h, reference
        if ours is not None and (new := scoped(ours)) is not ours:
            self._held = new.__get__(*_bound_to(h)) if _bound_to(h) else new, reference
        with contextlib.suppress(Exception):  # not one of ours, if it returns no pair
            _, rule = h.__wrapped__(*_bound_to(h), *args, **kwargs)
        variables = ours and ours._variables
        listed = variables is None and callable(rule) and accepts_variables(rule)
        asked = not callable(rule) or listed or isinstance(variables, str)
        self._moving = [
            i
            for i, v in ((i, self._leaves[i]) for i in names)
            if _has_derivative(v) and (i not in by_keyword or (asked and is_array(v)))
        ]
        self.xs: list[Any] = [self._leaves[i] for i in self._moving]
        self.names = [names[i] for i in self._moving]
        self.h: OfArrays = self._function(lambda h, _: h)
        undecorated = self._function(lambda h, _: _of_value(h))
        # For finite differences: what `primal` stands for. For plain autodiff: None if unknown.
        self.value = undecorated if callable(rule) else self.h
        self.plain = undecorated if callable(rule) else None
        if reference:
            self.plain = self._function(lambda _, reference: reference)
        self.primal = ours is not None and ours._primal is not None
        self.missed: list[str] = []  # variables that are not checked
        if listed:
            roots = ("", self._held[0]), ("", getattr(self._held[0], "__wrapped__", None))
            known = set(map(id, self._leaves))
            found = [(name, w) for name, w in arrays_in(roots) if id(w) not in known]
            self._add_weights(found, False)
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
        if reference and self.plain:
            Signature(reference).bind(reference, args, kwargs)
            got, wanted = ([y.shape for y in f] for f in (self.plain(*self.xs), ys))
            if got != wanted:
                raise ValueError(
                    f"The reference {describe(reference)} of check_gradient must return arrays of "
                    f"the shapes that {describe(h)} returns, {wanted}, but returned {got}."
                )

    def _names(self, h: Any) -> tuple[dict[int, str], set[int]]:
        """Return the names of the leaves, by position, and which are passed by keyword alone."""
        args, kwargs = tree_unflatten(self._treedef, range(len(self._leaves)))
        signature, names, by_keyword = Signature(h).of_value, {}, set()
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise _errors.bad_call(h, signature, error) from None
        for name, value in bound.items():
            kind = signature.parameters[name].kind
            for path, i in tree_flatten_with_path(value)[0]:
                inside = kind is kind.VAR_KEYWORD
                names[i] = path[0].key + keystr(path[1:]) if inside else name + keystr(path)
                if inside or kind is kind.KEYWORD_ONLY:
                    by_keyword.add(i)
        return names, by_keyword

    def values(self, xs: Sequence[Any]) -> tuple[Any, Any]:
        """Return the value by `primal`, and the one that it stands for."""
        return self._call(lambda h, _: _primal(h), xs), self._call(lambda h, _: _of_value(h), xs)

    def _call(self, pick: Callable[[Any, Any], Any], xs: Sequence[Any]) -> Any:
        """Call a function that `pick` finds, on other arrays and other weights."""
        leaves, n = list(self._leaves), len(self._moving)
        for i, x in zip(self._moving, xs, strict=False):
            leaves[i] = x
        args, kwargs = tree_unflatten(self._treedef, leaves)
        held = self._copies(xs[n:]) if self._copies else self._held
        return pick(*held)(*args, **kwargs)

    def _function(self, pick: Callable[[Any, Any], Any]) -> OfArrays:
        """Return the leaves of the value that have a derivative, as a function of arrays."""

        def f(*xs: Any) -> list[jax.Array]:
            y = checked_outputs(pick(*self._held), self._call(pick, xs))
            leaves = map(jnp.asarray, jax.tree.leaves(y))
            return [leaf for leaf in leaves if spec(leaf).differentiable]

        return f

    def _add_weights(self, weights: Sequence[tuple[str, Any]], declared: bool) -> None:
        """Differentiate in what is closed over too, where the value is seen to follow it."""
        functions = [f for f in (self.value, self.plain) if f is not None]
        before, added = [f(*self.xs) for f in functions], {}
        for name, w in weights:
            if id(w) in added or not (is_array(w) and spec(w).differentiable):
                continue
            after, follows = before, not declared  # or else it is reported
            try:
                self._copies = copies(self._held, [w])
                after = [f(*self.xs, jnp.asarray(w) * 1.25 + 0.25) for f in functions]
            except Exception:  # it cannot be copied, or is outside of its domain
                follows = False
            if not any(all(map(np.array_equal, *ys)) for ys in zip(before, after, strict=True)):
                added[id(w)] = name, w
            elif not follows and name not in self.missed:
                self.missed.append(name)
        xs = [w for _, w in added.values()]
        self._copies = copies(self._held, xs) if xs else None
        try:
            jax.vjp(self.h, *self.xs, *xs)
        except NeedsValuesError:  # it branches on values: leave them as they are
            self._copies, self.missed = None, self.missed + [name for name, _ in added.values()]
            return
        except Exception:  # the check will report it
            pass
        self.xs += xs
        for name, _ in added.values():  # two closures may use one name
            self.names.append(name + "'" * self.names.count(name))


def _bound_to(h: Any) -> tuple[Any, ...]:
    return (h.__self__,) if isinstance(h, types.MethodType) else ()


def _custom_gradient(h: Any) -> CustomGradient[..., Any] | None:
    f = getattr(h, "__func__", h)
    found = getattr(f, "_custom_gradient", f)
    return found if isinstance(found, CustomGradient) else None


def _of_value(h: Any) -> Any:
    """Return what returns the value of the undecorated function, without the rule."""
    return lambda *args, **kwargs: h.__wrapped__(*_bound_to(h), *args, **kwargs)[0]


def _primal(h: Any) -> Any:
    return functools.partial(_custom_gradient(h)._primal, *_bound_to(h))


def _has_derivative(leaf: Any) -> bool:
    number = isinstance(leaf, float | complex)
    return (number or (is_array(leaf) and not isinstance(leaf, bool))) and spec(leaf).differentiable
