"""Trace a function, to get in a list what it captures, and to evaluate it around other values."""

import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.tree_util import tree_structure, tree_unflatten

from tfgrad_jax._jax.jaxpr import evaluate, without_consts
from tfgrad_jax._jax.trace import at_once
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

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


def traced(
    f: AnyFunction,
    *examples: Leaf,
    source: Source | None = None,
    names: Sequence[str] = (),
) -> Traced:
    """Trace a function of arrays, which returns a pair: arrays, and anything else.

    Eagerly, operations on values run at once, so no tracer gets into a cache of constants.
    JAX's own errors show the name and the line of `source`, and these names of the arguments.
    Raises `RecursionError` if `f` calls itself, and is traced within itself so many times.
    """
    outer, code = _tracing.get(), source and source.code
    if code is not None and outer.count(code) == _DEEP:
        raise errors.endless(source)

    aside, context = None, at_once()

    def run(*args: Leaf) -> PyTree:  # a new function at each call: JAX caches no trace of it
        # Not as a static part of the result: JAX keeps the structures of thousands of results, and
        # each call of a jitted function left ten objects there.
        nonlocal aside
        with context():
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
        # A result that is a literal is a number, which is no array.
        leaves = evaluate(jaxpr, *consts, *args)
        every = zip(leaves, jaxpr.outvars, strict=True)
        leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x, v.aval.dtype) for x, v in every]
        return tree_unflatten(treedef, leaves)

    return Traced(evaluated, [*closed.consts], aside, jaxpr)
