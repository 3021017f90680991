"""Trace a call: its value and its rule then come from a jaxpr, and can be copied.

`trace_call` runs `f` once. The results of its jaxpr are the leaves of `y`, and the tracers that the
rule holds. The rule itself does not run: run for a look, it would use up a list that `f` filled for
it, raise where nobody differentiates, or write.

`transparent` makes a call of that which can be copied, whatever it closed over: its functions hold
only lists of the tracers that `f` uses, and those that its rule reaches.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._closure.assigned import Watched, refuse_assigned, watched_objects
from tfgrad_jax._closure.reach import reach
from tfgrad_jax._closure.skeleton import Skeleton, hoist_tracers
from tfgrad_jax._closure.traced import SourceInfo, Traced, traced
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Gradients, Result, Variables
from tfgrad_jax._frontend.structure import Layout, Outputs
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_own, plainly
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree, is_traced, spec
from tfgrad_jax._messages.runs import note_another_run
from tfgrad_jax._messages.source import Source

from .capture import Capture, Values
from .rule import transparent_rule

Refs: TypeAlias = dict[int, Leaf]  # by position among the values that a rule holds


class HoldsRefError(ValueError):
    """`f` makes a Ref for its rule, which a trace cannot return."""


class Shown(NamedTuple):
    """What a trace of a call has shown beside arrays."""

    outputs: Outputs
    rule: Skeleton  # copies `GradFn.gradients`
    refs: Refs  # not among the results: a trace cannot return them
    accepts_variables: bool
    rule_source: Source


def trace_call(
    run: Callable[[Values, Values], tuple[Result, Sequence[Watched] | None]],
    captured: Values,
    inputs: Values,
    names: tuple[Source, Layout],
    copyable: Callable[[Result], Gradients],
) -> Traced:
    """Trace a call once, which `run` runs around captured values and its inputs.

    `run` also returns what the rule may not assign to, or None if that is not known. `copyable`
    returns `GradFn.gradients` of a rule that cannot be copied as something that can be.
    """
    source, layout = names

    def arrays(captured: Values, *inputs: Leaf) -> tuple[PyTree, Shown]:
        result, watched = run(captured, inputs)
        leaves, outputs, grad_fn = result
        gradients = grad_fn.gradients
        found = reach([gradients])
        if found.obstacle:
            gradients = copyable(result)
            found = reach([gradients])
        if watched is None:
            watched = watched_objects(found.on_way())
        rule, values = hoist_tracers([gradients], found, watched)
        refs = {i: v for i, v in enumerate(values) if is_ref(v)}
        if any(map(is_own, refs.values())):
            text = f"JAX traces {source}, and its rule holds a Ref that was made in the function."
            raise HoldsRefError(f"{text} Make the Ref before the call, and pass it as an argument.")
        values = [v for i, v in enumerate(values) if i not in refs]
        shown = Shown(outputs, rule, refs, grad_fn.accepts_variables, grad_fn.source)
        return (leaves, values), shown

    paths = layout.leaf_paths()
    shown_names = [*["closed over"] * len(captured), *(paths[i] for i in layout.operands)]
    return traced(arrays, captured, *inputs, source=source, names=shown_names)


def evaluated(
    evaluate: AnyFunction,  # `Traced.run`
    shown: Shown,  # without its Refs, which are values
    consts: Values,
    captured: Sequence[Leaf | None],  # None for one that the jaxpr does not read
    refs: Refs,
    inputs: Values,
) -> Result:
    """Return what a traced call returns at these values."""
    leaves, values = evaluate(consts, [*captured, *inputs])
    for i, ref in refs.items():
        values.insert(i, ref)
    copies = shown.rule.copies(values)
    rule = GradFn(copies.values[0], shown.accepts_variables, shown.rule_source, copies.watched)
    return leaves, shown.outputs, rule


class Transparent(NamedTuple):
    """A call that can be copied, and what its value uses."""

    call: Call
    used: list[tuple[Leaf, SourceInfo]]  # tracers and arrays, with the line that uses each first


def transparent(call: Call, capture: Capture) -> Transparent:
    """Return the same call, whose functions evaluate jaxprs around lists of tracers.

    `f` runs once, now: a copy of it, or `f` itself if nothing of it is captured. Then what its rule
    holds may be the user's, or made by `f`.
    """
    source, skeleton = call.spec.source, capture.skeleton

    def run(captured: Values, inputs: Values) -> tuple[Result, Sequence[Watched] | None]:
        copies = skeleton.copies(captured)
        apply = copies.values[0]
        result = apply(inputs)
        refuse_assigned(copies.watched, source)
        return result, None if apply is call.apply else copies.watched

    def copyable(result: Result) -> Gradients:
        leaves, outputs, grad_fn = result
        # To see what `y` uses, `f` runs again: this trace has not ended.
        chooses = call.chooses(grad_fn.accepts_variables)
        note_another_run(source)
        variables = _undeclared(_value(call), outputs.count) if chooses else call.declared
        return transparent_rule(source, grad_fn, outputs.cotangents(leaves), *variables)

    names = source, call.spec.inputs
    f = trace_call(run, capture.values, call.operands, names, copyable)
    refs, shown = f.aside.refs, f.aside._replace(refs={})
    # A layer that reaches all weights of a model reads few of them. The others go: each would be an
    # operand of the layer, and the cost of the model quadratic in its size.
    reads = f.reads()[: len(capture.values)]
    read = [v if is_read else None for v, is_read in zip(capture.values, reads, strict=True)]
    apply = functools.partial(evaluated, f.run, shown, f.consts, read, refs)
    primal = None
    if call.primal is not None:
        y = traced(lambda *operands: (call.primal(operands), None), *call.operands)
        primal = functools.partial(y.run, y.consts)
    every = [*f.consts, *capture.values]
    used = [(every[i], at) for i, at in f.uses(shown.outputs.count).items() if i < len(every)]
    return Transparent(dataclasses.replace(call, apply=apply, primal=primal), used)


def _value(call: Call) -> Traced:
    """Trace the leaves of `y` alone."""

    def leaves(*operands: Leaf) -> tuple[list[Leaf], None]:
        with plainly():
            return call.apply(operands)[0], None

    return traced(leaves, *call.operands)


def _undeclared(y: Traced, results: int) -> tuple[Variables | None, list[Leaf]]:
    """Return the differentiable tracers that these results use, as variables, and as a list."""
    used = [y.consts[i] for i in y.uses(results) if i < len(y.consts)]
    values = [v for v in used if is_traced([v]) and spec(v).differentiable]
    return Variables.listed(values, list(map(spec, values))) if values else None, values
