"""`Problem`: the function to check and what it decorates, as functions of arrays.

`problem_of` binds the call, finds the arguments that have a derivative, and then the weights: the
arrays that the function, or an object among its arguments, holds. Other arrays are tried on copies,
so nothing that the user holds is written. Of the weights that the value depends on, some are found
but not replaced; these are `unchecked`.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef, all_leaves, tree_flatten, tree_leaves, tree_unflatten

from tfgrad_jax._closure.reach import Id
from tfgrad_jax._custom_gradient import CustomGradient
from tfgrad_jax._frontend.grad_fn import checked_outputs
from tfgrad_jax._frontend.signature import Bound, Signature, accepts_variables
from tfgrad_jax._frontend.structure import split
from tfgrad_jax._jax.jaxpr import reads
from tfgrad_jax._jax.types import AnyFunction, Leaf, LeafIndex, PyTree, is_array, spec
from tfgrad_jax._messages import errors, tool_errors
from tfgrad_jax._messages.text import type_name
from tfgrad_jax.testing._arrays import Held, called, decorated

# The decorated function, what it decorates (it returns a pair), its `primal`, or the reference.
Which: TypeAlias = Literal["h", "pair", "primal", "reference"]
OfArrays: TypeAlias = Callable[..., list[jax.Array]]
_Checked: TypeAlias = Any  # a function, a method or a layer, decorated or around what is
_WeightIndex: TypeAlias = int  # into the arrays of a `Held`
_Missed: TypeAlias = dict[Id, tuple[jax.Array, str]]  # an array, and why it is not replaced

_FIXED = "held where it is not replaced"
_DEFAULT = "the call leaves it out: pass it"


class Problem(NamedTuple):
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    xs: Sequence[Leaf]  # arguments, then weights
    names: Sequence[str]
    arguments: int  # how many of them are arguments
    call: Callable[..., PyTree]  # of a `Which` and arrays
    h: OfArrays
    value: OfArrays  # for finite differences: what `primal` stands for
    plain: OfArrays | None  # for plain autodiff; None: unknown
    has_primal: bool
    unchecked: Sequence[str]  # weights, and why they are not checked
    without: Sequence[str]  # weights that have no gradient: an error, not a number


def problem_of(
    h: _Checked,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    reference: AnyFunction | None,
) -> Problem:
    """Find what can be checked of a call; raise if there is nothing."""
    call = _bound(h, args, kwargs, reference)
    owner, rule = decorated(call.h), _rule(call)
    variables = owner and owner._declaration.variables
    listed = variables is None and callable(rule) and accepts_variables(rule)
    asks_all = not callable(rule) or listed or isinstance(variables, str)
    call = call._replace(arguments=_differentiated(call, asks_all))
    xs = [call.leaves[i] for i in call.arguments]
    value: Which = "pair" if callable(rule) else "h"
    plain: Which | None = "reference" if reference else "pair" if callable(rule) else None
    weights = _Weights(call, [], [])
    if owner is None or listed:
        weights = _weights(call, xs, value, None)
    elif variables is not None and not isinstance(variables, str):  # "autodiff" holds none
        weights = _weights(call, xs, value, _declared(variables, call.h))
    call = weights.call
    point = call.point(xs)
    problem = Problem(
        xs=point,
        names=call.names(),
        arguments=len(xs),
        call=call.run,
        h=call.outputs("h"),
        value=call.outputs(value),
        plain=plain and call.outputs(plain),
        has_primal=owner is not None and owner._declaration.primal is not None,
        unchecked=[*weights.unchecked, *_defaults(call, owner, point)],
        without=weights.without,
    )
    _require_outputs(problem, call)
    return problem


# --- the call -----------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call that can be made with other arrays, and on copies around other weights."""

    h: _Checked
    reference: AnyFunction | None
    bound: Bound
    leaves: Sequence[Leaf]
    treedef: PyTreeDef
    paths: Sequence[str]
    arguments: Sequence[LeafIndex] = ()  # which leaves the arrays replace
    held: Held | None = None  # what may hold weights: the functions, and the objects among `leaves`
    weights: Sequence[_WeightIndex] = ()  # which of its arrays the later arrays replace

    @property
    def objects(self) -> list[LeafIndex]:
        return [i for i, v in enumerate(self.leaves) if not is_array(v)]

    def point(self, xs: Sequence[Leaf]) -> list[Leaf]:
        """Return the arguments, followed by the weights as they are."""
        return [*xs, *(self.held.arrays[i] for i in self.weights if self.held)]

    def names(self) -> list[str]:
        """Return the names of the arguments and the weights."""
        of_weights = [self.held.names[i] for i in self.weights if self.held]
        return [*(self.paths[i] for i in self.arguments), *of_weights]

    def run(self, which: Which, *xs: Leaf) -> PyTree:
        leaves, n = list(self.leaves), len(self.arguments)
        h, reference = self.h, self.reference
        if self.held and self.weights:
            arrays = dict(enumerate(self.held.arrays))
            arrays |= zip(self.weights, xs[n:], strict=True)
            h, reference, *objects = self.held(arrays.values())
            for i, copied in zip(self.objects, objects, strict=True):
                leaves[i] = copied
        for i, x in zip(self.arguments, xs, strict=False):
            leaves[i] = x
        values = tree_unflatten(self.treedef, leaves)
        names = (*self.bound.named, *self.bound.rest)
        end = len(values) - len(names)
        args, kwargs = values[:end], dict(zip(names, values[end:], strict=True))
        owner = decorated(h)
        primal = owner and owner._declaration.primal
        if which == "pair":
            return h.__wrapped__(*_bound_to(h), *args, **kwargs)
        if which == "primal" and primal is not None:
            return primal(*_bound_to(h), *args, **kwargs)
        f = reference if which == "reference" and reference is not None else h
        return f(*args, **kwargs)

    def outputs(self, which: Which) -> OfArrays:
        """Return the function of arrays that returns the leaves that have a derivative."""

        def of_arrays(*xs: Leaf) -> list[jax.Array]:
            y = self.run(which, *xs)
            y = checked_outputs(self.h, y[0] if which == "pair" else y)
            return [leaf for leaf in map(jnp.asarray, tree_leaves(y)) if spec(leaf).differentiable]

        return of_arrays


def _bound(
    h: _Checked,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    reference: AnyFunction | None,
) -> _Call:
    h, args = _method(called(h), args)
    signature = Signature(h)
    try:
        bound = signature.bind(h, args, kwargs)
    except TypeError:
        if decorated(h) is not None:
            raise
        # A wrapper may show the signature of what it wraps, of a method with `self`.
        signature = Signature(h if signature.names[:1] == ("self",) else _any, bound=1)
        bound = signature.bind(h, args, kwargs)
    inputs = (*bound.inputs, *bound.rest.values())
    leaves, treedef = tree_flatten(inputs)
    if any(isinstance(v, jax.core.Tracer) for v in leaves):
        raise tool_errors.checks_values(h)
    paths = split(inputs, (*signature.input_names(bound), *bound.rest))[-1].leaf_paths()
    return _Call(h, reference, bound, leaves, treedef, paths)


def _any(self: object, *args: PyTree, **kwargs: PyTree) -> None: ...


def _method(h: _Checked, args: tuple[PyTree, ...]) -> tuple[_Checked, tuple[PyTree, ...]]:
    """Bind the instance that a function of a class is called with, as the call itself does."""
    owner = decorated(h)
    if owner is h and args and Signature(h).names[:1] == ("self",):
        return h.__get__(args[0]), args[1:]
    return h, args


def _bound_to(h: _Checked) -> tuple[object, ...]:
    return (h.__self__,) if isinstance(h, types.MethodType) else ()


def _rule(call: _Call) -> AnyFunction | None:
    """Return the rule of the function, or of a plain one that returns a pair."""
    with contextlib.suppress(Exception):  # of any type: `h` is none of ours, and returns no pair
        _, rule = call.run("pair")
        return rule if callable(rule) else None
    return None


def _differentiated(call: _Call, asks_all: bool) -> list[LeafIndex]:
    """Return which leaves have a derivative to check.

    These are the inputs. If the rule is asked for all values (`asks_all`), arrays that are passed
    by keyword are checked, too; numbers among these are settings.
    """
    n_inputs = len(tree_leaves(call.bound.inputs))
    found = []
    for i, v in enumerate(call.leaves):
        is_checked = is_array(v) and (asks_all or i < n_inputs)
        is_checked |= isinstance(v, float | complex) and i < n_inputs
        if is_checked and spec(v).differentiable:
            found.append(i)
    return found


def _defaults(
    call: _Call, owner: CustomGradient[..., Any] | None, xs: Sequence[Leaf]
) -> Iterator[str]:
    """Yield which defaults the call leaves out, of those that a decorated function could get."""
    for i, default in call.bound.omitted.items() if owner is not None else ():
        arrays = [v for v in tree_leaves(default) if isinstance(v, jax.Array)]
        if any(spec(v).differentiable and all(v is not x for x in xs) for v in arrays):
            yield f"{Signature(call.h).names[i]} ({_DEFAULT})"


def _require_outputs(problem: Problem, call: _Call) -> None:
    xs = problem.xs
    ys = problem.value(*xs) if xs else []
    if not ys:
        raise tool_errors.nothing_to_check(call.h, "outputs" if xs else "arguments")
    got, wanted = ([y.shape for y in f] for f in ((problem.plain or problem.value)(*xs), ys))
    if got != wanted:
        raise tool_errors.bad_reference(call.reference, call.h, wanted, got)


# --- weights ------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    call: _Call  # on copies around the weights that are checked
    unchecked: Sequence[str]
    without: Sequence[str]


def _declared(variables: PyTree, h: _Checked) -> set[Id]:
    """Return the ids of the declared variables."""
    if callable(variables) and all_leaves([variables]):
        variables = variables(*_bound_to(h))
    return {id(v) for v in tree_leaves(variables)}


def _weights(call: _Call, xs: Sequence[Leaf], value: Which, declared: set[Id] | None) -> _Weights:
    """Find the weights to check: those declared, or those that the value reads."""
    objects = [(call.paths[i], call.leaves[i]) for i in call.objects]
    held = Held([("", call.h), ("", call.reference), *objects])
    wanted = [
        i
        for i, w in enumerate(held.arrays)
        if spec(w).differentiable and (declared is None or id(w) in declared)
    ]
    of_all = call._replace(held=held, weights=wanted)
    read, missed = _read_by(of_all, value, xs)
    if call.reference is not None:
        also, others = _read_by(of_all, "reference", xs)
        missed |= others
        for i in read - also:
            missed[id(held.arrays[i])] = held.arrays[i], "the reference does not read it"
    if declared is not None:
        missed = {i: found for i, found in missed.items() if i in declared}
    # A declared variable that the value ignores has a gradient, too: zero.
    possible = wanted if declared is not None else [i for i in wanted if i in read]
    possible = [i for i in possible if id(held.arrays[i]) not in missed]
    has = functools.partial(_has_gradients, of_all, xs)
    checked = possible if has(possible) else [i for i in possible if has([i])]
    without = [held.names[i] for i in possible if i not in checked]
    return _Weights(call._replace(held=held, weights=checked), _reasons(held, missed), without)


def _reasons(held: Held, missed: _Missed) -> list[str]:
    """Name the arrays that cannot be replaced, and say why."""
    why_of = {id(v): (name, why) for name, v, why in held.constants}
    replaced = zip(held.arrays, held.names, held.whys, strict=True)
    why_of |= {id(v): (name, why) for v, name, why in replaced}
    found = []
    for i, (v, reason) in missed.items():
        name, why = why_of.get(i, (f"a {type_name(v)}", "found in no object"))
        found.append(f"{name} ({why or reason})")
    return found


def _has_gradients(call: _Call, xs: Sequence[Leaf], weights: Sequence[_WeightIndex]) -> bool:
    """Return whether `h` can be differentiated in the weights."""
    call = call._replace(weights=weights)
    try:
        jax.vjp(call.outputs("h"), *call.point(xs))
    except Exception as error:  # of any other type, the checks report it
        return not errors.is_of_captured(error)
    return True


def _read_by(call: _Call, which: Which, xs: Sequence[Leaf]) -> tuple[set[_WeightIndex], _Missed]:
    """Return on which weights a value depends, and on which arrays that cannot be replaced."""
    f, held, point, n = call.outputs(which), cast("Held", call.held), call.point(xs), len(xs)
    try:
        closed = jax.make_jaxpr(lambda *xs: f(*xs))(*point)
    except Exception:  # most often, it branches on values
        changing = {i for k, i in enumerate(call.weights) if _changes(f, point, n + k)}
        fixed = [held.arrays[i] for i in call.weights if i not in changing]
        others = {id(v): (v, "not seen to change the value") for v in fixed}
        return changing, others | {id(v): (v, _FIXED) for _, v, _ in held.constants}
    every = reads(closed)
    operands = {k for positions, _ in every for k in positions}
    arrays = [v for _, constants in every for v in constants if spec(v).differentiable]
    read = {i for k, i in enumerate(call.weights) if n + k in operands}
    # The copy holds tracers. So an array that is a constant of its jaxpr is held by something that
    # was not copied, such as a global variable or an object with `__del__`. The same array may also
    # be a weight of the copy: differences by that one would miss what the value reads here.
    return read, {id(v): (v, _FIXED) for v in arrays}


def _changes(f: OfArrays, xs: Sequence[Leaf], k: int) -> bool:
    """Return whether another value of an operand is seen to change that of `f`."""
    changed = [x * 1.25 + 0.25 if i == k else x for i, x in enumerate(xs)]
    with contextlib.suppress(Exception):  # outside of its domain
        return not all(map(np.array_equal, f(*xs), f(*changed)))
    return False
