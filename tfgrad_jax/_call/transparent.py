"""Trace a call: its value and its rule then come from a jaxpr, and can be copied.

`by_trace` runs `f` once. The results of its jaxpr are the leaves of `y`, and the tracers that the
rule holds. The rule itself does not run: run for a look, it would use up a list that `f` filled for
it, raise where nobody differentiates, or write. The new call holds lists of the tracers that `f`
uses, and of those that its rule reaches, whatever the call closed over.
"""

import dataclasses
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jax.errors import UnexpectedTracerError

from tfgrad_jax._closure.assigned import refuse_assigned, watched_objects
from tfgrad_jax._closure.path import named_in
from tfgrad_jax._closure.reach import reach
from tfgrad_jax._closure.skeleton import Copies, Skeleton, hoist_tracers
from tfgrad_jax._closure.traced import Uses, traced
from tfgrad_jax._frontend.grad_fn import Apply, Call, GradFn, Held, Primal, Result, Variables
from tfgrad_jax._frontend.structure import Outputs
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_live, is_own, plainly
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree, is_traced, spec
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

from .capture import Capture, CapturedIndex, Names, Values, captured, reached
from .rule import made, takes_also, transparent_rule


class _Shown(NamedTuple):
    """What a trace of a call has shown besides arrays."""

    outputs: Outputs
    rule: GradFn | None  # it holds arrays, in a list, which the trace returns; None: not copied
    accepts_variables: bool  # whether the rule does
    refs: dict[int, Leaf]  # by their place in that list: a trace cannot return them
    # Which of the results are arrays that the code of a rule names that accepts `variables`.
    named: Sequence[int] = ()


def evaluated(
    apply: Apply,
    skeleton: Skeleton,
    captured: Values,
    inputs: Values,
    undeclared: Collection[CapturedIndex],
    source: Source,
) -> tuple[Result | None, Uses, Collection[CapturedIndex]]:
    """Run a copy of `f` once, in a trace of the undeclared values alone, which sees all others.

    Return what `f` returned, from the jaxpr, how `y` uses these values, and which its rule reads.
    None if the rule cannot be returned from a trace.
    """

    def run(some: dict[CapturedIndex, Leaf]) -> tuple[PyTree, _Shown]:
        copies = skeleton.copies([some.get(i, v) for i, v in enumerate(captured)])
        return _shown(apply, copies, inputs, source)

    some = {i: captured[i] for i in sorted(undeclared)}
    why, names = errors.undeclared(source), ["closed over"] * len(some)
    f = traced(run, some, source=source, names=names, outside=True, why=why)
    first, shown = len(f.consts), f.aside
    if not all(map(is_live, (c for c in f.consts if is_traced([c])))):
        raise errors.hidden_tracer(source)
    uses = {[*some][i - first]: at for i, at in f.uses(shown.outputs.count).items() if i >= first}
    if shown.rule is None:
        return None, uses, ()
    read = {[*some][i - first] for i in f.used(shown.named) if i >= first}
    leaves, kept = f.run(f.consts, [*some.values()])
    for i, ref in shown.refs.items():
        kept.insert(i, ref)
    return (leaves, shown.outputs, shown.rule._replace(held=kept)), uses, read


def by_trace(capture: Capture, why: str) -> Capture:
    """Return the same call, which evaluates a jaxpr, and what it captures.

    `f` runs once, now: a copy of it, or `f` itself if nothing of it is captured. If the rule of a
    copy cannot be returned from a trace, the call stays as it is, and only its uses are known.
    `why` is for the note if `f` needs a value.
    """
    call, every, found = capture.call, capture.values, capture.found
    held = call.held
    values = {i: v for i, v in enumerate(every) if not is_ref(v)}  # a trace gets no Ref

    def run(values: dict[int, Leaf], *inputs: Leaf) -> tuple[PyTree, _Shown]:
        copies = capture.skeleton.copies([values.get(i, v) for i, v in enumerate(every)])
        is_itself = all(map(operator.is_, copies.values, call.held))
        return _shown(call.apply, copies, inputs, call.spec.source, call if is_itself else None)

    paths, operands = call.spec.inputs.leaf_paths(), call.spec.inputs.operands
    names = [*["closed over"] * len(values), *(paths[i] for i in operands)]
    f = traced(run, values, *call.operands, source=call.spec.source, names=names, why=why)
    shown: _Shown = f.aside
    hidden = [c for c in f.consts if is_traced([c]) and not is_ref(c)]
    if not all(map(is_live, hidden)):
        raise UnexpectedTracerError(errors.left_behind(call.spec.source))
    # A layer that reaches all weights of a model reads few of them. The others go: each would be an
    # operand of the layer, and the cost of the model quadratic in its size.
    reads = zip(values.values(), f.reads(), strict=False)
    consts = [*f.consts, *(v if is_read else None for v, is_read in reads)]
    if shown.rule is not None:
        call = _evaluating(call, f.run, consts, shown, shown.rule)
        capture = captured(call, reached(call))
    place = {id(v): i for i, v in enumerate(capture.values)}
    used = [(id(consts[i]), at) for i, at in f.uses(shown.outputs.count).items() if i < len(consts)]
    uses = {place[key]: at for key, at in used if key in place}
    named = [id(consts[i]) for i in f.used(shown.named) if i < len(consts)]
    read = {place[key] for key in named if key in place}.difference(uses)
    return capture._replace(
        uses=uses,
        read=read,
        names=Names.of(held, found, {i: capture.values[i] for i in (*uses, *read)}),
        accepts_variables=shown.accepts_variables,
        reads_hidden=bool(hidden),
    )


def _evaluating(
    call: Call, evaluate: AnyFunction, consts: list[Leaf], shown: _Shown, rule: GradFn
) -> Call:
    """Return a call that evaluates a jaxpr, around its constants and the Refs of its rule."""
    outputs, refs = shown.outputs, list(shown.refs)

    def apply(held: Held, inputs: Values) -> Result:
        leaves, kept = evaluate(held[0], inputs)
        for i, ref in zip(refs, held[1], strict=True):
            kept.insert(i, ref)
        return leaves, outputs, rule._replace(held=kept)

    held: list[Any] = [consts, list(shown.refs.values())]
    primal: Primal | None = None
    if (run := call.primal) is not None:
        value, of_primal, *_ = traced(lambda *xs: (run(call.held, xs), None), *call.operands)
        primal = lambda held, inputs: value(held[2], inputs)  # noqa: E731
        held.append(of_primal)
    return dataclasses.replace(call, apply=apply, primal=primal, held=held)


def _shown(
    apply: Apply, copies: Copies, inputs: Values, source: Source, itself: Call | None = None
) -> tuple[PyTree, _Shown]:
    """Run `f` in a trace, copied or `itself`: return arrays, and what else the trace shows."""
    leaves, outputs, grad_fn = apply(copies.values, inputs)
    refuse_assigned(copies.watched, source)
    takes = takes_also(made(copies.values, [leaves[i] for i in outputs.differentiable]))
    found = reach(grad_fn.held, takes)
    makes_ref = any(is_ref(v) and is_own(v) for v in found.captured.values())
    accepts = grad_fn.accepts_variables
    if itself is None and (found.obstacle or makes_ref):
        return (leaves, []), _Shown(outputs, None, accepts, {})
    if makes_ref:
        raise errors.makes_ref(source)
    if itself is not None and found.obstacle:
        # It may hold tracers of this trace, which ends: so the rule is traced now, too. Then it
        # runs where nobody differentiates.
        grad_fn = _traced_rule(itself, leaves, outputs, grad_fn)
        found = reach(grad_fn.held, takes)
    # What the rule of `f` itself holds may be the user's, or made by `f`.
    watched = copies.watched if itself is None else watched_objects(found.on_way())
    rule, kept = hoist_tracers(grad_fn.held, found, watched)
    refs = {i: v for i, v in enumerate(kept) if is_ref(v)}
    arrays = [v for v in kept if not is_ref(v)]
    ids = named_in(grad_fn.held) if accepts else ()
    named = [i for i, v in enumerate(arrays, len(leaves)) if id(v) in ids]
    return (leaves, arrays), _Shown(outputs, _around(rule, grad_fn), accepts, refs, named)


def _around(rule: Skeleton, grad_fn: GradFn) -> GradFn:
    """Return a rule that is copied where it runs, around the arrays that it then holds."""
    run, source = grad_fn.gradients, grad_fn.source

    def gradients(held: Held, *others: Any) -> list[Leaf | None]:
        copies = rule.copies(held)
        returned = run(copies.values, *others)
        refuse_assigned(copies.watched, source)
        return returned

    return grad_fn._replace(gradients=gradients, held=())


def _traced_rule(call: Call, leaves: Values, outputs: Outputs, grad_fn: GradFn) -> GradFn:
    """Trace a rule, with the declared variables, or the differentiable tracers that `y` uses."""
    variables, values = call.declared
    if call.chooses(grad_fn.accepts_variables):

        def y(*operands: Leaf) -> tuple[list[Leaf], None]:
            with plainly():
                return call.apply(call.held, operands)[0], None

        f = traced(y, *call.operands)  # `f` runs again: the trace that shows its uses has not ended
        used = [f.consts[i] for i in f.uses(outputs.count) if i < len(f.consts)]
        values = [v for v in used if is_traced([v]) and spec(v).differentiable]
        variables = Variables.listed(values, list(map(spec, values))) if values else None
    upstreams = outputs.cotangents(leaves)
    return transparent_rule(call.spec.source, grad_fn, upstreams, variables, values)
