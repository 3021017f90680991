"""Trace a function, to get its captured values in a list, or to see what its results depend on.

`converted` runs for each rule that may hold tracers, `unconverted` for any other, `traced` for
functions that cannot be copied, and `dependence_on` for undeclared variables.
"""

import contextvars
import functools
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from tfgrad_jax import _errors
from tfgrad_jax._jaxpr import dependence, evaluate, in_order_of_use, without_consts
from tfgrad_jax._source import Source
from tfgrad_jax._types import NeedsValuesError, spec

from .reach import OpaqueError, TooMuchError, Walk
from .skeleton import Cells, Skeleton, dissect, snapshot

# Python's recursion limit allows fewer than twice as many nested traces.
_DEEP = 10

_tracing: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "the code of the functions that are being traced, from the outside in", default=()
)


def is_being_traced(source: Source) -> bool:
    return source.code is not None and source.code in _tracing.get()


def traced(
    f: Callable[..., Any], *examples: Any, source: Source | None = None, names: Sequence[str] = ()
) -> tuple[Callable[..., Any], ClosedJaxpr]:
    """Return a function that evaluates a jaxpr of `f`, and the jaxpr.

    The constants of the jaxpr are the tracers and arrays that `f` captured. The function holds them
    in a list, so it can be copied with others in their places. JAX's own errors show the name and
    the line of `source`, and these names of the arguments. Raises `RecursionError` if `f` calls
    itself and would be traced forever.
    """
    outer, code = _tracing.get(), source and source.code
    if code is not None and outer.count(code) == _DEEP:
        raise _errors.endless(source)

    def run(*args: Any) -> Any:  # a new function at each call: JAX caches no trace of it
        return f(*args)

    named = run if source is None else source.named(run, names)
    token = _tracing.set((*outer, code))
    try:
        closed, y = jax.make_jaxpr(named, return_shape=True)(*examples)
    finally:
        _tracing.reset(token)
    jaxpr, consts, treedef = without_consts(closed), list(closed.consts), tree_structure(y)

    def evaluated(*args: Any) -> Any:
        return tree_unflatten(treedef, evaluate(jaxpr, *consts, *tree_leaves(args)))

    return evaluated, closed


class Converted(NamedTuple):
    """A rule as a function of residuals, cotangents and the positions of its variables."""

    run: Callable[[Sequence[Any], Sequence[Any], Any], list[Any]]
    residuals: list[Any]
    is_traced: bool = False  # then its variables are those that it was traced with


def converted(
    rule: Callable[[Sequence[Any], Sequence[Any], Any], list[Any]],
    parts: Sequence[Any],
    listed: Any,
    examples: Sequence[Any],
    source: Source,
    patient: bool,
    cells: Cells,
    unused: Container[int],
) -> Converted:
    """Turn `rule(parts, cotangents, listed)` into a function of the tracers that the parts hold.

    These tracers are the residuals. If the parts cannot be copied, JAX traces the rule, on
    cotangents like the `examples`. If it then branches on a value, the parts stay as they are: the
    value is concrete one level down, where the rule will run.
    """
    try:
        walk = Walk(parts, patient=patient, unused=unused)
        skeleton, residuals = dissect(parts, walk, cells)
    except (OpaqueError, TooMuchError):
        try:
            at, _ = traced(lambda *cts: rule(parts, cts, listed), *examples, source=source)
        except NeedsValuesError:
            return unconverted(rule, parts, cells, unused)
        skeleton, residuals = dissect([at])
        run = lambda residuals, cotangents, _: skeleton(residuals)[0](*cotangents)  # noqa: E731
        return Converted(run, residuals, is_traced=True)
    return Converted(_copying(rule, skeleton), residuals)


def unconverted(rule: Any, parts: Sequence[Any], cells: Cells, unused: Container[int]) -> Converted:
    """Return the rule with its parts unchanged, and its closure as it is now."""
    return Converted(_copying(rule, snapshot(parts, cells, unused)), [])


def _copying(rule: Any, skeleton: Skeleton) -> Any:
    def run(residuals: Sequence[Any], cotangents: Sequence[Any], listed: Any) -> list[Any]:
        copies = skeleton.copies(residuals)
        gradients = rule(copies.values, cotangents, listed)
        copies.assign()
        return gradients

    return run


def dependence_on(
    f: Callable[..., Sequence[Any]], values: Sequence[Any], others: Sequence[Any]
) -> dict[int, Any]:
    """Return which of `values` the results of `f(values, others)` depend on.

    The keys are their positions, in the order of first use. Each has the equation that uses it
    first, or None if it is only returned.
    """
    positions = list(range(len(values)))
    try:
        closed = jax.make_jaxpr(lambda *both: f(*both))(values, others)
    except NeedsValuesError:
        if not all(isinstance(v, jax.Array) for v in values):
            return dict.fromkeys(positions)  # types alone: assume that all are used
        # `f` branches on values, so it cannot be traced; its derivative at these values can be.
        positions = [i for i in positions if spec(values[i]).differentiable]

        def of_some(*some: Any) -> Any:
            mixed = list(values)
            for i, value in zip(positions, some, strict=True):
                mixed[i] = value
            return f(mixed, others)

        tangents = [values[i] for i in positions]
        closed = jax.make_jaxpr(jax.linearize(of_some, *tangents)[1])(*tangents)
    uses, first = first_uses(closed), len(closed.consts)
    of_operands = {i - first: eqn for i, eqn in uses.items() if i >= first}
    return {positions[i]: eqn for i, eqn in of_operands.items() if i < len(positions)}


def first_uses(closed: ClosedJaxpr, results: int | None = None) -> dict[int, Any]:
    """Return which constants and operands the results of a jaxpr depend on, like `dependence_on`.

    Positions count the constants, then the operands. `results` limits this to the first so many
    results.
    """
    jaxpr = without_consts(closed)
    mask = functools.reduce(operator.or_, dependence(jaxpr)[:results], 0)
    relevant = {v: i for i, v in enumerate(jaxpr.invars) if mask >> i & 1}
    uses: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        for atom in in_order_of_use(eqn):
            if not isinstance(atom, Literal) and atom in relevant:
                uses.setdefault(relevant[atom], eqn)
    return uses | {i: None for i in relevant.values() if i not in uses}
