"""Run a call under JAX's transformations. Nothing that `f` holds is copied.

JAX differentiates the call here     `_direct`: `f` runs as it is, one level down
anything else                        `_traced`: `f` is traced, and its jaxpr runs
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import find_top_trace, set_current_trace
from jax.tree_util import register_static, tree_flatten, tree_unflatten

from tfgrad_jax._autodiff.attached import arrays
from tfgrad_jax._autodiff.custom import differentiated, record
from tfgrad_jax._autodiff.function import Forward
from tfgrad_jax._closure.functions import constants_of, leads_to, taken_apart
from tfgrad_jax._closure.traced import traced
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Variables
from tfgrad_jax._frontend.within import Within
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_live, plainly
from tfgrad_jax._jax.types import Aval, Inert, Leaf, PyTree, is_differentiable, type_of
from tfgrad_jax._jax.watch import Shown, Watch, current_derivative, has_values, revived
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.runs import annotate_derivative, annotate_recorded
from tfgrad_jax._messages.source import Source

from .ordinary import with_ordinary_gradients
from .refused import Refused, Use, names_of, warn_of

Values = Sequence[Leaf]


class Weights(NamedTuple):
    """What a call captured: operands, and which of them its rule lists as variables."""

    operands: list[Leaf]
    declared: Variables | None
    listed: Sequence[int]  # in the order of the variables
    is_declared: bool
    types: Sequence[Aval]
    refused: Refused
    may_warn: bool  # of a value that only the rule reads

    @classmethod
    def of(
        cls,
        call: Call,
        of_f: Mapping[int, Any],
        seen: Mapping[int, Leaf],
        grad_fn: GradFn,
        reads_ref: bool,
    ) -> "Weights":
        variables, declared = call.declared
        operands = list({id(v): v for v in declared}.values())
        if len(operands) < len(declared):  # one is declared twice
            operands = [*declared]
        known = {id(v) for v in operands}
        in_rule = call.spec.within is Within.RULE
        accepts = grad_fn.accepts_variables and variables is None
        listed, uses = [*range(len(declared))], {}
        for v, line in of_f.values():
            if id(v) in known or not is_differentiable(v.dtype):
                continue
            i = len(operands)
            if is_ref(v):
                if not (reads_ref and not in_rule):
                    continue
                uses[i] = Use.of(v, line)
            elif accepts:
                listed.append(i)
            elif not (in_rule or call.autodiff):
                uses[i] = Use.of(v, line)
            known.add(id(v))
            operands.append(v)
        operands += [v for v in seen.values() if id(v) not in known]
        refused = Refused(call.spec.source, uses, variables is not None)
        types = [type_of(operands[i]) for i in listed]
        may_warn = not (in_rule or call.autodiff)
        return cls(operands, variables, listed, not accepts, types, refused, may_warn)

    def argument(
        self, values: Values, wanted: Sequence[int]
    ) -> tuple[Variables | None, Values, Sequence[int]]:
        """Return what the rule gets: the declared variables, or those that are differentiated."""
        if self.is_declared:
            return self.declared, values, self.listed
        some = [k for k, i in enumerate(self.listed) if i in wanted]
        values = [values[k] for k in some]
        variables = Variables.listed(values, [self.types[k] for k in some]) if some else None
        return variables, values, [self.listed[k] for k in some]


class _Rule(NamedTuple):
    """A rule as a function of residuals: the arrays that it holds, then the variables.

    JAX keeps it, so it holds no tracer.
    """

    gradients: Callable[..., list[Leaf | None]]
    remade: Callable[[Values], Any]
    weights: Weights  # without the operands
    source: Source
    is_recorded: bool
    captured: int = 0

    def run(
        self, residuals: Values, cotangents: Values, wanted: Sequence[int]
    ) -> list[Leaf | None]:
        self.weights.refused.check(wanted, lambda _: {})  # at an outer derivative
        (values, held), check = self.remade(residuals)
        variables, values, listed = self.weights.argument(values, wanted)
        found = self.gradients(held, cotangents, listed if self.is_recorded else variables, values)
        if not check():
            raise errors.changed(self.source)
        inputs = range(self.captured, self.captured + len(found) - len(listed))
        by_operand: dict[int, Leaf | None] = {}
        for i, g in zip([*inputs, *listed], found, strict=True):
            other = by_operand.get(i)
            by_operand[i] = g if other is None else other if g is None else other + g
        return [by_operand.get(i) for i in wanted]


def _rule_of(
    call: Call,
    grad_fn: GradFn,
    outputs: Any,
    leaves: Values,
    weights: Weights,
    takes: Callable[[Any], bool],
    is_made: bool,
    of: Any = None,
    life: Any = None,
) -> tuple[_Rule, list[Leaf], Sequence[Leaf]]:
    """Return a rule as a function of residuals, the residuals, and those that it names.

    Its own output is one of them if `f` has made it: its derivative is the declared one.
    """
    only, y = outputs.only(leaves), grad_fn.y if is_made else None
    values = [weights.operands[i] for i in weights.listed]
    parts = tuple(values), grad_fn.held
    cells = getattr(call.held.f, "__closure__", None) or ()
    apart = taken_apart(parts, takes if y is None else lambda v: takes(v) or v is y, cells)
    gradients, remade, kept, named = grad_fn.gradients, apart.remade, apart.taken, apart.named
    is_revived = not apart.is_whole and of is not None
    if is_revived:
        run, held = grad_fn.gradients, grad_fn.held

        def gradients(held: Any, *args: Any) -> list[Leaf | None]:
            with revived(of, life):
                return run(held, *args)

        remade = lambda new: ((tuple(new), held), lambda: True)  # noqa: E731
        kept, named = values, ()
    elif not apart.is_whole:
        recorded = _recorded(call, grad_fn, outputs, leaves, weights, values)
        gradients, remade, named = recorded
        kept = [*values, *named]
    if y is not None:
        kept = [only if v is y else v for v in kept]
    weights = weights._replace(operands=[])
    rule = _Rule(gradients, remade, weights, grad_fn.source, not apart.is_whole and not is_revived)
    return rule, kept, named


def _recorded(
    call: Call,
    grad_fn: GradFn,
    outputs: Any,
    leaves: Values,
    weights: Weights,
    values: Values,
) -> Any:
    """Record a rule now: an object holds a tracer that it may read, and which ends before it runs."""
    variables, some, positions = weights.argument(values, weights.listed)
    nones: list[bool] = []

    def rule(*cotangents: Leaf) -> tuple[list[Leaf], None]:
        found = grad_fn.gradients(grad_fn.held, cotangents, variables, some)
        nones[:] = [g is None for g in found]
        return [g for g in found if g is not None], None

    source, depth, n = call.spec.source, _depth.get(), len(values)
    token = _depth.set((*depth, source.code))
    try:
        if depth.count(source.code) >= 3:
            raise errors.endless(source)
        upstreams = outputs.cotangents(leaves)
        of_rule = traced(rule, *upstreams, source=grad_fn.source)
    except Exception as error:  # it may never run
        annotate_recorded(error, grad_fn.source)
        failed = error.with_traceback(None)
        failed.__context__ = failed.__cause__ = None

        def fails(*_: Any) -> Any:
            raise failed

        return fails, lambda _: (((None,) * n, None), lambda: True), []
    finally:
        _depth.reset(token)
    run = of_rule.run

    def gradients(
        consts: Values, cotangents: Values, listed: Sequence[int], _: Any
    ) -> list[Leaf | None]:
        found = iter(run(consts, cotangents))
        every = [None if none else next(found) for none in nones]
        inputs = len(every) - len(positions)
        of_variables = dict(zip(positions, every[inputs:], strict=True))
        return [*every[:inputs], *(of_variables[i] for i in listed)]

    return gradients, lambda new: ((tuple(new[:n]), new[n:]), lambda: True), of_rule.consts


_depth: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("depth", default=())


def run(call: Call, name: str) -> PyTree:
    """Return `y`, under a transformation."""
    of = current_derivative()
    if of is not None and call.primal is not None:
        its = lambda v: isinstance(v, Tracer) and v._trace is of  # noqa: E731
        of = of if leads_to((call.operands, call.variables, call.held), its) else None
    if of is not None and not call.autodiff and not any(map(is_ref, call.operands)):
        if hasattr(of, "parent_trace"):  # not where JAX transposes
            return _direct(call, name, of)
    if call.primal is not None and not leads_to((call.variables, call.held), _is_live):
        program = _OfPrimal(call.spec, dataclasses.replace(call, operands=[]))
        operands = call.operands
    else:
        program, operands = _traced(call)
    leaves = differentiated(program, name, operands) if operands else program.value([])
    return tree_unflatten(program.treedef, leaves)


# --- where JAX differentiates ---------------------------------------------------------------------


def _direct(call: Call, name: str, of: Any) -> PyTree:
    """Run `f` one level down, on its own objects."""
    pair, are_values = of.to_primal_tangent_pair, has_values(of.parent_trace)
    now = find_top_trace(())
    outer = now if isinstance(now, Watch) else None

    def lower(v: Leaf) -> Leaf:
        v = v if outer is None else outer.bare(v)
        v = v.value if type(v) is Shown else v
        return arrays([pair(v)[0]])[0] if isinstance(v, Tracer) and v._trace is of else v

    def is_its(v: Leaf) -> bool:
        return isinstance(v, Tracer) and lower(v) is not v

    inputs = arrays([lower(v) for v in call.operands])
    filled = call.held.filled(call.spec.inputs, inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.named_scope(name))
        constants = _constants(call) if outer is None else None
        if constants is None:
            watch = stack.enter_context(Watch.running(of, inputs))
        else:  # `f` reads nothing from outside, so JAX can run its operations directly
            watch = None
            stack.enter_context(set_current_trace(of.parent_trace))
        try:
            with plainly() if are_values else contextlib.nullcontext():
                leaves, outputs, grad_fn = call.apply(filled)
        except Exception as error:
            annotate_derivative(error, call.spec.source)
            raise
        y = grad_fn.y
        if watch is None:
            weights = Weights.of(call, {}, {}, grad_fn, False)
            is_made = isinstance(y, _ARRAYS) and not any(y is v for v in (*constants, *inputs))
        else:
            returned = watch.returned(leaves)
            weights = Weights.of(call, watch.uses, watch.seen, grad_fn, watch.reads_ref(leaves))
            is_made = y is not None and watch.has_made(y, call.held)
            leaves = returned
        operands = [*weights.operands, *call.operands]
        operands = [o if outer is None else outer.bare(o) for o in operands]
        primals = [*map(lower, weights.operands), *inputs]
        wanted = [i for i, (o, p) in enumerate(zip(operands, primals, strict=True)) if o is not p]
        weights.refused.check(wanted, lambda some: names_of(call.held, {i: operands[i] for i in some}))
        takes = is_its if are_values else _is_live
        rule, kept, named = _rule_of(call, grad_fn, outputs, leaves, weights, takes, is_made, of if are_values else None, watch and watch.life)
        captured = len(weights.operands)
        rule = rule._replace(captured=captured)
        if weights.may_warn:
            known = {id(v) for v in (*weights.operands, *call.operands)}
            alone = {i: v for i, v in enumerate(named) if is_its(v) and id(v) not in known}
            specs = {i: type_of(v) for i, v in alone.items() if is_differentiable(v.dtype)}
            warn_of(call.spec.source, specs, lambda _: names_of(call.held, alone, grad_fn.held))
        residuals = [lower(v) for v in kept]
    gives = {*weights.listed, *weights.refused.uses, *range(captured, len(operands))}
    forward = Forward(leaves, outputs.differentiable, rule.run, residuals, gives)
    if are_values:  # JAX need not carry them
        forward = forward._replace(
            run=lambda _, *others: rule.run(residuals, *others), residuals=[]
        )
    leaves = record(forward, name, call.spec.source, operands, primals, of)
    return tree_unflatten(outputs.treedef, leaves)


_ARRAYS = jax.Array, np.ndarray, np.generic


def _constants(call: Call) -> list[Any] | None:
    """Return the arrays that `f` can read from outside; None if there may be others."""
    held = call.held
    if call.variables is not None or held.bound_to:
        return None
    return constants_of([held.f, *held.inputs, *held.keywords.values()])


def _is_operand(v: Any) -> bool:
    return isinstance(v, Tracer) or is_ref(v)


def _is_live(v: Any) -> bool:
    """Return whether a value must be an operand: not a tracer that is left in a log."""
    if not isinstance(v, Tracer):
        return is_ref(v)
    # Which derivatives enclose this one, the current trace does not always tell.
    return v._trace.is_valid() and (hasattr(v._trace, "to_primal_tangent_pair") or is_live(v))


# --- jaxprs ---------------------------------------------------------------------------------------


class _Aside(NamedTuple):
    outputs: Any
    weights: Weights
    rule: _Rule
    refs: Mapping[int, Any]  # by their places among the residuals: input indices, or Refs
    own: Sequence[int]
    named: Mapping[int, Leaf]  # by identity: what variables of the rule hold


class _Named(Inert):
    spec: Any

    @property
    def source(self) -> Any:
        return self.spec.source


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Program(_Named):
    """A traced call: a function of what it captured, and of its inputs."""

    spec: Any
    aside: Any
    evaluate: Any
    primal: Any
    captured: int
    written: Mapping[int, str]  # how the user writes captured values, if a message may need it
    alone: Mapping[int, Aval]  # what only the rule reads

    @property
    def treedef(self) -> Any:
        return self.aside.outputs.treedef

    @property
    def has_primal(self) -> bool:
        return self.primal is not None

    @property
    def needs_perturbed(self) -> bool:
        weights = self.aside.weights
        is_listed = weights.listed and not weights.is_declared
        return bool(weights.refused.uses or is_listed or self.alone)

    def names(self) -> list[str]:
        return [*(f"closed over {i}" for i in range(self.captured)), *_paths(self.spec)]

    def value(self, operands: Values) -> list[Leaf]:
        if self.primal is not None:
            return self.primal(operands)
        with Watch.running(is_plain=True):
            return self.evaluate(operands)[: self.aside.outputs.count]

    def forward(self, operands: Values, perturbed: Sequence[int]) -> Forward:
        outputs, weights = self.aside.outputs, self.aside.weights
        weights.refused.check(perturbed, lambda _: self.written)
        alone = {i: self.alone[i] for i in perturbed if i in self.alone}
        warn_of(self.source, alone, lambda _: self.written)
        every = self.evaluate(operands)
        leaves, residuals = every[: outputs.count], every[outputs.count :]
        for k, i in self.aside.refs.items():
            residuals.insert(k, operands[i])
        for k in self.aside.own:
            residuals[k] = leaves[outputs.differentiable[0]]
        rule = self.aside.rule._replace(captured=self.captured)
        gives = {*weights.listed, *weights.refused.uses, *range(self.captured, len(operands))}
        return Forward(leaves, outputs.differentiable, rule.run, residuals, gives)


def _paths(spec: Any) -> list[str]:
    paths = spec.inputs.leaf_paths()
    return [paths[i] for i in spec.inputs.operands]


def _traced(call: Call) -> tuple[Any, list[Leaf]]:
    """Trace `f`, around the tracers that it captured."""
    of_call, held = call.spec, call.held

    def f(*inputs: Leaf) -> tuple[Any, _Aside]:
        with Watch.running(None, inputs) as watch:
            leaves, outputs, grad_fn = call.apply(held.filled(of_call.inputs, inputs))
            is_made = grad_fn.y is not None and watch.has_made(grad_fn.y, held)
            watch.returned(leaves)
            reads_ref = watch.reads_ref(leaves)
            weights = Weights.of(call, watch.uses, watch.seen, grad_fn, reads_ref)
            rule, residuals, named = _rule_of(
                call, grad_fn, outputs, leaves, weights, _is_live, is_made
            )
            places = {id(v): i for i, v in enumerate(inputs)}
            refs = {k: places.get(id(r), r) for k, r in enumerate(residuals) if is_ref(r)}
            if any(watch.is_own(r) for r in refs.values()):
                raise errors.makes_ref(of_call.source)
            named = {id(v): v for v in named if weights.may_warn and watch.is_outside(v)}
        only = outputs.only(leaves)
        own = [k for k, r in enumerate(residuals) if is_made and r is only]
        kept = [r for r in residuals if not is_ref(r)]
        return [*leaves, *kept], _Aside(outputs, weights, rule, refs, own, named)

    operands = call.operands
    done = traced(f, *operands, source=of_call.source, names=_paths(of_call))
    aside: _Aside = done.aside
    captured, weights = list(aside.weights.operands), aside.weights
    known = len(captured)
    place = {id(v): i for i, v in enumerate(captured)}

    def placed(consts: Values) -> tuple[list[int | None], list[Leaf | None]]:
        for c in consts:
            if _is_operand(c) and id(c) not in place:
                place[id(c)] = len(captured)
                captured.append(c)
        at = [place[id(c)] if _is_operand(c) else None for c in consts]
        return at, [None if i is not None else c for i, c in zip(at, consts, strict=True)]

    def evaluated(traced: Any) -> Any:
        (at, fixed), run = placed(traced.consts), traced.run

        def evaluate(ops: Values) -> list[Leaf]:
            n = len(ops) - inputs
            return run([c if i is None else ops[i] for i, c in zip(at, fixed, strict=True)], ops[n:])

        return evaluate

    inputs = len(operands)
    placed([r for r in aside.refs.values() if not isinstance(r, int)])
    evaluate, primal = evaluated(done), None
    alone = {}
    if weights.may_warn:
        some = {i: captured[i] for i in range(known, len(captured))}
        some = {i: v for i, v in some.items() if id(v) in aside.named and not is_ref(v)}
        alone = {i: type_of(v) for i, v in some.items() if is_differentiable(v.dtype)}
    if call.primal is not None:
        types, of = TypeOfY(), call.primal
        types.note(of_call.source, aside.outputs.treedef, done.jaxpr.outvars[: aside.outputs.count])
        primal = evaluated(traced(lambda *xs: (_leaves(call, of, types, xs), None), *operands))
    n = len(captured)
    refs = {k: n + r if isinstance(r, int) else place[id(r)] for k, r in aside.refs.items()}
    messages = {i: captured[i] for i in (*weights.refused.uses, *alone)}
    written = names_of(held, messages)
    aside = aside._replace(weights=weights._replace(operands=[]), refs=refs, named={})
    program = Program(of_call, aside, evaluate, primal, n, written, alone)
    every = [*captured, *operands]
    if call.autodiff:
        ordinary = [i for i, v in enumerate(captured) if is_differentiable(v.dtype) and not is_ref(v)]
        if ordinary:
            return _Ordinary(program, ordinary), every
    return program, every


class TypeOfY:
    """The type of `y`: `primal` and `f` must agree about it."""

    treedef: Any = None
    _types: Sequence[object] = ()

    def note(self, source: Any, treedef: Any, leaves: Sequence[Any]) -> None:
        types = [getattr(leaf, "aval", leaf) for leaf in leaves]
        earlier = self.treedef, self._types
        now = treedef, [(t.shape, t.dtype) for t in types]
        if self.treedef is not None and (earlier[0], [(t.shape, t.dtype) for t in earlier[1]]) != now:
            raise errors.primal_mismatch(source, earlier, (treedef, types))
        self.treedef, self._types = treedef, types


def _leaves(call: Call, run: Any, types: TypeOfY, inputs: Values) -> list[Leaf]:
    """Return what `primal` returns."""
    leaves, treedef = tree_flatten(run(call.held.filled(call.spec.inputs, inputs)))
    leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
    types.note(call.spec.source, treedef, leaves)
    return leaves


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _OfPrimal(_Named):
    """A call with a `primal` that captured nothing: `f` runs if JAX differentiates it."""

    spec: Any
    call: Call
    types: TypeOfY = dataclasses.field(default_factory=TypeOfY)
    has_primal = True
    needs_perturbed = False

    @property
    def treedef(self) -> Any:
        return self.types.treedef

    def names(self) -> list[str]:
        return _paths(self.spec)

    def value(self, operands: Values) -> list[Leaf]:
        with plainly():
            return _leaves(self.call, self.call.primal, self.types, operands)

    def forward(self, operands: Values, perturbed: Sequence[int]) -> Forward:
        call = dataclasses.replace(self.call, primal=None, operands=[*operands])
        program, every = _traced(call)
        if len(every) > len(operands):
            raise errors.hidden_tracer(self.source)
        forward = program.forward(every, perturbed)
        self.types.note(self.source, program.treedef, forward.leaves)
        return forward


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Ordinary(Inert):
    """A program whose captured values get the ordinary gradient of `f`."""

    program: Program
    ordinary: Sequence[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    @property
    def needs_perturbed(self) -> bool:
        return False

    def forward(self, operands: Values, perturbed: Sequence[int]) -> Forward:
        return with_ordinary_gradients(self.program.forward, self.ordinary, operands, perturbed)
