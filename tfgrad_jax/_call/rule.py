"""A rule that `f` has returned, as JAX keeps it: a function of residuals that holds no tracer.

put together   around the residuals of each run: where `taken_apart` finds all its tracers
revived        as it is, in the backward pass: eagerly, if an object holds a tracer
recorded       elsewhere, if an object holds one: traced at once, before that tracer ends
"""

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer

from .._closure.functions import Apart, taken_apart
from .._closure.traced import traced
from .._closure.walk import ARRAYS, Matches, held_by, survey
from .._frontend.grad_fn import Call, GradFn, Held
from .._frontend.within import added
from .._jax.trace import is_of
from .._jax.types import Indices, Leaf, OperandIndex, Values
from .._jax.watch import Watch
from .._jax.watching import replacing, reviving
from .._messages import errors
from .._messages.runs import annotate_recorded
from .weights import Weights

Gradients: TypeAlias = list[Leaf | None]
Derivatives: TypeAlias = tuple[Any, ...]  # traces of JAX's, from that of the outermost call on
_CONFIG: Any = jax.config

# Values of the listed variables, residuals of the rule, cotangents, the variables that it gets
# (as positions among the operands too) -> the gradients of the inputs, then of these variables.
Body: TypeAlias = Callable[[Values, Values, Any, Indices], Gradients]

# How deep something is in itself may differ where a `jit` inside returns a trace from its cache.
TRACING: ContextVar[tuple[object, ...]] = ContextVar(
    "the code of functions that are being traced, and of rules with what these hold", default=()
)


class Rule(NamedTuple):
    """A rule. `places` says which residuals are the listed variables, and then what it holds.

    A weight that is both is one residual, so that `v is w` holds in the rule.
    """

    body: Body
    weights: Weights
    places: Sequence[int]
    captured: int = 0  # how many operands come before the inputs

    def run(self, residuals: Values, cotangents: Values, wanted: Sequence[int]) -> Gradients:
        """Return the gradients of the operands that are wanted."""
        weights = self.weights
        weights.check(wanted, {})  # at an outer derivative
        # Two weights may be one array. A rule that finds its weight among its variables, as in
        # `v is w`, gave both the gradient of the first.
        known = dict[int, int]()
        residuals = [
            r.copy() if known.setdefault(id(r), k) < k and isinstance(r, jax.Array) else r
            for k, r in enumerate(residuals)
        ]
        n, every = len(weights.listed), [residuals[i] for i in self.places]
        variables, values, listed = weights.argument(every[:n], wanted)
        found = self.body(every[n:], cotangents, (variables, values), listed)
        inputs = range(self.captured, self.captured + len(found) - len(listed))
        by_operand: dict[OperandIndex, Leaf | None] = {}
        for i, g in zip([*inputs, *listed], found, strict=True):
            other = by_operand.get(i)
            by_operand[i] = g if other is None else other if g is None else other + g
        return [by_operand.get(i) for i in wanted]


class Kept(NamedTuple):
    """A rule, with its residuals."""

    rule: Rule
    residuals: list[Leaf]
    own: Sequence[int]  # which of these are the only output of `f`
    read: Values | None  # what it certainly reads; None: it says so when it runs


def kept(
    call: Call,
    grad_fn: GradFn,
    leaves: Values,
    weights: Weights,
    takes: Matches,
    y: Leaf | None,
    ofs: Derivatives | None = None,
) -> Kept:
    """Return a rule as a function of residuals.

    `y` is the only output, if `f` has made it: its derivative is the declared one. `ofs` are the
    derivatives that are on, if the rule will run eagerly; None: it may run anywhere.
    """
    holds = takes if y is None else lambda v: takes(v) or v is y
    apart = taken_apart(grad_fn.held, holds, call.held.roots, looks=ofs is None)
    if apart.is_whole and not (any(p.is_outer for p in apart.every) if ofs else apart.hidden):
        body, held, read = _put_together(grad_fn, apart), apart.taken, apart.held
    elif ofs is not None and not _CONFIG.jax_check_tracer_leaks:  # it holds tracers
        body, held, read = _revived(call, grad_fn, apart, weights, ofs), [], None
    else:
        body, held = _recorded(call, grad_fn, leaves, weights, y)
        read = held
    every = [*weights.values, *held]
    residuals = list({id(v): v for v in every}.values())
    at = {id(v): k for k, v in enumerate(residuals)}
    own = [k for k, r in enumerate(residuals) if y is not None and r is y]
    rule = Rule(body, weights._replace(operands=[]), [at[id(v)] for v in every])
    return Kept(rule, residuals, own, read)


def is_made(y: Leaf, held: Held, inputs: Values, watch: Watch | None) -> bool:
    """Return whether `f` has made a value: it is no input, and nothing that `f` holds."""
    if any(y is x for x in inputs):
        return False
    if isinstance(y, Tracer):
        return watch is None or not watch.is_outside(y)
    return isinstance(y, ARRAYS) and not survey(held, lambda v: v is y).leads


def _put_together(grad_fn: GradFn, apart: Apart) -> Body:
    apart, gradients, source = apart.forget(), grad_fn.gradients, grad_fn.source

    def body(residuals: Values, cotangents: Values, variables: Any, _: Any) -> Gradients:
        apart.refuse_rebound(source)
        rule, is_unchanged = apart.rebuilt(residuals)
        found: Gradients = gradients(rule, cotangents, *variables)
        if not is_unchanged():
            raise errors.changed(source)
        return found

    return body


def _revived(call: Call, grad_fn: GradFn, apart: Apart, weights: Weights, ofs: Derivatives) -> Body:
    gradients, source = grad_fn.gradients, grad_fn.source
    known = {id(v): v for v in (*weights.operands, *call.operands)}
    operands = weights.operands

    def body(_: Values, cotangents: Values, variables: Any, listed: Indices) -> Gradients:
        apart.refuse_rebound(source)
        if weights.is_by_use:  # not their values: `v is self.w`
            variables = variables[0], [operands[i] for i in listed]
        with reviving(ofs, lambda: errors.left_behind(source)) as watch:
            rule, _is_unchanged = apart.rebuilt(None)
            found = gradients(rule, cotangents, *variables)
            run = watch.run
            read = [v for v, _ in run.uses if run.is_captured(v) and id(v) not in known]
            weights.warn_of(call.held, [v for v in read if is_of(v, ofs[-1])], rule)
            return [None if g is None else watch.lower(g) for g in found]

    return body


def _recorded(
    call: Call, grad_fn: GradFn, leaves: Values, weights: Weights, y: Leaf | None
) -> tuple[Body, Values]:
    """Record a rule now; also return what it reads.

    It may never run. So it raises what it raises when it would.
    """
    source, outputs = call.spec.source, grad_fn.outputs
    same = source.code, *(id(v) for _, v in held_by(call.held.f)), *map(id, call.held.bound_to)
    variables, some, positions = weights.argument(weights.values, weights.listed)

    def rule(_: Watch, *given: Leaf) -> tuple[Gradients, None]:
        cotangents = given[: len(outputs.differentiable)]
        others = given[len(cotangents) :]
        with replacing([y], others) if others else contextlib.nullcontext():
            found = grad_fn.gradients(grad_fn.held, cotangents, variables, some)
        return [others[0] if others and g is y else g for g in found], None

    own = [] if y is None else [outputs.only(leaves)]
    given = *outputs.cotangents(leaves), *own
    try:
        with added(TRACING, same) as around:
            if around.count(same) >= 3:  # orders of a rule that is recorded inside itself
                raise errors.endless(source)
            done = traced(rule, *given, source=grad_fn.source, is_rule=True)
    except Exception as error:
        annotate_recorded(error, source)
        failed = error.with_traceback(None)
        failed.__context__ = failed.__cause__ = None

        def fails(*_: Any) -> Any:
            raise failed

        return fails, ()
    run, n, k, n_own = done.run, len(positions), len(done.consts), len(own)  # no tracer
    # `y` is an operand, so that what the rule reads of it has the declared derivative. If it reads
    # nothing of it, as a method may, `y` would still stay alive until the backward pass: twice the
    # memory of the same rule as a closure, under `jit`.
    jaxpr = done.jaxpr
    read = {id(a) for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars) for a in atoms}
    kept_y = [y] * (y is not None and id(jaxpr.invars[-1]) in read)

    def body(residuals: Values, cotangents: Values, _: Any, listed: Indices) -> Gradients:
        y = residuals[k:] or cotangents[:n_own]  # any array will do for what it does not read
        every = run(residuals[:k], [*cotangents, *y])
        of_variables = dict(zip(positions, every[len(every) - n :], strict=True))
        return [*every[: len(every) - n], *(of_variables[i] for i in listed)]

    return body, [*done.consts, *kept_y]
