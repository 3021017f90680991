"""Trace a function: to hold what it captured in a list, and to know what its results depend on."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from tfgrad_jax._frontend.grad_fn import NeedsValuesError
from tfgrad_jax._frontend.structure import spec
from tfgrad_jax._jaxpr import evaluate, without_consts


def traced(f: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """Return a function that evaluates a jaxpr of `f`, and holds what `f` captured in a list."""
    # A new function at each call: JAX caches no trace of it.
    closed, y = jax.make_jaxpr(lambda *args: f(*args), return_shape=True)(*examples)
    jaxpr, consts, treedef = without_consts(closed), list(closed.consts), tree_structure(y)

    def evaluated(*args: Any) -> Any:
        return tree_unflatten(treedef, evaluate(jaxpr, *consts, *tree_leaves(args)))

    return evaluated


def needed(jaxpr: Any, results: Sequence[bool]) -> list[bool]:
    """Return which operands of a jaxpr without constants some of its results depend on."""
    return dce_jaxpr(jaxpr, list(results))[1]


def dependence_on(
    f: Callable[..., Sequence[Any]], values: Sequence[Any], others: Sequence[Any]
) -> dict[int, Any]:
    """Return which of `values` the results of `f(values, others)` depend on.

    They come by position in the order of their first use, each with the equation of that, or None
    where it is only returned.
    """
    positions = list(range(len(values)))
    try:
        closed = jax.make_jaxpr(lambda *both: f(*both))(values, others)
    except NeedsValuesError:
        if any(isinstance(v, jax.ShapeDtypeStruct) for v in values):
            return dict.fromkeys(positions)  # no values are known any more
        # It branches on values, so these are concrete, and its derivative can be looked at.
        positions = [i for i in positions if spec(values[i]).differentiable]

        def moving(*moved: Any) -> Any:
            mixed = list(values)
            for i, value in zip(positions, moved, strict=True):
                mixed[i] = value
            return f(mixed, others)

        tangents = [values[i] for i in positions]
        closed = jax.make_jaxpr(jax.linearize(moving, *tangents)[1])(*tangents)
    jaxpr = closed.jaxpr
    known = needed(without_consts(closed), [True] * len(jaxpr.outvars))[len(jaxpr.constvars) :]
    wanted = {v: i for i, v, k in zip(positions, jaxpr.invars, known) if k}
    uses: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom in wanted:
                uses.setdefault(wanted[atom], eqn)
    return uses | {i: None for i in wanted.values() if i not in uses}
