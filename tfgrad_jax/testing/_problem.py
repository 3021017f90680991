"""`Problem`: the function to check and what it decorates, as functions of arrays.

`problem_of` finds the arguments that have a derivative, and then the weights: the arrays that the
function, or an object among its arguments, holds. Of the weights that the value depends on, some
are found but not replaced; these are `unchecked`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.tree_util import all_leaves, tree_leaves

from tfgrad_jax._closure.names import Named
from tfgrad_jax._closure.reach import Id
from tfgrad_jax._frontend.grad_fn import checked_outputs
from tfgrad_jax._frontend.signature import accepts_variables
from tfgrad_jax._jax.jaxpr import reads
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree, has_gradient, is_array, is_traced
from tfgrad_jax._messages import tool_errors
from tfgrad_jax._messages.text import type_name
from tfgrad_jax._tools.call import (
    CallOnArrays,
    Checked,
    Made,
    UserCodeError,
    ValueIndex,
    attempt,
    decorated,
    differentiable,
)

OfArrays: TypeAlias = Callable[..., list[jax.Array]]
_FIXED = "held where it is not replaced"
_Of: TypeAlias = Callable[[Made], PyTree]  # what a call returns, in one of the ways to run it


class Problem(NamedTuple):
    """`h` and the undecorated function, as functions of the arrays that are checked."""

    call: CallOnArrays
    at: Sequence[ValueIndex]  # which of its values are checked: arguments, then weights
    has_pair: bool  # whether `h` decorates a function that returns its rule, too
    unchecked: Sequence[str] = ()  # weights, and why they are not checked
    without: Sequence[str] = ()  # weights that have no gradient: an error, not a number

    @property
    def xs(self) -> list[Leaf]:
        values = self.call.values
        return [values[i] for i in self.at]

    @property
    def names(self) -> list[str]:
        return [self.call.names[i] for i in self.at]

    @property
    def arguments(self) -> int:
        """How many of the arrays are arguments."""
        return sum(i < len(self.call.leaves) for i in self.at)

    def made(self, *xs: Leaf) -> Made:
        return self.call.made(dict(zip(self.at, xs, strict=True)))

    def outputs(self, of: _Of) -> OfArrays:
        """Return the function of arrays that returns the leaves that have a derivative."""
        return lambda *xs: differentiable(checked_outputs(self.call.h, of(self.made(*xs))))

    @property
    def h(self) -> OfArrays:
        return self.outputs(Made.value)

    @property
    def value(self) -> OfArrays:
        """For finite differences: what `primal` stands for."""
        return self.outputs(Made.plain if self.has_pair else Made.value)

    @property
    def plain(self) -> OfArrays | None:
        """For plain autodiff; None: unknown."""
        if self.call.reference is not None:
            return self.outputs(Made.of_reference)
        return self.outputs(Made.plain) if self.has_pair else None

    @property
    def has_primal(self) -> bool:
        owner = decorated(self.call.h)
        return owner is not None and owner._declaration.primal is not None


def problem_of(
    h: Checked,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    reference: AnyFunction | None,
) -> Problem:
    """Find what can be checked of a call; raise if there is nothing."""
    call = CallOnArrays.of(h, args, kwargs, reference)
    if is_traced(call.leaves):
        raise tool_errors.checks_values(call.h)
    rule, owner = _rule(call.made({})), decorated(call.h)
    has_pair = rule is not None
    variables = owner and owner._declaration.variables
    by_autodiff = isinstance(variables, str)
    # Whether there are gradients for what is closed over and not declared.
    is_asked = not has_pair or (variables is None and accepts_variables(rule))
    problem = Problem(call, _arguments(call, keywords=is_asked or by_autodiff), has_pair)
    if not by_autodiff and (owner is None or is_asked or variables is not None):
        problem = _with_weights(problem, _declared(call.made({}), variables))
    _require_outputs(problem)
    omitted = _omitted(problem) if owner is not None else []
    return problem._replace(unchecked=[*problem.unchecked, *omitted])


def _omitted(problem: Problem) -> list[str]:
    """Return which parameters the call leaves out that have arrays as defaults."""
    found = []
    checked = {id(x) for x in problem.xs}
    for name, default in problem.call.omitted.items():
        arrays = [v for v in tree_leaves(default) if isinstance(v, jax.Array)]
        if any(has_gradient(v) and id(v) not in checked for v in arrays):
            found.append(f"{name} (the call leaves it out: pass it)")
    return found


def _rule(made: Made) -> AnyFunction | None:
    """Return the rule of the function, or of a plain one that returns a pair."""
    with contextlib.suppress(UserCodeError, TypeError, ValueError):  # it returns no pair
        _, rule = attempt(made.undecorated)
        return rule if callable(rule) else None
    return None


def _arguments(call: CallOnArrays, keywords: bool) -> list[ValueIndex]:
    """Return which arguments have a derivative to check; numbers passed by keyword are settings."""
    numbers, n = (float, complex), call.inputs
    found = [i for i, v in enumerate(call.leaves) if is_array(v) and (i < n or keywords)]
    found += [i for i, v in enumerate(call.leaves[:n]) if isinstance(v, numbers)]
    return sorted(i for i in {*found} if has_gradient(call.leaves[i]))


def _require_outputs(problem: Problem) -> None:
    xs, h = problem.xs, problem.call.h
    ys = problem.value(*xs) if xs else []
    if not ys:
        raise tool_errors.nothing_to_check(h, "outputs" if xs else "arguments")
    got, wanted = ([y.shape for y in f] for f in ((problem.plain or problem.value)(*xs), ys))
    if got != wanted:
        raise tool_errors.bad_reference(problem.call.reference, h, wanted, got)


# --- weights ------------------------------------------------------------------------------------


def _declared(made: Made, variables: PyTree) -> set[Id] | None:
    """Return the ids of the declared variables; None if none are."""
    if callable(variables) and all_leaves([variables]):
        variables = variables(*made.bound_to)
    return None if variables is None else {id(v) for v in tree_leaves(variables)}


def _with_weights(problem: Problem, declared: set[Id] | None) -> Problem:
    """Add the weights to check: those declared, or those that the value reads."""
    call, held, n = problem.call, problem.call.held, len(problem.call.leaves)
    wanted = [
        i
        for i, w in enumerate(held.arrays, n)
        if has_gradient(w) and (declared is None or id(w) in declared)
    ]
    of_all = problem._replace(at=[*problem.at, *wanted])
    read, missed = _read_by(of_all, of_all.value)
    if call.reference is not None and of_all.plain is not None:
        also, others = _read_by(of_all, of_all.plain)
        missed |= others
        for i in read.intersection(wanted) - also:
            missed[id(call.values[i])] = Named("", call.values[i], "the reference does not read it")
    if declared is not None:
        missed = {key: one for key, one in missed.items() if key in declared}
        read.update(wanted)  # a declared variable that the value ignores has a gradient, too: zero
    possible = [i for i in wanted if i in read and id(call.values[i]) not in missed]
    refused = call.refused(possible, dict(enumerate(call.values)))
    checked = [i for i in possible if i not in refused]
    return problem._replace(
        at=[*problem.at, *checked],
        unchecked=[_reason(held.places.get(key, one), one) for key, one in missed.items()],
        without=[call.names[i] for i in refused],
    )


def _reason(place: Named, missed: Named) -> str:
    """Name an array that cannot be replaced, and say why."""
    name = place.name or f"a {type_name(place.value)}"
    return f"{name} ({place.why or missed.why or _FIXED})"


def _read_by(problem: Problem, f: OfArrays) -> tuple[set[ValueIndex], dict[Id, Named]]:
    """Return on which values a result depends, and on which arrays that cannot be replaced."""
    call, places = problem.call, problem.call.held.places
    try:
        closed = attempt(jax.make_jaxpr(lambda *xs: f(*xs)), *problem.xs)
    except UserCodeError:  # most often, it branches on values
        read = {i for k, i in enumerate(problem.at) if _changes(f, problem.xs, k)}
        fixed = [one for one in call.held.constants if has_gradient(one.value)]
        others = [call.values[i] for i in problem.at if i >= len(call.leaves) and i not in read]
        missed = [Named("", v, "not seen to change the value") for v in others]
        return read, {id(one.value): one for one in (*fixed, *missed)}
    every = reads(closed)
    read = {problem.at[k] for positions, _ in every for k in positions}
    # The copy holds tracers. So an array that is a constant of its jaxpr is held by something that
    # was not copied, such as a global variable or an object with `__del__`. The same array may also
    # be a weight of the copy: differences by that one would miss what the value reads here.
    arrays = [v for _, constants in every for v in constants if has_gradient(v)]
    why = ("found in no object", "")
    return read, {id(v): Named("", v, why[id(v) in places]) for v in arrays}


def _changes(f: OfArrays, xs: Sequence[Leaf], k: int) -> bool:
    """Return whether another value of an operand is seen to change that of `f`."""
    changed = [x * 1.25 + 0.25 if i == k else x for i, x in enumerate(xs)]
    with contextlib.suppress(UserCodeError):  # outside of its domain
        return not all(map(np.array_equal, attempt(f, *xs), attempt(f, *changed)))
    return False
