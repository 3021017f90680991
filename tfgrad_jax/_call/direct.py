"""A call where JAX differentiates: `f` runs as it is, one level down.

_watching   the quick look: can `f` reach a tracer, or leave something behind? If not, it runs as if
nobody watched; else its operations pass through a watch, which puts primals in place of tracers
direct      then the rule is attached to what `f` returned, for all that it took
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.tree_util import tree_unflatten

from .._autodiff.attached import Forward, arrays
from .._autodiff.custom import record
from .._autodiff.rule import Run as RunOfRule
from .._closure.walk import reaches_nothing, visited
from .._frontend.grad_fn import Call
from .._jax.compat import parent_of, primal, trace_of
from .._jax.shown import Run, is_live
from .._jax.trace import at, below, has_values, is_forward, is_of, plainly
from .._jax.types import Leaf, PyTree, Values, has_gradient
from .._jax.watch import Watch
from .._messages import errors
from .rule import is_made, kept
from .weights import Weights, names_of

Derivative: TypeAlias = Any  # the trace of JAX's that differentiates
Level: TypeAlias = Callable[[Leaf], Leaf]  # of a value: what stands for it at a level


def direct(call: Call, name: str, of: Derivative) -> PyTree:
    """Return `y`. `of` is the trace that differentiates."""
    source, outer = call.spec.source, Watch.now()
    at_level: Level = outer.lower if outer is not None else lambda v: v
    are_values = has_values(parent_of(of))
    with jax.named_scope(name), below(of):
        primals = arrays([primal(at_level(v), of) for v in call.operands])
        with _watching(call, of, outer) as watch:
            run, inputs = (watch.run, watch.shown(primals)) if watch else (None, primals)
            lower: Level = lambda v: v if watch is None else primal(watch.lower(v), of)  # noqa: E731
            # JAX does not differentiate values again: functions inside need no rules.
            needs_none = are_values and not call.autodiff
            with plainly() if needs_none else contextlib.nullcontext():
                filled = call.held.filled(call.spec.inputs, inputs)
                leaves, grad_fn = call.spec.apply(filled)
            leaves = watch.returned(leaves) if watch else leaves
            weights, y, outputs = Weights.of(call, grad_fn, run), grad_fn.y, grad_fn.outputs
            taken = [*weights.operands, *call.operands]
            own = y is not None and not are_values and is_made(y, call.held, inputs, watch)
            first: Values = weights.operands
            if call.autodiff:  # of what `f` captured there is the derivative of `y` itself
                first = [leaves[i] for i in outputs.differentiable]
                leaves = [primal(v, of) for v in leaves]
            operands = [*map(at_level, first), *map(at_level, call.operands)]
            primals = [*map(lower, first), *primals]
            pairs = zip(operands, primals, strict=True)
            wanted = [i for i, (o, p) in enumerate(pairs) if o is not p]
            refused = {i: taken[i] for i in wanted if i in weights.refused}
            weights.check(wanted, names_of(call.held, refused))
            is_its = lambda v: isinstance(v, Tracer) and lower(v) is not v  # noqa: E731
            takes, ofs = (is_its, watch.ofs if watch else (of,)) if are_values else (is_live, None)
            found = kept(call, grad_fn, leaves, weights, takes, y if own else None, ofs)
            if weights.may_warn and run is not None:
                if found.read is not None:
                    known = {id(v) for v in taken}
                    alone = [v for v in found.read if run.is_captured(v) and is_its(v)]
                    alone = [v for v in alone if id(v) not in known and has_gradient(v)]
                    weights.warn_of(call.held, alone, grad_fn.held)
                elif not wanted and outer is None:
                    # Else the rule would not run, and not warn of what it alone reads. In `f` of
                    # another function, `y` would seem to depend on that.
                    reached = [v for _, v in visited([("", grad_fn.held)]) if is_its(v)]
                    operands += map(at_level, reached)
                    primals += map(lower, reached)
            residuals = list(map(lower, found.residuals))
        for k in found.own:
            residuals[k] = outputs.only(leaves)
    rule = found.rule._replace(captured=len(first))
    body = _beside_identity(rule.run, len(first)) if call.autodiff else rule.run
    start = 0 if call.autodiff else len(first)
    gives = {*weights.listed, *weights.refused, *range(start, len(operands))}
    forward = Forward(leaves, outputs.differentiable, body, residuals, gives)
    with at(of):
        leaves = record(forward, name, source, operands, primals, of)
    if outer is not None:
        leaves = outer.handed_on(taken, leaves)
    return tree_unflatten(outputs.treedef, leaves)


def _beside_identity(run: RunOfRule, n: int) -> RunOfRule:
    """Return a rule that gives the first `n` operands, which are the outputs, their upstreams."""

    def both(residuals: Values, cotangents: Values, wanted: Sequence[int]) -> Any:
        others = [i for i in wanted if i >= n]
        found = dict(zip(others, run(residuals, cotangents, others), strict=True))
        return [cotangents[i] if i < n else found[i] for i in wanted]

    return both


# --- where `f` runs -------------------------------------------------------------------------------


def _watching(
    call: Call, of: Derivative, outer: Watch | None
) -> contextlib.AbstractContextManager[Watch | None]:
    """Return the context in which `f` runs: a watch, unless it takes nothing from outside."""
    if outer is None and call.variables is None and reaches_nothing(call.held.roots):
        return contextlib.nullcontext()
    # With "autodiff", JAX differentiates the operations of `f` by what it captures. So they run
    # where JAX differentiates, on inputs without their tangents, for which there is the rule.
    level = of if call.autodiff else parent_of(of)
    # A lambda would hold `call`: with a value that `f` leaves in an object, a reference cycle.
    run = Run(of, call.operands, functools.partial(errors.left_behind, call.spec.source))
    aliases = _aliases(call, of) if is_forward(of) else {}
    ofs = (*(outer.ofs if outer else ()), of)
    return Watch.running(level, run, ofs=ofs, outer=outer, aliases=aliases)


def _aliases(call: Call, of: Derivative) -> dict[int, Leaf]:
    """Return the weights of a call by the identities of the values inside.

    In forward mode, `jax.lax.stop_gradient(w)` returns the value inside `w` without an operation,
    so no watch sees it. The list of variables had `w` in reverse mode alone.
    """
    aliases = dict[int, Leaf]()
    for _, w in visited([("", call.held)]):
        v = w if isinstance(w, Tracer) and is_of(w, of) else None
        while isinstance(v, Tracer) and is_forward(trace_of(v)):
            v = primal(v, trace_of(v))
            aliases[id(v)] = w
    return aliases
