"""Make a call copyable by a trace: its functions then evaluate a jaxpr around lists of tracers.

The functions of a transparent call hold only the tracers that `f` uses, and those that its rule
reaches. The rule itself does not run: run for a look, it would use up a list that `f` filled for
it, raise where nobody differentiates, or write.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

from tfgrad_jax._closure.assigned import refuse_assigned, watched_objects
from tfgrad_jax._closure.reach import reach
from tfgrad_jax._closure.skeleton import dissect
from tfgrad_jax._closure.traced import SourceInfo, Traced, traced
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Variables
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_own, plainly
from tfgrad_jax._jax.types import is_traced, spec

from .capture import Capture, Values
from .rule import transparent_rule

Refs: TypeAlias = dict[int, Any]  # by position among the values that a rule holds


class HoldsRefError(ValueError):
    """`f` makes a Ref for its rule, which a trace cannot return."""


class Transparent(NamedTuple):
    """A call that can be copied, and what its value uses."""

    call: Call
    used: list[tuple[Any, SourceInfo]]  # tracers and arrays, with the line that uses each first


def transparent(call: Call, capture: Capture) -> Transparent:
    """Return the same call, whose functions evaluate jaxprs around lists of tracers.

    `f` runs once, now: a copy of it, or `f` itself if nothing of it is captured. The
    results of its jaxpr are the leaves of `y`, and the tracers that its rule holds.
    """
    source, inputs, skeleton = call.contract.source, call.contract.inputs, capture.skeleton

    def arrays(captured: Values, *operands: Any) -> Any:
        copies = skeleton.copies(captured)
        apply = copies.values[0]
        leaves, outputs, grad_fn = apply(operands)
        refuse_assigned(copies.watched, source)
        gradients, accepts_variables, rule, _ = grad_fn
        found = reach([gradients])
        if found.obstacle:
            chooses = call.chooses(accepts_variables)
            # To see what `y` uses, `f` runs again: this trace has not ended.
            variables = _undeclared(_value(call), outputs.count) if chooses else call.declared
            types = outputs.cotangents(leaves)
            gradients = transparent_rule(source, grad_fn, types, *variables)
            found = reach([gradients])
        # If `f` itself ran, what its rule holds may be the user's, or made by `f`.
        is_itself = apply is call.apply
        watched = watched_objects(found.on_way()) if is_itself else copies.watched
        of_rule, values = dissect([gradients], found, watched)
        refs = {i: v for i, v in enumerate(values) if is_ref(v)}
        if any(map(is_own, refs.values())):
            raise HoldsRefError(f"JAX traces {source}, and its rule holds a Ref.")
        values = [v for i, v in enumerate(values) if i not in refs]
        return (leaves, values), (outputs, of_rule, refs, (accepts_variables, rule))

    paths = inputs.leaf_paths()
    names = [*["closed over"] * len(capture.values), *(paths[i] for i in inputs.operands)]
    f = traced(arrays, capture.values, *call.operands, source=source, names=names)
    evaluate, (outputs, of_rule, refs, (accepts, rule)) = f.run, f.aside

    def evaluated(consts: Values, captured: Values, refs: Refs, operands: Values) -> Any:
        leaves, values = evaluate(consts, (captured, *operands))
        for i, ref in refs.items():
            values.insert(i, ref)
        copies = of_rule.copies(values)
        return leaves, outputs, GradFn(copies.values[0], accepts, rule, copies.watched)

    apply = functools.partial(evaluated, f.consts, capture.values, refs)
    primal = None
    if call.primal is not None:
        y = traced(lambda *operands: (call.primal(operands), None), *call.operands)
        primal = functools.partial(y.run, y.consts)
    every = [*f.consts, *capture.values]
    used = [(every[i], at) for i, at in f.uses(outputs.count).items() if i < len(every)]
    return Transparent(dataclasses.replace(call, apply=apply, primal=primal), used)


def _value(call: Call) -> Traced:
    """Trace the leaves of `y` alone."""

    def leaves(*operands: Any) -> Any:
        with plainly():
            return call.apply(operands)[0], None

    return traced(leaves, *call.operands)


def _undeclared(y: Traced, results: int) -> tuple[Variables | None, list[Any]]:
    """Return the differentiable tracers that these results use, as variables, and as a list."""
    used = [y.consts[i] for i in y.uses(results) if i < len(y.consts)]
    values = [v for v in used if is_traced([v]) and spec(v).differentiable]
    return Variables.listed(values, list(map(spec, values))) if values else None, values
