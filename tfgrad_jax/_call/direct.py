"""A call where JAX differentiates: `f` runs as it is, one level down."""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import find_top_trace, set_current_trace
from jax.tree_util import tree_unflatten

from tfgrad_jax._autodiff.attached import arrays
from tfgrad_jax._autodiff.custom import record
from tfgrad_jax._autodiff.function import Forward
from tfgrad_jax._closure.walk import constants_of, survey
from tfgrad_jax._frontend.grad_fn import Call, Held
from tfgrad_jax._jax.trace import has_values, is_forward, is_of, plainly
from tfgrad_jax._jax.types import Leaf, PyTree, is_differentiable, spec
from tfgrad_jax._jax.watch import Run, Watch, is_live
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.runs import explain_derivative

from .rule import kept
from .weights import Weights, names_of

_ARRAYS = jax.Array, np.ndarray, np.generic


def direct(call: Call, name: str, of: Any) -> PyTree:
    """Return `y`. `of` is the trace that differentiates."""
    now, source = find_top_trace(()), call.spec.source
    outer = now if isinstance(now, Watch) else None

    def at_level(v: Leaf) -> Leaf:
        return v if outer is None else outer.lower(v)

    below, are_values = of.parent_trace, has_values(of.parent_trace)
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_trace(below))
        stack.enter_context(jax.named_scope(name))
        primals = arrays([of.to_primal_tangent_pair(at_level(v))[0] for v in call.operands])
        constants = None if outer is not None else _constants(call)
        watch, inputs = None, primals
        if constants is None:
            run = Run(of, call.operands, lambda: errors.left_behind(source))
            aliases = _aliases(call, of) if is_forward(of) else {}
            watch = Watch.running(below, run, of=of, outer=outer, instead=aliases)
            watch = stack.enter_context(watch)
            inputs = watch.shown(primals)
        filled = call.held.filled(call.spec.inputs, inputs)
        try:
            # JAX does not differentiate values again: functions inside need no rules.
            with plainly() if are_values else contextlib.nullcontext():
                leaves, outputs, grad_fn = call.apply(filled)
        except Exception as error:
            explain_derivative(error, source)
            raise
        y, is_its = grad_fn.y, lambda v: isinstance(v, Tracer) and is_of(v, of)
        lower = lambda v: v  # noqa: E731
        if watch is None or constants is not None:
            weights = Weights.of(call, grad_fn, None)
            is_made = isinstance(y, _ARRAYS) and not any(y is v for v in (*constants, *inputs))
        else:
            lower, is_its = watch.lower, lambda v: watch.lower(v) is not v
            leaves = watch.returned(leaves)
            weights = Weights.of(call, grad_fn, run)
            is_made = not any(y is v for v in inputs) and _has_made(watch, y, call.held)
        captured = len(weights.operands)
        taken = [*weights.operands, *call.operands]
        operands = list(map(at_level, taken))
        primals = [*map(lower, weights.operands), *primals]
        wanted = [i for i, (o, p) in enumerate(zip(operands, primals, strict=True)) if o is not p]
        refused = {i: taken[i] for i in wanted if i in weights.refused}
        weights.check(wanted, names_of(call.held, refused))
        y = y if is_made and not are_values else None
        takes = is_its if are_values else is_live
        rule, residuals, own, read = kept(
            call, grad_fn, outputs, leaves, weights, takes, y, of if are_values else None
        )
        if weights.may_warn:
            known = {id(v) for v in taken}
            outside = [v for v in read if watch is not None and watch.is_outside(v)]
            alone = {i: v for i, v in enumerate(outside) if is_its(v) and id(v) not in known}
            alone = {i: v for i, v in alone.items() if is_differentiable(v.dtype)}
            names = names_of(call.held, alone, grad_fn.held)
            weights.warn({i: spec(v) for i, v in alone.items()}, names)
        residuals = list(map(lower, residuals))
        for k in own:
            residuals[k] = outputs.only(leaves)
    rule = rule._replace(captured=captured)
    gives = {*weights.listed, *weights.refused, *range(captured, len(operands))}
    if are_values:  # JAX need not carry what the rule holds
        forward = Forward(
            leaves,
            outputs.differentiable,
            lambda _, *others: rule.run(residuals, *others),
            [],
            gives,
        )
    else:
        forward = Forward(leaves, outputs.differentiable, rule.run, residuals, gives)
    with set_current_trace(of):
        leaves = record(forward, name, source, operands, primals, of)
    if outer is not None:
        leaves = outer.handed_on(taken, leaves)
    return tree_unflatten(outputs.treedef, leaves)


def _constants(call: Call) -> list[object] | None:
    """Return the arrays that `f` can read from outside; None if there may be others."""
    held = call.held
    if call.variables is not None or held.bound_to:
        return None
    return constants_of([held.f, *held.inputs, *held.keywords.values()])


def _aliases(call: Call, of: Any) -> dict[int, Leaf]:
    """Return the weights of a call by the identities of the values inside.

    In forward mode, `jax.lax.stop_gradient(w)` returns the value inside `w` without an operation,
    so no watch sees it. The list of variables had `w` in reverse mode alone.
    """
    weights: list[Leaf] = []
    survey(call.held, lambda v: isinstance(v, Tracer) and is_of(v, of) and weights.append(v))
    return {id(of.to_primal_tangent_pair(w)[0]): w for w in weights}


def _has_made(watch: Watch, y: Leaf, held: Held) -> bool:
    """Return whether code has made a value, and has not found it."""
    if isinstance(y, Tracer):
        return not watch.is_outside(y)
    return isinstance(y, _ARRAYS) and not survey(held, lambda v: v is y).leads
