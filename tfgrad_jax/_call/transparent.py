"""Run `f`: a copy of it, or in a trace.

`run_copy` runs a copy. `traced_call` traces `f`: its value and its rule then come from a jaxpr, and
can be copied. The results of the jaxpr are the leaves of `y`, and the tracers that the rule holds.
The rule itself does not run: run for a look, it would use up a list that `f` filled for it, raise
where nobody differentiates, or write. A traced call holds lists of the tracers that `f` uses, and
of those that its rule reaches, whatever the call closed over.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from tfgrad_jax._closure.assigned import refuse_assigned, watched_objects
from tfgrad_jax._closure.names import named_in
from tfgrad_jax._closure.reach import Id, is_captured, reach, survey
from tfgrad_jax._closure.skeleton import Copies, Skeleton, hoist_tracers
from tfgrad_jax._closure.snapshot import Owned, Watched
from tfgrad_jax._closure.traced import traced
from tfgrad_jax._frontend.grad_fn import (
    Apply,
    Call,
    CallSpec,
    GradFn,
    HeldByRule,
    HeldByTrace,
    Result,
    Variables,
)
from tfgrad_jax._frontend.structure import Outputs
from tfgrad_jax._jax.compat import is_ref, value_in
from tfgrad_jax._jax.reasons import Why
from tfgrad_jax._jax.trace import is_forward, is_innermost, is_live, plainly
from tfgrad_jax._jax.types import AnyFunction, Leaf, PyTree, is_traced, spec
from tfgrad_jax._messages import errors

from .rule import Own, Values, transparent_rule

_T = TypeVar("_T")


class Ran(NamedTuple, Generic[_T]):
    """A run of a copy."""

    result: _T
    watched: list[Watched]  # what may not be assigned to: copies, containers around the inputs
    owned: Owned  # what it held


def run_copy(spec: CallSpec, run: Callable[[Any], _T], copies: Copies, inputs: Values) -> Ran[_T]:
    """Run `f`, or a `primal`, on a copy of what a call holds, and on its inputs."""
    (held,) = copies.values
    filled = held.filled(spec.inputs, inputs)
    rebuilt = spec.inputs.rebuilt(filled.inputs, held.inputs)
    watched = [*copies.watched, *watched_objects(rebuilt, containers=True)]
    result = run(filled)
    refuse_assigned(watched, spec.source, [filled])
    return Ran(result, watched, Owned(filled))


class _Shown(NamedTuple):
    """What a trace of a call has shown besides arrays."""

    outputs: Outputs
    rule: GradFn | None  # it holds arrays, in a list, which the trace returns; None: not copied
    refs: dict[int, Leaf]  # by their place in that list: a trace cannot return them


class TracedCall(NamedTuple):
    """What a trace has shown of a call."""

    call: Call | None  # evaluates a jaxpr; None if that cannot return its rule
    reads_hidden: bool  # whether `f` reads a tracer that was not captured
    accepts_variables: bool = False  # whether the rule does


def traced_call(call: Call, skeleton: Skeleton, captured: Values, why: Why) -> TracedCall:
    """Return the same call, which evaluates a jaxpr.

    `f` runs once, now: a copy of it, or `f` itself if nothing of it is captured. A note says `why`
    it is traced, if it needs a value.
    """
    values = {i: v for i, v in enumerate(captured) if not is_ref(v)}  # a trace gets no Ref

    def run(values: dict[int, Leaf], *inputs: Leaf) -> tuple[PyTree, _Shown]:
        copies = skeleton.copies([values.get(i, v) for i, v in enumerate(captured)])
        itself = call if copies.values[0] is call.held else None
        return _shown(call.spec, call.apply, copies, inputs, itself)

    paths, operands = call.spec.inputs.leaf_paths(), call.spec.inputs.operands
    names = [*["closed over"] * len(values), *(paths[i] for i in operands)]
    is_copied = len(captured) > len(call.declared[1])
    stopped = _stopped(call) if is_forward() and not is_copied else {}
    f = traced(
        run, values, *call.operands, source=call.spec.source, names=names, why=why, stopped=stopped
    )
    shown: _Shown = f.aside
    hidden = [c for c in f.consts if is_traced([c]) and not is_ref(c)]
    if not all(map(is_live, hidden)):  # its trace has ended
        raise errors.hidden_tracer(call.spec.source)
    if shown.rule is None:
        return TracedCall(None, bool(hidden))
    # A layer that reaches all weights of a model reads few of them. The others go: each would be an
    # operand of the layer, and the cost of the model quadratic in its size.
    consts = [*f.consts, *values.values()]
    consts = [v if is_read else None for v, is_read in zip(consts, f.reads(), strict=False)]
    evaluating = _evaluating(call, f.run, consts, shown, shown.rule)
    return TracedCall(evaluating, bool(hidden), shown.rule.accepts_variables)


def _stopped(call: Call) -> dict[Id, Leaf]:
    """Return tracers of forward mode that a call holds, by the ids of the values in them.

    The values that `stop_gradient` takes out of these tracers stand for them, where the objects
    that hold them are not copied: `y` depends on them, as in reverse mode.
    """
    found = survey([call.held], is_captured)
    values = [(value_in(tracer), tracer) for tracer in found.captured.values()]
    return {id(v): t for v, t in values if v is not t and id(v) not in found.visited}


def _evaluating(
    call: Call, evaluate: AnyFunction, consts: list[Leaf], shown: _Shown, rule: GradFn
) -> Call:
    """Return a call that evaluates a jaxpr, around its constants and the Refs of its rule."""
    outputs, refs = shown.outputs, list(shown.refs)

    def apply(held: HeldByTrace) -> Result:
        leaves, kept = evaluate(held.consts, held.inputs)
        for i, ref in zip(refs, held.refs, strict=True):
            kept.insert(i, ref)
        return leaves, outputs, rule._replace(held=tuple(kept), y=outputs.only(leaves))

    held, primal = HeldByTrace(tuple(consts), tuple(shown.refs.values())), None
    if (run := call.primal) is not None:
        layout = call.spec.inputs
        f = traced(lambda *xs: (run(call.held.filled(layout, xs)), None), *call.operands)
        value, of_primal = f.run, tuple(f.consts)
        primal = lambda held: value(held.of_primal, held.inputs)  # noqa: E731
        held = held._replace(of_primal=of_primal)
    return dataclasses.replace(call, apply=apply, primal=primal, held=held)


def _shown(
    spec: CallSpec, apply: Apply, copies: Copies, inputs: Values, itself: Call | None = None
) -> tuple[PyTree, _Shown]:
    """Run `f` in a trace, copied or `itself`: return arrays, and what else the trace shows."""
    (leaves, outputs, grad_fn), watched, owned = run_copy(spec, apply, copies, inputs)
    own = Own(grad_fn, outputs.only(leaves), owned)
    found = reach([grad_fn.held], own.takes)
    makes_ref = any(is_ref(v) and is_innermost(v) for v in found.captured.values())
    if itself is None and (found.obstacle or makes_ref):
        return (leaves, []), _Shown(outputs, None, {})
    if makes_ref:
        raise errors.makes_ref(spec.source)
    if itself is not None and found.obstacle:
        # It may hold tracers of this trace, which ends: so the rule is traced now, too. Then it
        # runs where nobody differentiates.
        grad_fn = _traced_rule(itself, leaves, outputs, grad_fn)
        found = reach([grad_fn.held], own.takes)
    if itself is not None:  # what its rule holds may be the user's, or made by `f`
        watched += watched_objects(found.on_way())
    rule, kept = hoist_tracers([grad_fn.held], found, watched, owned=owned)
    kept = own.as_array(kept)
    refs = {i: v for i, v in enumerate(kept) if is_ref(v)}
    arrays = [v for v in kept if not is_ref(v)]
    ids = named_in(grad_fn.held, found) if grad_fn.accepts_variables else ()
    named = [i for i, v in enumerate(kept) if id(v) in ids]
    return (leaves, arrays), _Shown(outputs, _around(rule, grad_fn)._replace(named=named), refs)


def _around(rule: Skeleton, grad_fn: GradFn) -> GradFn:
    """Return a rule that is copied where it runs, around the arrays that it then holds."""
    run, source = grad_fn.gradients, grad_fn.source

    def gradients(kept: HeldByRule, *others: Any) -> list[Leaf | None]:
        copies = rule.copies(kept)
        returned = run(copies.values[0], *others)
        refuse_assigned(copies.watched, source, copies.values)
        return returned

    return grad_fn._replace(gradients=gradients, held=None, y=None)


def _traced_rule(call: Call, leaves: Values, outputs: Outputs, grad_fn: GradFn) -> GradFn:
    """Trace a rule, with the declared variables, or the differentiable tracers that `y` uses."""
    variables, values = call.declared
    if call.variables is None and grad_fn.accepts_variables:

        def y(*operands: Leaf) -> tuple[list[Leaf], None]:
            with plainly():
                return call.apply(call.held.filled(call.spec.inputs, operands))[0], None

        f = traced(
            y, *call.operands, stopped=_stopped(call) if is_forward() else {}
        )  # `f` runs again: the trace that shows its uses has not ended
        used = [f.consts[i] for i in f.used_by(outputs.count)]
        values = [v for v in used if is_traced([v]) and spec(v).differentiable]
        variables = Variables.listed(values, list(map(spec, values))) if values else None
    upstreams = outputs.cotangents(leaves)
    return transparent_rule(call.spec.source, grad_fn, upstreams, variables, values)
