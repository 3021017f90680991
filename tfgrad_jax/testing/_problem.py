"""`Problem`: the function to check and what it decorates, as functions of arrays.

It calls them on other arguments, and copies of them around other weights: it writes to nothing that
the user holds. A weight is an array that the function, or an object among its arguments, holds. Of
those that the value depends on, some are found but not replaced; these are `unchecked`.
"""

import contextlib
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves, tree_flatten, tree_leaves, tree_unflatten

from tfgrad_jax._frontend.grad_fn import accepts_variables, checked_outputs
from tfgrad_jax._frontend.signature import Signature
from tfgrad_jax._frontend.structure import split
from tfgrad_jax._jax.jaxpr import reads
from tfgrad_jax._jax.types import is_array, spec
from tfgrad_jax._messages import errors, tool_errors
from tfgrad_jax._messages.text import type_name
from tfgrad_jax.testing._arrays import Held, called, decorated


class Problem:
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    def __init__(self, h: Any, args: Any, kwargs: Mapping[str, Any], reference: Any) -> None:
        h, args = _method(called(h), args)
        owner, signature = decorated(h), Signature(h)
        try:
            bound = signature.bind(h, args, kwargs)
        except TypeError:
            if owner is not None:
                raise
            # A wrapper may show the signature of what it wraps, of a method with `self`.
            signature = Signature(h if signature.names[:1] == ("self",) else _any, bound=1)
            bound = signature.bind(h, args, kwargs)
        self._bound = bound
        inputs = (*bound.inputs, *bound.rest.values())
        self._leaves, self._treedef = tree_flatten(inputs)
        paths = split(inputs, (*signature.input_names(bound), *bound.rest))[-1].leaf_paths()
        if any(isinstance(v, jax.core.Tracer) for v in self._leaves):
            raise tool_errors.checks_values(h)
        # What may hold weights: the functions, then the objects among the arguments.
        self._objects = [i for i, v in enumerate(self._leaves) if not is_array(v)]
        self._roots = [("", h), ("", reference)]
        self._roots += [(paths[i], self._leaves[i]) for i in self._objects]
        self._differentiated, self._weights, rule = [], [], None
        with contextlib.suppress(Exception):  # not one of ours, if it returns no pair
            _, rule = self.call("pair")
        variables = owner and owner._declaration.variables
        listed = variables is None and callable(rule) and accepts_variables(rule)
        asked = not callable(rule) or listed or isinstance(variables, str)
        count = len(tree_leaves(bound.inputs))  # by keyword, numbers are settings
        for i, v in enumerate(self._leaves):
            counts = is_array(v) and (asked or i < count)
            counts |= isinstance(v, float | complex) and i < count
            self._differentiated += [i] * (counts and spec(v).differentiable)
        self.xs, self.names = (
            [every[i] for i in self._differentiated] for every in (self._leaves, paths)
        )
        self.h: Any = functools.partial(self._outputs, "h")
        # For finite differences: what `primal` stands for. For plain autodiff: None if unknown.
        undecorated = functools.partial(self._outputs, "pair") if callable(rule) else None
        self.value: Any = undecorated or self.h
        self.plain = functools.partial(self._outputs, "reference") if reference else undecorated
        self.has_primal = owner is not None and owner._declaration.primal is not None
        self.arguments = len(self.xs)  # the weights come after these
        self.unchecked: list[str] = []
        self.without: list[str] = []  # weights that have no gradient: an error, not a number
        if owner is None or listed:
            self._add_weights(None)
        elif variables is not None:  # "autodiff" holds none
            if callable(variables) and all_leaves([variables]):
                variables = variables(*_bound_to(h))
            self._add_weights({id(v) for v in tree_leaves(variables)})
        for i, default in bound.omitted.items() if owner is not None else ():
            arrays = [v for v in tree_leaves(default) if isinstance(v, jax.Array)]
            if any(spec(v).differentiable and all(v is not x for x in self.xs) for v in arrays):
                self.unchecked.append(f"{signature.names[i]} ({_DEFAULT})")
        ys = self.value(*self.xs) if self.xs else []
        if not ys:
            raise tool_errors.nothing_to_check(h, "outputs" if self.xs else "arguments")
        got, wanted = ([y.shape for y in f] for f in ((self.plain or self.value)(*self.xs), ys))
        if got != wanted:
            raise tool_errors.bad_reference(reference, h, wanted, got)

    def call(self, which: str, *xs: Any) -> Any:
        """Call `h`, what it decorates ("pair"), its `primal`, or the reference on other arrays."""
        leaves, n = list(self._leaves), len(self._differentiated)
        h, reference = (value for _, value in self._roots[:2])
        if self._weights:
            arrays = dict(enumerate(self._held.arrays))
            arrays |= zip(self._weights, xs[n:], strict=True)
            h, reference, *objects = self._held(arrays.values())
            for i, copied in zip(self._objects, objects, strict=True):
                leaves[i] = copied
        for i, x in zip(self._differentiated, xs, strict=False):
            leaves[i] = x
        values = tree_unflatten(self._treedef, leaves)
        names = (*self._bound.named, *self._bound.rest)
        args, kwargs = values[: len(values) - len(names)], values[len(values) - len(names) :]
        f = reference if which == "reference" else h
        if which in ("pair", "primal"):
            args = (*_bound_to(h), *args)
            owner: Any = decorated(h)
            f = h.__wrapped__ if which == "pair" else owner._declaration.primal
        return f(*args, **dict(zip(names, kwargs, strict=True)))

    def _outputs(self, which: str, *xs: Any) -> list[jax.Array]:
        """Return the leaves of the value that have a derivative."""
        y = self.call(which, *xs)
        y = checked_outputs(self._roots[0][1], y[0] if which == "pair" else y)
        return [leaf for leaf in map(jnp.asarray, tree_leaves(y)) if spec(leaf).differentiable]

    def _add_weights(self, declared: set[int] | None) -> None:
        """Differentiate in the weights too: in those declared, or those that the value reads."""
        self._held = held = Held(self._roots)
        wanted = self._weights = [
            i
            for i, w in enumerate(held.arrays)
            if spec(w).differentiable and (declared is None or id(w) in declared)
        ]
        read, missed = self._reads(self.value)
        if self._roots[1][1] is not None:
            also, others = self._reads(self.plain)
            missed |= others
            for i in read - also:
                missed[id(held.arrays[i])] = held.arrays[i], "the reference does not read it"
        if declared is not None:
            missed = {i: found for i, found in missed.items() if i in declared}
        # A declared variable that the value ignores has a gradient, too: zero.
        candidates = wanted if declared is not None else [i for i in wanted if i in read]
        weights = [i for i in candidates if id(held.arrays[i]) not in missed]
        if self._has_gradients(weights):
            with_gradient = weights
        else:
            with_gradient = [i for i in weights if self._has_gradients([i])]
        self._weights = with_gradient
        self.without = [held.names[i] for i in weights if i not in with_gradient]
        self.xs += [held.arrays[i] for i in with_gradient]
        self.names += [held.names[i] for i in with_gradient]
        known = {id(v): (name, why) for name, v, why in held.constants}
        replaced = zip(held.arrays, held.names, held.whys, strict=True)
        known |= {id(v): (name, why) for v, name, why in replaced}
        for i, (v, reason) in missed.items():
            name, why = known.get(i, (f"a {type_name(v)}", "found in no object"))
            self.unchecked.append(f"{name} ({why or reason})")

    def _has_gradients(self, weights: list[int]) -> bool:
        """Return whether `h` can be differentiated in the weights."""
        self._weights = weights
        try:
            jax.vjp(self.h, *self.xs, *(self._held.arrays[i] for i in weights))
        except Exception as error:  # of any other type, the checks report it
            return not errors.is_of_captured(error)
        return True

    def _reads(self, f: Any) -> tuple[set[int], dict[int, tuple[Any, str]]]:
        """Return on which weights the value of `f` depends, and on which other arrays.

        The second is a dict from the id to the array and why it cannot be replaced: something else
        holds it as well.
        """
        weights = self._weights
        xs, n = [*self.xs, *(self._held.arrays[i] for i in weights)], len(self.xs)
        try:
            closed = jax.make_jaxpr(lambda *xs: f(*xs))(*xs)
        except Exception:  # most often, it branches on values
            changing = {i for k, i in enumerate(weights) if self._changes(f, xs, n + k)}
            fixed = [self._held.arrays[i] for i in weights if i not in changing]
            others = {id(v): (v, "not seen to change the value") for v in fixed}
            return changing, others | {id(v): (v, _FIXED) for _, v, _ in self._held.constants}
        every = reads(closed)
        operands = {k for positions, _ in every for k in positions}
        arrays = [v for _, held in every for v in held if spec(v).differentiable]
        read = {i for k, i in enumerate(weights) if n + k in operands}
        return read, {id(v): (v, _FIXED) for v in arrays}

    def _changes(self, f: Any, xs: Sequence[Any], k: int) -> bool:
        """Return whether another value of an operand is seen to change that of `f`."""
        changed = [x * 1.25 + 0.25 if i == k else x for i, x in enumerate(xs)]
        with contextlib.suppress(Exception):  # outside of its domain
            return not all(map(np.array_equal, f(*xs), f(*changed)))
        return False


def _any(self: Any, *args: Any, **kwargs: Any) -> None: ...


_FIXED = "held where it is not replaced"
_DEFAULT = "the call leaves it out: pass it"


def _method(h: Any, args: Any) -> tuple[Any, Any]:
    """Bind the instance that a function of a class is called with, as the call itself does."""
    owner = decorated(h)
    if owner is h and args and Signature(h).names[:1] == ("self",):
        return h.__get__(args[0]), args[1:]
    return h, args


def _bound_to(h: Any) -> tuple[Any, ...]:
    return (h.__self__,) if isinstance(h, types.MethodType) else ()
