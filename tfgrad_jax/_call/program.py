"""A call that JAX records or maps: a function of operands, which JAX differentiates later.

late     from it no tracer can be reached: it stays as it is, and `f` is traced when JAX
differentiates
traced   at the call: the tracers that `f` took from outside are constants of the jaxpr, and
so operands
"""

import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import PyTreeDef, register_static, tree_flatten

from .._autodiff.attached import Forward
from .._closure.functions import Apart, taken_apart
from .._closure.traced import Traced, traced
from .._closure.walk import ARRAYS, globals_in, survey
from .._frontend.grad_fn import Call, CallSpec, Held
from .._frontend.structure import Outputs
from .._jax.compat import is_ref
from .._jax.jaxpr import dependence
from .._jax.shown import is_live
from .._jax.trace import plainly
from .._jax.types import (
    Aval,
    Inert,
    Leaf,
    OperandIndex,
    PyTree,
    has_gradient,
    type_of,
)
from .._jax.watch import Watch
from .._messages import errors
from .._messages.source import Source
from .ordinary import with_ordinary_gradients
from .rule import Kept, is_deep_in_itself, kept
from .weights import Names, Refused, Weights, names_of

Values: TypeAlias = Sequence[Leaf]
Evaluate: TypeAlias = Callable[[Values], list[Leaf]]  # of operands


def _paths(spec: CallSpec) -> list[str]:
    paths = spec.inputs.leaf_paths()
    return [paths[i] for i in spec.inputs.operands]


class _Aside(NamedTuple):
    """What a traced run of `f` returned besides arrays."""

    outputs: Outputs
    weights: Weights
    kept: Kept
    refs: Mapping[int, Leaf]  # residuals that are Refs: these, or which input
    # By identity: what the rule holds, and that which it certainly reads.
    held: Collection[int]
    read: Collection[int]


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Program(Inert):
    """A traced call: a function of what it captured, and of its inputs."""

    spec: CallSpec
    outputs: Outputs
    weights: Weights
    kept: Kept
    refs: Mapping[int, OperandIndex]  # residuals that are Refs
    evaluate: Evaluate
    primal: Evaluate | None
    captured: int
    written: Names  # how the user writes captured values, if a message may need it
    alone: Mapping[OperandIndex, Aval]  # what only the rule reads
    ordinary: Sequence[OperandIndex]  # these get the ordinary gradient of `f`

    @property
    def source(self) -> Source:
        return self.spec.source

    @property
    def treedef(self) -> PyTreeDef:
        return self.outputs.treedef

    @property
    def has_primal(self) -> bool:
        return self.primal is not None

    @property
    def needs_perturbed(self) -> bool:
        weights = self.weights
        is_by_use = weights.is_by_use and weights.listed
        return bool(weights.refused or is_by_use or self.alone) and not self.ordinary

    def names(self) -> list[str]:
        return [*(f"closed over {i}" for i in range(self.captured)), *_paths(self.spec)]

    def value(self, operands: Values) -> list[Leaf]:
        if self.primal is not None:
            return self.primal(operands)
        return self.evaluate(operands)[: self.outputs.count]

    def forward(self, operands: Values, perturbed: Sequence[OperandIndex]) -> Forward:
        if self.ordinary:
            return with_ordinary_gradients(self._forward, self.ordinary, operands, perturbed)
        return self._forward(operands, perturbed)

    def _forward(self, operands: Values, perturbed: Sequence[OperandIndex]) -> Forward:
        outputs, weights = self.outputs, self.weights
        weights.check(perturbed, self.written)
        weights.warn({i: self.alone[i] for i in perturbed if i in self.alone}, self.written)
        every = self.evaluate(operands)
        leaves, residuals = every[: outputs.count], every[outputs.count :]
        for k, i in self.refs.items():
            residuals.insert(k, operands[i])
        for k in self.kept.own:
            residuals[k] = outputs.only(leaves)
        rule = self.kept.rule._replace(captured=self.captured)
        gives = {*weights.listed, *weights.refused, *range(self.captured, len(operands))}
        return Forward(leaves, outputs.differentiable, rule.run, residuals, gives)


def late(call: Call) -> tuple["Late", list[Leaf]]:
    """Return a call as what JAX can differentiate, and its operands."""
    held = taken_apart(call.held, lambda _: False, (), looks=False)
    held = held._replace(hidden=[*held.hidden, *globals_in(survey(call.held).functions)])
    return Late(call.spec, dataclasses.replace(call, operands=[]), held), call.operands


_tracing: contextvars.ContextVar[tuple[Held, ...]] = contextvars.ContextVar(
    "what the calls hold that are being traced", default=()
)


def is_endless(call: Call) -> bool:
    """Return whether a function calls itself, and would be traced again without an end.

    It ends by its `primal`, as a `jax.custom_vjp` does whose forward rule is `lambda x: (f(x), x)`.
    """
    has_primal = call.held.primal is not None and not call.autodiff
    return has_primal and is_deep_in_itself(call, _tracing.get())


def without_rule(call: Call) -> PyTree:
    """Return `y` such that its derivative is an error: only one of a higher order needs it."""

    @jax.custom_jvp
    def unchanged(y: PyTree) -> PyTree:
        return y

    def jvp(_primals: Any, _tangents: Any) -> Any:
        raise errors.endless(call.spec.source)

    unchanged.defjvp(jvp)
    return unchanged(call.spec.value(call.held.filled(call.spec.inputs, call.operands)))


def traced_call(call: Call) -> tuple[Program, list[Leaf]]:
    """Trace `f`, around the tracers that it captured."""
    of_call, held, n_inputs = call.spec, call.held, len(call.operands)

    def f(watch: Watch, *xs: Leaf) -> tuple[list[Leaf], _Aside]:
        leaves, outputs, grad_fn = of_call.apply(held.filled(of_call.inputs, xs))
        y, places = grad_fn.y, {id(x): i for i, x in enumerate(xs)}
        if isinstance(y, Tracer):
            is_made = id(y) not in places and not watch.is_outside(y)
        else:
            is_made = isinstance(y, ARRAYS) and not survey(held, lambda v: v is y).leads
        watch.returned(leaves)
        weights = Weights.of(call, grad_fn, watch.run)
        found = kept(call, grad_fn, outputs, leaves, weights, is_live, y if is_made else None)
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

    token = _tracing.set((*_tracing.get(), held))
    try:
        done = traced(f, *call.operands, source=of_call.source, names=_paths(of_call))
    finally:
        _tracing.reset(token)
    aside: _Aside = done.aside  # type: ignore[assignment]
    weights = aside.weights
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
        types.note(of_call.source, aside.outputs.treedef, done.jaxpr.outvars[: aside.outputs.count])
        run_primal = lambda _, *xs: (_leaves(call, types, xs), None)  # noqa: E731
        primal = evaluated(traced(run_primal, *call.operands, source=of_call.source))
    n = len(captured)
    refs = {k: n + r if isinstance(r, int) else place[id(r)] for k, r in aside.refs.items()}
    refused = _of_value(refused, done, place, aside.outputs.count)
    written = names_of(held, {i: captured[i] for i in (*refused, *alone)})
    is_ordinary = [call.autodiff and has_gradient(v) and not is_ref(v) for v in captured]
    program = Program(
        of_call,
        aside.outputs,
        weights._replace(operands=[], refused=refused),
        aside.kept,
        refs,
        evaluate,
        primal,
        n,
        written,
        alone,
        [i for i, has in enumerate(is_ordinary) if has],
    )
    return program, [*captured, *call.operands]


def _of_value(
    refused: Mapping[OperandIndex, Refused],
    done: Traced,
    place: Mapping[int, OperandIndex],
    count: int,
) -> Mapping[OperandIndex, Refused]:
    """Return those without the Refs on which `y` does not depend, such as a log."""
    if not any(r.is_ref for r in refused.values()):
        return refused
    value = functools.reduce(operator.or_, dependence(done.jaxpr)[:count], 0)
    at = {place[id(c)] for k, c in enumerate(done.consts) if id(c) in place and value >> k & 1}
    return {i: r for i, r in refused.items() if not r.is_ref or i in at}


class TypeOfY:
    """The type of `y`: `primal` and `f` must agree about it."""

    treedef: Any = None
    _types: Sequence[Aval] = ()
    _shown: Sequence[object] = ()  # of these, what must agree: not the sharding, say

    def note(self, source: Source, treedef: PyTreeDef, leaves: Sequence[Leaf]) -> None:
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


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Late(Inert):
    """A call that captured nothing: `f` is traced if JAX differentiates it."""

    spec: CallSpec
    call: Call
    held: Apart  # as it was at the call: functions may have other variables by then
    types: TypeOfY = dataclasses.field(default_factory=TypeOfY)
    needs_perturbed = False

    @property
    def source(self) -> Source:
        return self.spec.source

    @property
    def treedef(self) -> PyTreeDef:
        return self.types.treedef

    @property
    def has_primal(self) -> bool:
        return self.call.held.primal is not None

    def names(self) -> list[str]:
        return _paths(self.spec)

    def value(self, operands: Values) -> list[Leaf]:
        with plainly():
            return _leaves(self.call, self.types, operands)

    def forward(self, operands: Values, perturbed: Sequence[OperandIndex]) -> Forward:
        if (found := self.held.rebound()) is not None:
            raise errors.rebound(self.source, *found[:2], is_global=found.is_global)
        held = self.held.rebuilt(None)[0]._replace(primal=None)
        call = dataclasses.replace(self.call, held=held, operands=[*operands])
        program, every = traced_call(call)
        if len(every) > len(operands):
            raise errors.leaked(self.source)
        forward = program.forward(every, perturbed)
        self.types.note(self.source, program.treedef, forward.leaves)
        return forward
