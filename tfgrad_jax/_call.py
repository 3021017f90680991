"""Run a call under JAX's transformations.

Only this module, `_program` and `_body` import all three groups.

`run` turns the call into a `Program`: a function of the tracers that it closes over (its captured
values) and of its operands, with a rule. `_closure` finds these tracers and copies the objects that
hold them, with other values in their places. `_autodiff` makes JAX differentiate the program.
`_frontend` calls `f` and its rule as the user wrote them.

If a call cannot be copied (it uses a jitted helper, say), `_hoisted` traces it first. A list then
holds what the call captured, and a list can be copied.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.errors import UnexpectedTracerError
from jax.tree_util import tree_leaves

from . import _errors
from ._autodiff.custom import HiddenTracerError
from ._closure.reach import OpaqueError, TooMuchError, Walk
from ._closure.skeleton import Skeleton, dissect, snapshot
from ._closure.traced import first_uses, is_being_traced, traced
from ._compat import cotangent_type
from ._frontend.grad_fn import Call, Contract, Surroundings, Variables
from ._frontend.structure import Outputs
from ._program import Program
from ._source import Source
from ._types import NeedsValuesError, is_traced, spec

# A function that captures more than this mostly uses few of them: one layer may reach all the
# weights of a model. A trace shows which it uses, so a layer costs the same in a large model.
_MANY = 8

Uses: TypeAlias = list[tuple[Any, Any]]  # values, each with the equation that uses it first


def run(call: Call, name: str) -> Any:
    """Return `y`, under a transformation."""
    with contextlib.suppress(HiddenTracerError, UnexpectedTracerError):
        return _run(call, name, trace=False)
    # The function reads a tracer from a place that we do not search, such as a global variable. A
    # trace finds it.
    try:
        return _run(call, name, trace=True)
    except HiddenTracerError:
        raise _errors.hidden_tracer(call.contract.source) from None


def _run(call: Call, name: str, trace: bool) -> Any:
    program, captured = program_of(call, name, trace)
    if captured or call.operands:
        return program(captured, call.operands)
    y = call.contract.value(call.surroundings, ())
    if not trace and is_traced(tree_leaves(y)):
        raise HiddenTracerError
    return y


def program_of(call: Call, name: str, trace: bool = False) -> tuple[Program, list[Any]]:
    """Return the program of a call, and what the call captured.

    The program runs copies of the call. If the call cannot be copied, or `trace` is true, it runs
    copies of a function that evaluates a jaxpr of the call.
    """
    contract, surroundings, (variables, listed) = call.contract, call.surroundings, call.declared()
    holder: type | None = None  # the type of an object that holds a tracer and cannot be copied
    too_much = False
    if not trace:
        try:
            skeleton, captured, uses = _dissected(call, listed)
            program = Program(name, contract, call, skeleton, variables, captured, listed, uses)
            return program, captured
        except OpaqueError as error:
            holder = error.kind
        except TooMuchError:
            too_much = True
    try:
        hoisted = _hoisted(call)
    except NeedsValuesError as error:
        if too_much and not listed:  # there may be no tracer in it
            return Program(name, contract, call, snapshot(list(surroundings)), variables), []
        if too_much or holder is not None:
            where = "among too much to look through"
            if holder is not None:
                where = f"in an object that is not copied, of type `{holder.__qualname__}`"
            error.add_note(_errors.traced_needs_values(contract.source, where))
        raise
    contract, surroundings, listed, uses = hoisted
    skeleton, captured = dissect([*surroundings, *listed])
    return Program(name, contract, call, skeleton, variables, captured, listed, uses), captured


def _dissected(call: Call, listed: Sequence[Any]) -> tuple[Skeleton, list[Any], Uses | None]:
    """Return a skeleton of a call, what it captured, and how `y` uses that (None: not known).

    If the call reaches many tracers, it captures only those that `f` or the rule uses.
    """
    values, uses = [*call.surroundings, *listed], None
    walk = Walk(values, patient=False)
    if len(walk.taken) > _MANY + len(listed):
        with contextlib.suppress(*NeedsValuesError, TooMuchError):
            used, uses = _used(call, listed, walk.taken)
            walk.narrow(used)
    return *dissect(values, walk), uses


def _used(
    call: Call, listed: Sequence[Any], reached: Mapping[int, Any], undeclared: Uses | None = None
) -> tuple[Container[int], Uses]:
    """Return which of the tracers that a call reaches it uses, and how `y` uses them.

    JAX traces `f`: the constants of the jaxpr are the tracers that `f` uses. If the rule reaches
    many, JAX traces it in turn, inside the trace of `f`. A rule with undeclared `variables` gets
    those that `y` depends on, which the complete trace of `f` shows. So it waits for a second
    trace of `f`, which gets them as `undeclared`.
    """
    used, is_postponed = {id(v) for v in listed}, False

    def value(*operands: Any) -> Any:
        nonlocal is_postponed
        leaves, outputs, grad_fn = call.contract.apply(call.surroundings, operands)
        in_rule = Walk([grad_fn], lambda v: id(v) in reached, lenient=True).taken
        if len(in_rule) > _MANY + len(listed):
            if undeclared is None and call.chooses(grad_fn):
                is_postponed = True
            else:
                known = _used_by_rule(call, leaves, outputs, grad_fn, undeclared)
                in_rule = in_rule if known is None else known
        used.update(in_rule)
        return leaves

    _, closed = traced(value, *call.operands)
    uses = _uses(closed)
    if is_postponed:
        if 2 * len(uses) > len(reached):  # too little to gain
            return reached, uses
        return _used(call, listed, reached, uses)
    used.update(map(id, closed.consts))
    return used & reached.keys(), uses


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Traced(Contract):
    """How to call a function that evaluates a jaxpr of `f`.

    It takes the operands, not the user's arguments, and returns the leaves of `y` and the residuals
    of the rule.
    """

    outputs: Outputs
    grad_fn: Skeleton  # makes the user's rule, or a traced one, from its residuals

    def value(self, surroundings: Surroundings, operands: Sequence[Any]) -> Any:
        assert surroundings.primal is not None
        return surroundings.primal(*operands)

    def apply(self, surroundings: Surroundings, operands: Sequence[Any]) -> Any:
        leaves, residuals = surroundings.f(*operands)
        return leaves, self.outputs, self.grad_fn(residuals)[0]


class _Hoisted(NamedTuple):
    """A traced call: a function that evaluates its jaxpr, around a list of what it captured."""

    contract: Contract
    surroundings: Surroundings
    listed: Sequence[Any]  # the tracers whose gradients the rule always returns
    uses: Uses  # how `y` uses what is captured


def _hoisted(call: Call) -> _Hoisted:
    """Trace a call that cannot be copied, so that a list holds the tracers that it captured.

    The jaxpr returns the leaves of `y` and the residuals of the rule.
    """
    contract, surroundings = call.contract, call.surroundings
    _, listed = call.declared()
    known: list[Any] = []

    def apply(*operands: Any) -> Any:
        leaves, outputs, grad_fn = contract.apply(surroundings, operands)
        rule_variables, is_traced = listed, False
        try:
            skeleton, residuals = _dissected_rule(call, leaves, outputs, grad_fn)
        except (OpaqueError, TooMuchError):
            rule, rule_variables, _ = _traced_rule(call, leaves, outputs, grad_fn)
            skeleton, residuals = dissect([rule])
            is_traced = True
        known[:] = outputs, skeleton, is_traced, rule_variables
        return leaves, residuals

    paths = contract.inputs.leaf_paths()
    names = [paths[i] for i in contract.inputs.operands]
    f, closed = traced(apply, *call.operands, source=contract.source, names=names)
    outputs, skeleton, is_rule_traced, rule_variables = known
    primal: Any = None
    if surroundings.primal is not None:
        primal, _ = traced(lambda *operands: contract.value(surroundings, operands), *call.operands)
    fields = {f.name: getattr(contract, f.name) for f in dataclasses.fields(Contract)}
    fields["is_rule_traced"] = is_rule_traced
    new = _Traced(**fields, outputs=outputs, grad_fn=skeleton)
    uses = _uses(closed, outputs.count)
    return _Hoisted(new, Surroundings(f, (), (), {}, primal), rule_variables, uses)


def _dissected_rule(
    call: Call, leaves: Sequence[Any], outputs: Outputs, grad_fn: Any
) -> tuple[Skeleton, list[Any]]:
    """Return the skeleton of a rule, and its residuals.

    These are the tracers that it reaches; if there are many, only those that it uses.
    """
    walk = Walk([grad_fn], patient=call.chooses(grad_fn))
    if len(walk.taken) > _MANY + len(call.declared()[1]):
        used = _used_by_rule(call, leaves, outputs, grad_fn)
        if used is not None:
            walk.narrow(used)
    return dissect([grad_fn], walk)


def _used_by_rule(
    call: Call,
    leaves: Sequence[Any],
    outputs: Outputs,
    grad_fn: Any,
    uses: Uses | None = None,  # how `y` uses captured values, if known
) -> dict[int, Any] | None:
    """Return the tracers that a rule uses, by id; None (not known) if it cannot be traced."""
    if is_being_traced(Source.of(grad_fn)):  # tracing it again would never end
        return None
    try:
        return _traced_rule(call, leaves, outputs, grad_fn, uses).captured
    except NeedsValuesError:
        return None


class _TracedRule(NamedTuple):
    rule: Callable[..., Any]  # a function of the cotangents
    variables: Sequence[Any]  # those that it gives gradients for
    captured: dict[int, Any]  # by id; with all variables: a rule may only compare one


def _traced_rule(
    call: Call,
    leaves: Sequence[Any],
    outputs: Outputs,
    grad_fn: Any,
    uses: Uses | None = None,  # how `y` uses captured values, if known
) -> _TracedRule:
    """Trace a rule with its variables: the declared ones, or all that `y` depends on."""
    variables, listed = call.declared()
    if call.chooses(grad_fn) and (listed := _undeclared(call, uses)):
        variables = Variables.listed(listed, list(map(spec, listed)))
    rule, closed = traced(
        lambda *cts: call.contract.gradients(grad_fn, outputs, cts, variables, listed),
        *(cotangent_type(leaves[i]) for i in outputs.differentiable),
        source=Source.of(grad_fn),
    )
    return _TracedRule(rule, listed, {id(c): c for c in (*closed.consts, *listed)})


def _undeclared(call: Call, uses: Uses | None) -> list[Any]:
    """Return the tracers that `y` depends on, in the order of their first use."""
    if uses is None:
        apply = call.contract.apply
        _, closed = traced(lambda *operands: apply(call.surroundings, operands)[0], *call.operands)
        uses = _uses(closed)
    return [v for v, _ in uses if is_traced([v]) and spec(v).differentiable]


def _uses(closed: Any, results: int | None = None) -> Uses:
    """Return the constants that the results of a jaxpr depend on, in the order of first use.

    `results` limits this to the first so many results.
    """
    uses = first_uses(closed, results).items()
    return [(closed.consts[i], eqn) for i, eqn in uses if i < len(closed.consts)]
