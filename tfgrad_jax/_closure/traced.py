"""Trace a function, to get in a list what it captures, and to evaluate it around other values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.tree_util import tree_structure, tree_unflatten

from .._jax.compat import is_ref
from .._jax.jaxpr import without_consts
from .._jax.trace import is_staging
from .._jax.types import Aval, Leaf, PyTree, Values
from .._jax.watching import recording
from .._messages.source import Source

Run: TypeAlias = Callable[[Values, Values], PyTree]


@dataclasses.dataclass(eq=False)
class Traced:
    """A function as a jaxpr."""

    run: Run  # `run(consts, args)` evaluates the jaxpr; it holds no constants
    consts: list[Leaf]  # the tracers and arrays that the function uses besides its arguments
    aside: object  # what it returned besides arrays
    jaxpr: Jaxpr  # of the constants and then the arguments


def traced(
    f: Callable[..., tuple[PyTree, object]],
    *examples: Leaf,
    source: Source,
    names: Sequence[str] = (),
    is_rule: bool = False,
) -> Traced:
    """Trace a function of a watch and arrays, which returns a pair: arrays, and anything else.

    Eagerly, operations on values run at once, so no tracer gets into a cache of constants.
    JAX's own errors show the name and the line of `source`, and these names of the arguments.
    """
    aside, context = None, recording()

    def run(*args: Leaf) -> PyTree:  # a new function at each call: JAX caches no trace of it
        # Not as a static part of the result: JAX keeps the structures of thousands of results, and
        # each call of a jitted function left ten objects there.
        nonlocal aside
        with context() as watch:
            arrays, aside = f(watch, *args)
        return arrays

    closed, arrays = jax.make_jaxpr(source.named(run, names), return_shape=True)(*examples)
    jaxpr, treedef = without_consts(closed), tree_structure(arrays)
    evaluate = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
    # Where JAX records the call, it records this jaxpr again, as the value of a function with a
    # derivative of its own; and so for each function around it. As one `jit` it is one operation:
    # a nest of 20 took 16 times as long as one of 5. Not with effects: an axis that a `vmap` binds
    # is not bound where JAX transposes the body of a `jit`; nor a rule, which is recorded no more.

    name = source.name.rpartition(".")[2]  # for profiles, and errors

    def run_as_one(*operands: Leaf) -> list[Leaf]:
        with jax.named_scope(name):
            return evaluate(*operands)

    run_as_one.__name__ = name
    as_one = jax.jit(run_as_one)
    is_one = not (is_rule or jaxpr.effects)

    def evaluated(consts: Values, args: Values) -> PyTree:
        operands = [*consts, *args]
        records = is_one and is_staging() and not any(map(is_ref, operands))
        leaves = as_one(*operands) if records else evaluate(*operands)
        # A result that is a literal is a number, which is no array.
        every = zip(leaves, jaxpr.outvars, strict=True)
        leaves = [
            x if isinstance(x, jax.Array) else jnp.asarray(x, cast("Aval", v.aval).dtype)
            for x, v in every
        ]
        return tree_unflatten(treedef, leaves)

    return Traced(evaluated, [*closed.consts], aside, jaxpr)
