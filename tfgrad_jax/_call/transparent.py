"""Trace a call: its value and its rule then come from a jaxpr, and can be copied.

`trace_call` runs `f` once. The results of its jaxpr are the leaves of `y`, and the tracers that the
rule holds. The rule itself does not run: run for a look, it would use up a list that `f` filled for
it, raise where nobody differentiates, or write.

`transparent` makes a call of that which can be copied, whatever it closed over: it holds only a
list of the tracers that `f` uses, and of those that its rule reaches.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfgrad_jax._closure.assigned import Watched, refuse_assigned, watched_objects
from tfgrad_jax._closure.reach import reach
from tfgrad_jax._closure.skeleton import Skeleton, hoist_tracers
from tfgrad_jax._closure.traced import SourceInfo, Traced, traced
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Gradients, Held, Primal, Result, Variables
from tfgrad_jax._frontend.structure import Layout, Outputs
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_own, plainly
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree, is_traced, spec
from tfgrad_jax._messages.runs import note_another_run
from tfgrad_jax._messages.source import Source

from .capture import Capture, Values
from .rule import transparent_rule


class RuleNotCopiedError(Exception):
    """A rule that the trace should return cannot be copied."""


class HoldsRefError(ValueError):
    """`f` makes a Ref for its rule, which a trace cannot return."""


class Shown(NamedTuple):
    """What a trace of a call has shown besides arrays. It holds no values."""

    outputs: Outputs
    gradients: Gradients  # of the rule
    rule: Skeleton  # copies what the rule holds
    refs: Sequence[int]  # which of the values in it are Refs: a trace cannot return them
    accepts_variables: bool
    rule_source: Source


def trace_call(
    run: Callable[[Values, Values], tuple[Result, Sequence[Watched] | None]],
    captured: Values,
    inputs: Values,
    source: Source,
    layout: Layout,
    copyable: Callable[[Result], GradFn] | None,
) -> Traced:
    """Trace a call once, which `run` runs around captured values and its inputs.

    `run` also returns what the rule may not assign to, or None if that is not known. `copyable`
    makes a rule that can be copied of one that cannot be; without it, that is an error. Besides
    arrays, the trace gives what it has `Shown`, and the Refs that the rule holds.
    """

    def arrays(captured: Values, *inputs: Leaf) -> tuple[PyTree, tuple[Shown, list[Leaf]]]:
        result, watched = run(captured, inputs)
        leaves, outputs, grad_fn = result
        found = reach(grad_fn.held)
        if found.obstacle:
            if copyable is None:
                raise RuleNotCopiedError
            grad_fn = copyable(result)
            found = reach(grad_fn.held)
        if watched is None:
            watched = watched_objects(found.on_way())
        rule, values = hoist_tracers(grad_fn.held, found, watched)
        refs = {i: v for i, v in enumerate(values) if is_ref(v)}
        if any(map(is_own, refs.values())):
            text = f"JAX traces {source}, and its rule holds a Ref that was made in the function."
            raise HoldsRefError(f"{text} Make the Ref before the call, and pass it as an argument.")
        values = [v for i, v in enumerate(values) if i not in refs]
        gradients, _, accepts, rule_source, _ = grad_fn
        shown = Shown(outputs, gradients, rule, list(refs), accepts, rule_source)
        return (leaves, values), (shown, list(refs.values()))

    paths = layout.leaf_paths()
    shown_names = [*["closed over"] * len(captured), *(paths[i] for i in layout.operands)]
    return traced(arrays, captured, *inputs, source=source, names=shown_names)


def evaluated(
    evaluate: AnyFunction,  # `Traced.run`
    shown: Shown,
    read: int,  # how many values the jaxpr reads: its constants, and what was captured
    held: Held,  # these, and then the Refs of the rule
    inputs: Values,
) -> Result:
    """Return what a traced call returns at these values."""
    leaves, values = evaluate(held[:read], inputs)
    for i, ref in zip(shown.refs, held[read:], strict=False):
        values.insert(i, ref)
    copies = shown.rule.copies(values)
    accepts, source = shown.accepts_variables, shown.rule_source
    rule = GradFn(shown.gradients, copies.values, accepts, source, copies.watched)
    return leaves, shown.outputs, rule


class Transparent(NamedTuple):
    """A call that can be copied, and what its value uses."""

    call: Call
    used: list[tuple[Leaf, SourceInfo]]  # tracers and arrays, with the line that uses each first


def transparent(call: Call, capture: Capture, may_trace_rule: bool) -> Transparent:
    """Return the same call, which evaluates jaxprs around a list of tracers.

    `f` runs once, now: a copy of it, or `f` itself if nothing of it is captured. Then what its rule
    holds may be the user's, or made by `f`. A rule that cannot be copied is traced now, too: it may
    hold tracers of this trace, which ends. But then it runs where nobody differentiates.
    """
    source, skeleton = call.spec.source, capture.skeleton

    def run(captured: Values, inputs: Values) -> tuple[Result, Sequence[Watched] | None]:
        copies = skeleton.copies(captured)
        result = call.apply(copies.values, inputs)
        refuse_assigned(copies.watched, source)
        is_itself = all(map(operator.is_, copies.values, call.held))
        return result, None if is_itself else copies.watched

    def copyable(result: Result) -> GradFn:
        leaves, outputs, grad_fn = result
        # To see what `y` uses, `f` runs again: this trace has not ended.
        chooses = call.chooses(grad_fn.accepts_variables)
        note_another_run(source)
        variables = _undeclared(_value(call), outputs.count) if chooses else call.declared
        return transparent_rule(source, grad_fn, outputs.cotangents(leaves), *variables)

    make = copyable if may_trace_rule else None
    f = trace_call(run, capture.values, call.operands, source, call.spec.inputs, make)
    shown, refs = f.aside
    # A layer that reaches all weights of a model reads few of them. The others go: each would be an
    # operand of the layer, and the cost of the model quadratic in its size.
    reads = f.reads()[: len(capture.values)]
    read = [v if is_read else None for v, is_read in zip(capture.values, reads, strict=True)]
    held = [*f.consts, *read, *refs]  # and then what `primal` holds
    apply = functools.partial(evaluated, f.run, shown, len(f.consts) + len(read))
    primal = None
    if call.primal is not None:
        primal, consts = _transparent_primal(call, call.primal, len(held))
        held += consts
    every = [*f.consts, *capture.values]
    used = [(every[i], at) for i, at in f.uses(shown.outputs.count).items() if i < len(every)]
    return Transparent(dataclasses.replace(call, apply=apply, primal=primal, held=held), used)


def _transparent_primal(call: Call, primal: Primal, first: int) -> tuple[Primal, list[Leaf]]:
    """Return a `primal` that evaluates a jaxpr, and what the call holds for it from `first` on."""
    run, consts, *_ = traced(lambda *operands: (primal(call.held, operands), None), *call.operands)
    return lambda held, inputs: run(held[first:], inputs), consts


def _value(call: Call) -> Traced:
    """Trace the leaves of `y` alone."""

    def leaves(*operands: Leaf) -> tuple[list[Leaf], None]:
        with plainly():
            return call.apply(call.held, operands)[0], None

    return traced(leaves, *call.operands)


def _undeclared(y: Traced, results: int) -> tuple[Variables | None, list[Leaf]]:
    """Return the differentiable tracers that these results use, as variables, and as a list."""
    used = [y.consts[i] for i in y.uses(results) if i < len(y.consts)]
    values = [v for v in used if is_traced([v]) and spec(v).differentiable]
    return Variables.listed(values, list(map(spec, values))) if values else None, values
