"""Trace a function: to hold what it captures in a list, or to learn what its results depend on.

`converted` runs for each rule, `traced` for what cannot be copied, `dependence_on` for variables
that nobody declared.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from tfgrad_jax._jaxpr import dependence, evaluate, without_consts
from tfgrad_jax._types import NeedsValuesError, spec

from .skeleton import dissect, snapshot


def traced(f: Callable[..., Any], *examples: Any) -> tuple[Callable[..., Any], ClosedJaxpr]:
    """Return a function that evaluates a jaxpr of `f`, and the jaxpr, whose constants `f` captured.

    The function holds these constants in a list, so that it can be copied around others.
    """
    # A new function at each call: JAX caches no trace of it.
    closed, y = jax.make_jaxpr(lambda *args: f(*args), return_shape=True)(*examples)
    jaxpr, consts, treedef = without_consts(closed), list(closed.consts), tree_structure(y)

    def evaluated(*args: Any) -> Any:
        return tree_unflatten(treedef, evaluate(jaxpr, *consts, *tree_leaves(args)))

    return evaluated, closed


def converted(
    run: Callable[[Sequence[Any], Sequence[Any]], Any],
    parts: Sequence[Any],
    examples: Sequence[Any],
    moving: bool,
) -> tuple[Callable[[Sequence[Any], Sequence[Any]], Any], list[Any]]:
    """Return `run(parts, args)` as a function of residuals and `args`, and the residuals.

    These are the tracers that the parts hold. Parts that cannot be copied are traced, on arguments
    like the `examples`. Where nothing is `moving`, the parts stay as they are, and so do parts that
    branch on values: these are concrete one level down, where they will run.
    """
    found = dissect(parts) if moving else None
    if moving and found is None:
        with contextlib.suppress(*NeedsValuesError):
            at, _ = traced(lambda *args: run(parts, args), *examples)
            found = dissect([at])
            run = _call
    if found is None:
        now = [snapshot(parts[0]), *parts[1:]]
        return lambda residuals, args: run(now, args), []
    skeleton, residuals = found
    return lambda residuals, args: run(skeleton(residuals), args), residuals


def _call(parts: Sequence[Any], args: Sequence[Any]) -> Any:
    return parts[0](*args)


def dependence_on(
    f: Callable[..., Sequence[Any]], values: Sequence[Any], others: Sequence[Any]
) -> dict[int, Any]:
    """Return which of `values` the results of `f(values, others)` depend on.

    They come by position in the order of their first use, each with the equation that uses it, or
    None where it is only returned.
    """
    positions = list(range(len(values)))
    try:
        closed = jax.make_jaxpr(lambda *both: f(*both))(values, others)
    except NeedsValuesError:
        if not all(isinstance(v, jax.Array) for v in values):
            return dict.fromkeys(positions)  # the values are not known any more
        # It branches on values, so these are concrete, and its derivative can be looked at.
        positions = [i for i in positions if spec(values[i]).differentiable]

        def moving(*moved: Any) -> Any:
            mixed = list(values)
            for i, value in zip(positions, moved, strict=True):
                mixed[i] = value
            return f(mixed, others)

        tangents = [values[i] for i in positions]
        closed = jax.make_jaxpr(jax.linearize(moving, *tangents)[1])(*tangents)
    uses, first = first_uses(closed), len(closed.consts)
    found = {i - first: eqn for i, eqn in uses.items() if i >= first}
    return {positions[i]: eqn for i, eqn in found.items() if i < len(positions)}


def first_uses(closed: ClosedJaxpr) -> dict[int, Any]:
    """Return which constants and operands the results of a jaxpr depend on.

    They come as in `dependence_on`, the constants before the operands.
    """
    jaxpr = without_consts(closed)
    mask = functools.reduce(operator.or_, dependence(jaxpr), 0)
    wanted = {v: i for i, v in enumerate(jaxpr.invars) if mask >> i & 1}
    uses: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom in wanted:
                uses.setdefault(wanted[atom], eqn)
    return uses | {i: None for i in wanted.values() if i not in uses}
