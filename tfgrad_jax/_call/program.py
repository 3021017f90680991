"""A call that JAX records or maps: a function of operands, which JAX differentiates later.

traced   at the call: the tracers that `f` took from outside are constants of the jaxpr, and so
operands
late     when JAX differentiates: its `primal` runs till then, and no tracer can be reached
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef, tree_flatten

from .._autodiff.attached import Forward, Function
from .._closure.functions import taken_apart
from .._closure.traced import Traced, traced
from .._closure.walk import survey
from .._frontend.grad_fn import Call, Held
from .._frontend.signature import requires_variables
from .._frontend.structure import Outputs
from .._frontend.within import added
from .._jax.compat import is_ref, type_of
from .._jax.shown import is_live
from .._jax.trace import plainly
from .._jax.types import Aval, Indices, Leaf, OperandIndex, PyTree, Values, has_gradient
from .._jax.watch import Watch
from .._messages import errors
from .._messages.source import Source
from .ordinary import with_ordinary_gradients
from .rule import TRACING, Kept, is_made, kept
from .weights import Refused, Weights, names_of

Evaluate: TypeAlias = Callable[[Values], list[Leaf]]  # of operands


class _Aside(NamedTuple):
    """What a traced run of `f` returned besides arrays."""

    outputs: Outputs
    weights: Weights
    kept: Kept
    refs: Mapping[int, Leaf]  # residuals that are Refs: these, or which input
    # By identity: what the rule holds, and that which it certainly reads.
    held: Collection[int]
    read: Collection[int]


def is_late(call: Call) -> bool:
    """Return whether `f` is traced if JAX differentiates the call: till then its primal runs.

    No tracer can be reached from the call then, but for its operands.
    """
    held = call.held
    return held.primal is not None and not survey((held, call.variables), is_live).leads


def late(call: Call) -> tuple[Function, "TypeOfY", list[Leaf]]:
    """Return such a call as what JAX can differentiate, and its operands."""
    spec, types, of_call = call.spec, TypeOfY(), dataclasses.replace(call, operands=[])
    # As it was at the call: functions may have other variables by then.
    held = taken_apart(call.held, lambda _: False, (), looks=False)

    def value(operands: Values) -> list[Leaf]:
        with plainly():
            return _leaves(of_call, types, operands)

    def forward(operands: Values, perturbed: Indices) -> Forward:
        held.refuse_rebound(spec.source)
        now = held.rebuilt(None)[0]._replace(primal=None)
        call = dataclasses.replace(of_call, held=now, operands=[*operands])
        program, outputs, every = traced_call(call)
        if len(every) > len(operands):
            raise errors.leaked(spec.source)
        forward = program.forward(every, perturbed)
        types.note(spec.source, outputs.treedef, forward.leaves)
        return forward

    program = Function(spec.source, spec.inputs.operand_paths, value, forward, has_primal=True)
    return program, types, call.operands


def traced_call(call: Call) -> tuple[Function, Outputs, list[Leaf]]:
    """Trace `f`, around the tracers that it captured."""
    of_call, held, n_inputs = call.spec, call.held, len(call.operands)
    paths = of_call.inputs.operand_paths()

    def f(watch: Watch, *xs: Leaf) -> tuple[list[Leaf], _Aside]:
        leaves, grad_fn = of_call.apply(held.filled(of_call.inputs, xs))
        y, outputs, places = grad_fn.y, grad_fn.outputs, {id(x): i for i, x in enumerate(xs)}
        watch.returned(leaves)
        weights = Weights.of(call, grad_fn, watch.run)
        y = y if is_made(y, held, xs, watch) else None
        found = kept(call, grad_fn, leaves, weights, is_live, y)
        residuals = list(found.residuals)
        for k in found.own:
            residuals[k] = outputs.only(leaves)
        refs = {k: r for k, r in enumerate(residuals) if is_ref(r)}
        if any(id(r) not in places and not watch.is_outside(r) for r in refs.values()):
            raise errors.foreign_ref(of_call.source)
        refs = {k: places.get(id(r), r) for k, r in refs.items()}
        arrays = [r for r in residuals if not is_ref(r)]
        held_ids, read = ({id(v) for v in some} for some in (residuals, found.read or ()))
        found = found._replace(residuals=[], read=())  # no tracer of this trace
        return [*leaves, *arrays], _Aside(outputs, weights, found, refs, held_ids, read)

    # A few layers of one code are traced as they are: five take 3 s if each calls itself twice.
    # A `jit` inside keeps what is traced at this depth, so it must be right at any.
    code = of_call.source.code if held.primal is not None and not call.autodiff else None
    with added(TRACING, code) as around:
        held = _by_primal(call) if code and around.count(code) >= 5 else held
        done = traced(f, *call.operands, source=of_call.source, names=paths)
    aside: _Aside = done.aside  # type: ignore[assignment]
    outputs, own, weights = aside.outputs, aside.kept.own, aside.weights
    captured = list(weights.operands)
    known = {id(v) for v in captured}
    place = {id(v): i for i, v in enumerate(captured)}

    def placed(values: Values) -> list[OperandIndex | None]:
        for v in values:
            if is_live(v) and id(v) not in place:
                place[id(v)] = len(captured)
                captured.append(v)
        return [place.get(id(v)) for v in values]

    def evaluated(traced: Traced) -> Evaluate:
        at, run = placed(traced.consts), traced.run
        fixed = [c if i is None else None for c, i in zip(traced.consts, at, strict=True)]

        def evaluate(ops: Values) -> list[Leaf]:
            n = len(ops) - n_inputs
            consts = [c if i is None else ops[i] for i, c in zip(at, fixed, strict=True)]
            return run(consts, ops[n:])

        return evaluate

    placed([r for r in aside.refs.values() if not isinstance(r, int)])
    evaluate, primal = evaluated(done), None
    # What only the rule reads has no gradient. What a trace has captured without an operation that
    # we have seen is refused: it would be a constant, silently.
    alone, refused = dict[OperandIndex, Aval](), dict(weights.refused)
    for i, v in enumerate(captured):
        if id(v) in known or is_ref(v) or not has_gradient(v) or not weights.may_warn:
            continue
        if id(v) in aside.read:
            alone[i] = type_of(v)
        elif id(v) not in aside.held:
            refused[i] = Refused(type_of(v), False, None)
    if held.primal is not None:
        types = TypeOfY()
        types.note(of_call.source, outputs.treedef, done.jaxpr.outvars[: outputs.count])
        run_primal = lambda _, *xs: (_leaves(call, types, xs), None)  # noqa: E731
        primal = evaluated(traced(run_primal, *call.operands, source=of_call.source))
    n = len(captured)
    refs = {k: n + r if isinstance(r, int) else place[id(r)] for k, r in aside.refs.items()}
    written = names_of(held, {i: captured[i] for i in (*refused, *alone)})
    ordinary = [
        i for i, v in enumerate(captured) if call.autodiff and has_gradient(v) and not is_ref(v)
    ]
    gives = {*weights.listed, *refused, *range(n, n + n_inputs)}
    weights = weights._replace(operands=[], refused=refused)
    rule = aside.kept.rule._replace(captured=n)
    is_by_use = weights.is_by_use and weights.listed
    needs_perturbed = bool(refused or is_by_use or alone) and not ordinary

    # These hold no tracer: JAX keeps them.
    def value(operands: Values) -> list[Leaf]:
        return evaluate(operands)[: outputs.count]

    def forward(operands: Values, perturbed: Indices) -> Forward:
        weights.check(perturbed, written)
        weights.warn({i: alone[i] for i in perturbed if i in alone}, written)
        every = evaluate(operands)
        leaves, residuals = every[: outputs.count], every[outputs.count :]
        for k, i in refs.items():
            residuals.insert(k, operands[i])
        for k in own:
            residuals[k] = outputs.only(leaves)
        return Forward(leaves, outputs.differentiable, rule.run, residuals, gives)

    def names() -> list[str]:
        return [*(f"closed over {i}" for i in range(n)), *paths]

    run = functools.partial(with_ordinary_gradients, forward, ordinary) if ordinary else forward
    has_primal = primal is not None
    program = Function(of_call.source, names, primal or value, run, has_primal, needs_perturbed)
    return program, outputs, [*captured, *call.operands]


def _by_primal(call: Call) -> Held:
    """Return what a call holds, with a function that gives the value of the `primal`.

    A function may call itself, as the forward rule of a `jax.custom_vjp` does, `lambda x: (f(x),
    x)`: to trace it would have no end. So far inside of itself, it runs only if its rule does.
    """
    source, f = call.spec.source, call.held.f
    primal: Any = call.held.primal

    def run(*args: PyTree, **kwargs: PyTree) -> Any:
        def rule(*dys: PyTree, **given: PyTree) -> PyTree:
            if call.variables is None and len(given.get("variables", ())) > 1:
                raise errors.endless(source)  # they are those of the `primal`, in its order
            grad_fn = f(*args, **kwargs)[1]
            needed = {"variables": []} if requires_variables(grad_fn) else {}
            return grad_fn(*dys, **needed | given)

        return primal(*args, **kwargs), rule

    return call.held._replace(f=run)


class TypeOfY:
    """The type of `y`: `primal` and `f` must agree about it."""

    treedef: Any = None
    _types: Sequence[Aval] = ()
    _shown: Sequence[object] = ()  # of these, what must agree: not the sharding, say

    def note(self, source: Source, treedef: PyTreeDef, leaves: Values) -> None:
        types = [getattr(leaf, "aval", None) or jax.typeof(leaf) for leaf in leaves]
        shown = [(t.shape, t.dtype) for t in types]
        if self.treedef is not None and (self.treedef, self._shown) != (treedef, shown):
            raise errors.primal_mismatch(source, (self.treedef, self._types), (treedef, types))
        self.treedef, self._types, self._shown = treedef, types, shown


def _leaves(call: Call, types: TypeOfY, inputs: Values) -> list[Leaf]:
    """Return what `primal`, or `f`, returns as `y`."""
    leaves, treedef = tree_flatten(call.spec.value(call.held.filled(call.spec.inputs, inputs)))
    leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
    types.note(call.spec.source, treedef, leaves)
    return leaves
