"""Make a call copyable by a trace: for what cannot be copied, or reaches far more than it uses.

The functions of a transparent call evaluate a jaxpr. All the tracers that they hold are in lists,
so the call is then copied like any other.

A call may reach all the weights of a model, and use few of them. If each layer captured every
weight, the cost of a model would be quadratic in its size. The functions of a transparent call hold
only the tracers that `f` and its rule use.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from tfgrad_jax._closure.reach import OpaqueError, TooMuchError, Walk
from tfgrad_jax._closure.skeleton import dissect
from tfgrad_jax._closure.traced import Traced, is_being_traced, traced
from tfgrad_jax._compat import is_ref, zeros
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Variables
from tfgrad_jax._source import Source
from tfgrad_jax._trace import is_own, plainly
from tfgrad_jax._types import NeedsValuesError, is_traced, spec

from .rule import Values, transparent_rule

# A function that reaches more tracers than this mostly uses few of them.
MANY = 8


class HoldsRefError(ValueError):
    """`f` makes a Ref for its rule, which a trace cannot return."""


def transparent(call: Call) -> Call:
    """Return the same call, whose functions evaluate jaxprs around lists of tracers.

    `f` runs once, now. The results of its jaxpr are the leaves of `y`, and what `f` computed for
    its rule. What else the rule holds, such as weights, is in a list.
    """
    source, inputs = call.contract.source, call.contract.inputs
    paths = inputs.leaf_paths()

    def arrays(*operands: Any) -> Any:
        leaves, outputs, grad_fn = call.apply(operands)
        gradients, *about = grad_fn  # the others hold no values
        chooses = call.chooses(grad_fn.accepts_variables)
        try:
            skeleton, held = dissect([gradients], Walk([gradients], patient=chooses))
        except (OpaqueError, TooMuchError):
            # To see what `y` uses, `f` runs again: this trace has not ended.
            variables = _undeclared(_value(call), outputs.count) if chooses else call.declared
            types = outputs.cotangents(leaves)
            skeleton, held = dissect([transparent_rule(source, grad_fn, types, *variables)])
        computed = {i: v for i, v in enumerate(held) if is_own(v)}
        if any(map(is_ref, computed.values())):
            raise HoldsRefError(f"JAX traces {source}, and its rule holds a Ref.")
        others = [None if i in computed else v for i, v in enumerate(held)]
        return (leaves, computed), (outputs, skeleton, others, about)

    names = [paths[i] for i in inputs.operands]
    f = traced(arrays, *call.operands, source=source, names=names)
    evaluate, (outputs, skeleton, others, (accepts, rule)) = f.run, f.aside

    def evaluated(consts: Values, others: Values, operands: Values) -> Any:
        leaves, computed = evaluate(consts, operands)
        (gradients,) = skeleton.copies([computed.get(i, v) for i, v in enumerate(others)])
        return leaves, outputs, GradFn(gradients, accepts, rule)

    apply = functools.partial(evaluated, f.consts, others)
    # A rule that calls itself would be traced forever.
    if sum(v is not None for v in others) > MANY and not is_being_traced(rule):
        variables = _undeclared(f, outputs.count) if call.chooses(accepts) else call.declared
        others = _used(others, dataclasses.replace(call, apply=apply), rule, *variables)
        apply = functools.partial(evaluated, f.consts, others)

    primal = None
    if call.primal is not None:
        y = traced(lambda *operands: (call.primal(operands), None), *call.operands)
        primal = functools.partial(y.run, y.consts)
    return dataclasses.replace(call, apply=apply, primal=primal)


def _value(call: Call) -> Traced:
    """Trace the leaves of `y` alone."""

    def leaves(*operands: Any) -> Any:
        with plainly():
            return call.apply(operands)[0], None

    return traced(leaves, *call.operands)


def _undeclared(y: Traced, results: int) -> tuple[Variables | None, list[Any]]:
    """Return the differentiable tracers that these results use, as variables, and as a list."""
    used = [y.consts[i] for i in y.uses(results)]
    values = [v for v in used if is_traced([v]) and spec(v).differentiable]
    return Variables.listed(values, list(map(spec, values))) if values else None, values


def _used(
    held: Sequence[Any], call: Call, rule: Source, variables: Variables | None, values: Values
) -> Sequence[Any]:
    """Return what a rule holds, with types in the places of values that it does not use.

    It runs in a trace, with all its variables. If it needs values, it may use any.
    """

    def gradients(*operands: Any) -> Any:
        leaves, outputs, grad_fn = call.apply(operands)
        upstreams = list(map(zeros, outputs.cotangents(leaves)))
        return grad_fn.gradients(upstreams, variables, values), None

    with contextlib.suppress(*NeedsValuesError):
        consts = traced(gradients, *call.operands, source=rule).consts
        used = set(map(id, (*consts, *values)))
        return [v if v is None or id(v) in used else jax.typeof(v) for v in held]
    return held
