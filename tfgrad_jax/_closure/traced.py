"""Trace a function, to get its captured values in a list, or to see what its results depend on.

`traced` runs for functions and rules that cannot be copied, `uses` for undeclared variables.
"""

import contextlib
import contextvars
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.tree_util import tree_structure, tree_unflatten

from tfgrad_jax._jax.jaxpr import dependence, evaluate, in_order_of_use, without_consts
from tfgrad_jax._jax.types import NEEDS_VALUES, AnyFunction, Leaf, PyTree, spec
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

# Python's recursion limit allows fewer than twice as many nested traces.
_DEEP = 10

_tracing: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "the code of the functions that are being traced, from the outside in", default=()
)

SourceInfo: TypeAlias = object  # where an operation comes from, as JAX records it

# By position: where a value is used first; None if it is only returned.
Uses: TypeAlias = dict[int, SourceInfo]


def is_being_traced(source: Source) -> bool:
    return source.code is not None and source.code in _tracing.get()


@contextlib.contextmanager
def only_copied(source: Source) -> Iterator[None]:
    """Within this context, trace no call of a function that can be copied.

    `explain` compares what `f` returns with what JAX keeps, by identity; a trace of its own would
    give other tracers.
    """
    token = _tracing.set((*_tracing.get(), source.code))
    try:
        yield
    finally:
        _tracing.reset(token)


class Traced(NamedTuple):
    """A function as a jaxpr."""

    run: AnyFunction  # `run(consts, args)` evaluates the jaxpr; it holds no constants
    consts: list[Leaf]  # the tracers and arrays that the function uses besides its arguments
    aside: Any  # what it returned besides arrays
    closed: ClosedJaxpr

    def uses(self, results: int | None = None) -> Uses:
        """Return how the results, or the first so many, use the constants and the arguments."""
        return _first_uses(self.closed, results)

    def reads(self) -> list[bool]:
        """Return for each argument whether the jaxpr reads it."""
        jaxpr = self.closed.jaxpr
        atoms = set(map(id, itertools.chain(*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)))
        return [id(variable) in atoms for variable in jaxpr.invars]


def traced(
    f: AnyFunction, *examples: Leaf, source: Source | None = None, names: Sequence[str] = ()
) -> Traced:
    """Trace a function of arrays, which returns a pair: arrays, and anything else.

    JAX's own errors show the name and the line of `source`, and these names of the arguments.
    Raises `RecursionError` if `f` calls itself, and is traced within itself so many times.
    """
    outer, code = _tracing.get(), source and source.code
    if code is not None and outer.count(code) == _DEEP:
        raise errors.endless(source)

    aside = None

    def run(*args: Leaf) -> PyTree:  # a new function at each call: JAX caches no trace of it
        # Not as a static part of the result: JAX keeps the structures of thousands of results, and
        # each call of a jitted function left ten objects there.
        nonlocal aside
        arrays, aside = f(*args)
        return arrays

    named = run if source is None else source.named(run, names)
    token = _tracing.set((*outer, code))
    try:
        closed, arrays = jax.make_jaxpr(named, return_shape=True)(*examples)
    finally:
        _tracing.reset(token)
    jaxpr, treedef = without_consts(closed), tree_structure(arrays)

    def evaluated(consts: Sequence[Leaf], args: Sequence[Leaf]) -> PyTree:
        return tree_unflatten(treedef, evaluate(jaxpr, *consts, *args))

    return Traced(evaluated, list(closed.consts), aside, closed)


def uses(f: Callable[..., Sequence[Leaf]], values: Sequence[Leaf], others: Sequence[Leaf]) -> Uses:
    """Return which of `values` the results of `f(values, others)` use, in the order of first use.

    They may also be types.
    """
    positions = list(range(len(values)))
    try:
        closed = jax.make_jaxpr(lambda *both: f(*both))(values, others)
    except NEEDS_VALUES:
        if not all(isinstance(v, jax.Array) for v in values):
            return dict.fromkeys(positions)  # types alone: assume that all are used
        # `f` branches on values, so it cannot be traced; its derivative at these values can be.
        positions = [i for i in positions if spec(values[i]).differentiable]

        def of_some(*some: Leaf) -> Sequence[Leaf]:
            mixed = list(values)
            for i, value in zip(positions, some, strict=True):
                mixed[i] = value
            return f(mixed, others)

        tangents = [values[i] for i in positions]
        closed = jax.make_jaxpr(jax.linearize(of_some, *tangents)[1])(*tangents)
    uses, first = _first_uses(closed), len(closed.consts)
    of_operands = {i - first: at for i, at in uses.items() if i >= first}
    return {positions[i]: at for i, at in of_operands.items() if i < len(positions)}


def _first_uses(closed: ClosedJaxpr, results: int | None = None) -> Uses:
    """Return how the first `results` of a jaxpr use its constants and then its operands."""
    jaxpr = without_consts(closed)
    mask = functools.reduce(operator.or_, dependence(jaxpr)[:results], 0)
    relevant = {v: i for i, v in enumerate(jaxpr.invars) if mask >> i & 1}
    uses: Uses = {}
    for eqn in jaxpr.eqns:
        for atom in in_order_of_use(eqn):
            if not isinstance(atom, Literal) and atom in relevant:
                # Not the equation: it may hold values.
                uses.setdefault(relevant[atom], eqn.source_info)
    return uses | {i: None for i in relevant.values() if i not in uses}
