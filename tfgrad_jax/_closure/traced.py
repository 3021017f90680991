"""Trace a function, to get in a list what it captures, and to evaluate it around other values."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.tree_util import tree_structure, tree_unflatten

from tfgrad_jax._jax.jaxpr import (
    dependence,
    evaluate,
    in_order_of_use,
    without_consts,
)
from tfgrad_jax._jax.reasons import Why, noting
from tfgrad_jax._jax.trace import at_once
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

from .reach import Id

# Python's recursion limit allows fewer than twice as many nested traces.
_DEEP = 20

_tracing: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "the code of the functions that are being traced, from the outside in", default=()
)


@dataclasses.dataclass(eq=False)
class Traced:
    """A function as a jaxpr."""

    run: AnyFunction  # `run(consts, args)` evaluates the jaxpr; it holds no constants
    consts: list[Leaf]  # the tracers and arrays that the function uses besides its arguments
    aside: Any  # what it returned besides arrays
    jaxpr: Jaxpr  # of the constants and then the arguments

    def used_by(self, results: int) -> list[int]:
        """Return which constants the first so many results depend on, in order of first use."""
        joined = functools.reduce(operator.or_, dependence(self.jaxpr)[:results], 0)
        consts = self.jaxpr.invars[: len(self.consts)]
        places = {v: i for i, v in enumerate(consts) if joined >> i & 1}
        atoms = itertools.chain.from_iterable(map(in_order_of_use, self.jaxpr.eqns))
        first = dict.fromkeys(a for a in atoms if not isinstance(a, Literal) and a in places)
        return [places[v] for v in dict.fromkeys([*first, *places])]

    def reads(self) -> list[bool]:
        """Return for each constant, and then each argument, whether the jaxpr reads it."""
        atoms = *(e.invars for e in self.jaxpr.eqns), self.jaxpr.outvars
        read = set(map(id, itertools.chain.from_iterable(atoms)))
        return [id(variable) in read for variable in self.jaxpr.invars]


def traced(
    f: AnyFunction,
    *examples: Leaf,
    source: Source | None = None,
    names: Sequence[str] = (),
    why: Why = None,
    stopped: Mapping[Id, Leaf] | None = None,
) -> Traced:
    """Trace a function of arrays, which returns a pair: arrays, and anything else.

    Eagerly, operations on values run at once, so no tracer gets into a cache of constants.
    Constants that were `stopped` belong to tracers, without their derivatives; then everything is
    recorded.

    JAX's own errors show the name and the line of `source`, and these names of the arguments. Our
    note says `why` it is traced, if a value is needed.
    Raises `RecursionError` if `f` calls itself, and is traced within itself so many times.
    """
    outer, code = _tracing.get(), source and source.code
    if code is not None and outer.count(code) == _DEEP:
        raise errors.endless(source)

    aside, context = None, contextlib.nullcontext if stopped else at_once()

    def run(*args: Leaf) -> PyTree:  # a new function at each call: JAX caches no trace of it
        # Not as a static part of the result: JAX keeps the structures of thousands of results, and
        # each call of a jitted function left ten objects there.
        nonlocal aside
        with noting(why), context():
            arrays, aside = f(*args)
        return arrays

    named = run if source is None else source.named(run, names)
    token = _tracing.set((*outer, code))
    try:
        closed, arrays = jax.make_jaxpr(named, return_shape=True)(*examples)
    finally:
        _tracing.reset(token)
    jaxpr, treedef = without_consts(closed), tree_structure(arrays)
    stopped = stopped or {}
    places = [i for i, c in enumerate(closed.consts) if id(c) in stopped]

    def evaluated(consts: Sequence[Leaf], args: Sequence[Leaf]) -> PyTree:
        if places:
            consts = [jax.lax.stop_gradient(c) if i in places else c for i, c in enumerate(consts)]
        # A result that is a literal is a number of JAX's own class, which is no array.
        leaves = evaluate(jaxpr, *consts, *args)
        leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x, x.dtype) for x in leaves]
        return tree_unflatten(treedef, leaves)

    return Traced(evaluated, [stopped.get(id(c), c) for c in closed.consts], aside, jaxpr)
