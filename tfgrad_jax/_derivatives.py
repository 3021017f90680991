"""Make JAX use a rule: the one place that knows `jax.custom_vjp` and `jax.custom_jvp`.

A *program* is what gets differentiated: `primal(operands)` is its value, `forward(operands,
perturbed)` its value and its `Rule` (`_rules.py`). `Direct` below calls the user's function;
`_closure.Hoisted` evaluates a jaxpr of it. `differentiable(program, operands, ...)` runs it:

    not differentiated       primal
    reverse mode             _forward, later _backward
    `forward_mode=True`      _jvp

`_forward` and `_jvp` return `attach(y, operands, rule)`, not `y`: the identity on `y` whose
derivative with respect to the operands is the rule again. So the declared gradient holds at
every order, where `y` alone would have the derivative of `f`'s own operations. Each
differentiation peels one `attach` off; nothing runs twice, and it compiles to nothing.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from . import _errors
from ._call import Call, Variables
from ._linear import NotLinearError, push_forward
from ._rules import NeedsValuesError, Rule, lift, lifted_rule, traced_rule
from ._structure import Outputs, Spec, spec


def _signed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the signature of `f`: JAX works it out at every call of a custom derivative."""
    f.__signature__ = inspect.signature(f)  # type: ignore[attr-defined]
    return f


class Program(Protocol):
    """A pytree without leaves: static to JAX."""

    source: _errors.Source

    def primal(self, operands: Sequence[Any]) -> list[Any]: ...
    def forward(self, operands: Sequence[Any], perturbed: Sequence[bool] | None) -> Any: ...


def differentiable(
    program: Program, operands: Sequence[Any], forward_mode: bool, closed_over: bool
) -> list[Any]:
    """Run a program so that JAX differentiates it by its rule."""
    if forward_mode:
        return _both_modes(program, *operands)
    if closed_over:
        return _reverse_perturbed(program, *operands)
    return _reverse(program, *operands)


@_signed
def _primal(program: Program, *operands: Any) -> list[Any]:
    return program.primal(operands)


@_signed
def _forward(program: Program, *operands: Any) -> Any:
    return program.forward(operands, None)


@_signed
def _forward_perturbed(program: Program, *operands: Any) -> Any:
    return program.forward([o.value for o in operands], [o.perturbed for o in operands])


@_signed
def _backward(rule: Rule, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    wanted = [_instantiate(cotangents[i]) for i in rule.static.outputs.differentiable]
    return (None, *rule(wanted)[: len(rule.static.specs)])  # not those of concrete variables


def _instantiate(value: Any) -> Any:
    if isinstance(value, SymbolicZero):
        return jnp.zeros(value.shape, value.aval.dtype)
    return value


_reverse = jax.custom_vjp(_primal)
_reverse.defvjp(_forward, _backward)
# Only to know which operands are differentiated costs more, so only closures ask for it.
_reverse_perturbed = jax.custom_vjp(_primal)
_reverse_perturbed.defvjp(_forward_perturbed, _backward, symbolic_zeros=True)
_both_modes = jax.custom_jvp(_primal)


@functools.partial(_both_modes.defjvp, symbolic_zeros=True)
@_signed
def _jvp(primals: Any, tangents: Any) -> Any:
    (program, *operands), (_, *tangents) = primals, tangents
    perturbed = [not isinstance(t, SymbolicZero) for t in tangents]
    leaves, rule = program.forward(operands, perturbed)
    positions = rule.static.outputs.differentiable
    try:
        dys = iter(_pushed(rule, [leaves[i] for i in positions], tangents))
    except NotLinearError as error:
        raise _errors.not_linear(program.source, str(error)) from None
    return leaves, [
        next(dys) if i in positions else np.zeros(leaf.shape, jax.dtypes.float0)
        for i, leaf in enumerate(leaves)
    ]


# --- every order ---------------------------------------------------------------------------


def attach(leaves: list[Any], operands: Sequence[Any], rule: Rule) -> list[Any]:
    """Return `leaves` with the rule as their derivative with respect to the operands."""
    positions = rule.static.outputs.differentiable
    if len(positions) == len(leaves):
        return _attach(leaves, list(operands), rule)
    attached = iter(_attach([leaves[i] for i in positions], list(operands), rule))
    return [next(attached) if i in positions else leaf for i, leaf in enumerate(leaves)]


@_signed
def _keep(ys: Any, operands: Any, rule: Rule) -> Any:
    return ys


_attach_reverse = jax.custom_vjp(_keep)


@_signed
def _attach_forward(ys: Any, operands: Any, rule: Rule) -> Any:
    if rule.static.check is not None:
        rule.static.check([o.perturbed for o in operands])
    ys, operands, rule = jax.tree.map(lambda p: p.value, (ys, operands, rule))
    return _attach(ys, operands, rule), rule


@_signed
def _attach_backward(rule: Rule, cotangents: Any) -> Any:
    return None, rule([_instantiate(c) for c in cotangents]), None


_attach_reverse.defvjp(_attach_forward, _attach_backward, symbolic_zeros=True)


# Before custom_jvp became a primitive of its own, JAX dropped a custom_jvp rule inside a scan
# when it evaluated the scan in part, and put the function itself in its place. Let that be the
# same thing as a custom_vjp, which it kept. Remove when JAX 0.11 is the oldest supported.
@_signed
def _keep_reverse(ys: Any, operands: Any, rule: Rule) -> Any:
    return _attach_reverse(ys, operands, rule)


_attach = jax.custom_jvp(_keep if hasattr(jax.config, "jax_custom_jvp3") else _keep_reverse)


@functools.partial(_attach.defjvp, symbolic_zeros=True)
@_signed
def _attach_jvp(primals: Any, tangents: Any) -> Any:
    ys, operands, rule = primals
    perturbed = [not isinstance(t, SymbolicZero) for t in tangents[1]]
    if rule.static.check is not None:
        rule.static.check(perturbed)
    try:
        dys = _pushed(rule, ys, tangents[1])
    except NotLinearError:
        # Right in reverse mode, at every order; forward mode meets JAX's own refusal.
        def reverse(*changed: Any) -> Any:
            rest = iter(changed)
            mixed = [next(rest) if p else o for p, o in zip(perturbed, operands, strict=True)]
            return _attach_reverse(ys, mixed, rule)

        dys = jax.jvp(
            reverse,
            [o for o, p in zip(operands, perturbed, strict=True) if p],
            [t for t, p in zip(tangents[1], perturbed, strict=True) if p],
        )[1]
    return _attach(ys, operands, rule), dys


def _pushed(rule: Rule, ys: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Push the tangents of the operands through the rule."""
    moved = [
        i
        for i, (t, s) in enumerate(zip(tangents, rule.static.specs, strict=True))
        if s.differentiable and not isinstance(t, SymbolicZero)
    ]
    reached: list[int] = []

    def moved_only(cotangents: Sequence[Any]) -> list[Any]:
        gradients = rule(cotangents)
        reached[:] = [i for i in moved if gradients[i] is not None]
        return [gradients[i] for i in reached]

    return push_forward(moved_only, ys, lambda: [tangents[i] for i in reached])


# --- the user's function, called with the operands --------------------------------------------


class CapturedTracerError(Exception):
    """The function closes over a value that JAX is tracing: it must be hoisted."""


@jax.tree_util.register_static
class Direct:
    """A call whose function closes over nothing that JAX traces, as far as is known."""

    def __init__(
        self, call: Call, forward_mode: bool, may_capture: bool, variables: Variables | None
    ) -> None:
        self._call = call
        self._forward_mode = forward_mode
        self._may_capture = may_capture  # it may; to be found out while values are concrete
        self._variables = variables
        self.source = call.contract.source
        self.treedef: Any = None  # of `y`, once `f` has run

    def primal(self, operands: Sequence[Any]) -> list[Any]:
        return self._apply(operands)[0]

    def _apply(self, operands: Sequence[Any]) -> tuple[list[Any], Outputs, Any, bool]:
        concrete = not _traced(operands)
        if self._may_capture and not concrete:
            raise CapturedTracerError
        leaves, outputs, grad_fn = self._call.apply(operands)
        self.treedef = outputs.treedef
        if concrete and _traced(leaves):
            if self._may_capture:
                raise CapturedTracerError
            concrete = False
        return leaves, outputs, grad_fn, concrete

    def forward(
        self, operands: Sequence[Any], perturbed: Sequence[bool] | None
    ) -> tuple[list[Any], Rule]:
        leaves, outputs, grad_fn, concrete = self._apply(operands)
        specs = [spec(o) for o in operands]
        # With concrete values there is nothing for JAX to carry, and nothing to trace.
        as_it_is = self._rule(lambda _: grad_fn, [], outputs, specs)
        if concrete and not self._may_capture:
            return leaves, as_it_is
        try:
            lifted = lift(grad_fn)
            if lifted is not None:
                rule = self._rule(*lifted, outputs, specs)
            else:
                contract = self._call.contract
                rule = traced_rule(contract, grad_fn, leaves, outputs, specs, self._variables)
        except NeedsValuesError:
            if not concrete:
                # The rule branches on values, so these are concrete one level down: let the
                # next level of differentiation call `f` again, where it will see them.
                leaves = differentiable(self, operands, self._forward_mode, closed_over=False)
            return leaves, as_it_is
        if not concrete:
            return attach(leaves, operands, rule), rule
        if rule.residuals:
            raise CapturedTracerError
        return leaves, as_it_is

    def _rule(self, rebuild: Any, residuals: Any, outputs: Outputs, specs: Sequence[Spec]) -> Rule:
        contract, variables = self._call.contract, self._variables
        return lifted_rule(contract, rebuild, residuals, outputs, specs, lambda _: variables)


def _traced(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tracer) for v in values)
