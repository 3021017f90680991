"""Make JAX use a rule: the one place that knows `jax.custom_vjp` and `jax.custom_jvp`.

A *program* is what gets differentiated: `primal(operands)` is its value, `forward(operands,
perturbed)` its value and its `Rule` (`_rules.py`). `Direct` below calls the user's function;
`_closure.Hoisted` evaluates a jaxpr of it. `differentiable(program)` tells how to run it:

    not differentiated       primal
    reverse mode             _forward, later _backward
    either mode              _jvp, for `forward_mode=True` and inside the rules of others

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
from ._call import Call, Variables, inside_derivative
from ._compat import SCAN_DROPS_CUSTOM_JVP
from ._linear import NotLinearError, push_forward
from ._rules import NeedsValuesError, Rule, Static, lift, lifted_rule, traced_rule
from ._structure import Outputs, Spec, spec


def _signed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the signature of `f`: JAX works it out at every call of a custom derivative."""
    f.__signature__ = inspect.signature(f)  # type: ignore[attr-defined]
    return f


class Program(Protocol):
    """A pytree without leaves: static to JAX."""

    source: _errors.Source
    forward_mode: bool
    has_refused: bool  # it closes over values that have no gradient

    def primal(self, operands: Sequence[Any]) -> list[Any]: ...
    def forward(self, operands: Sequence[Any], perturbed: Sequence[bool] | None) -> Any: ...


def differentiable(program: Program) -> Callable[..., list[Any]]:
    """Return what runs the program on operands so that JAX differentiates it by its rule."""
    if program.forward_mode or inside_derivative.get():
        return _either_mode
    return _reverse_perturbed if program.has_refused else _reverse


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
        aval: Any = value.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return value


_reverse = jax.custom_vjp(_primal)
_reverse.defvjp(_forward, _backward)
# Only to know which operands are differentiated costs more, so only closures ask for it.
_reverse_perturbed = jax.custom_vjp(_primal)
_reverse_perturbed.defvjp(_forward_perturbed, _backward, symbolic_zeros=True)


@_signed
def _primal_reverse(program: Program, *operands: Any) -> list[Any]:
    chosen = _reverse_perturbed if program.has_refused else _reverse
    return chosen(program, *operands)


_either_mode = jax.custom_jvp(_primal_reverse if SCAN_DROPS_CUSTOM_JVP else _primal)


@functools.partial(_either_mode.defjvp, symbolic_zeros=True)
@_signed
def _jvp(primals: Any, tangents: Any) -> Any:
    (program, *operands), (_, *tangents) = primals, tangents
    perturbed = [not isinstance(t, SymbolicZero) for t in tangents]
    leaves, rule = program.forward(operands, perturbed)
    positions = rule.static.outputs.differentiable
    ys = [leaves[i] for i in positions]
    must_be_linear = program.source if program.forward_mode else None
    dys = iter(_pushed(rule, ys, operands, tangents, must_be_linear))
    return leaves, [
        next(dys) if i in positions else np.zeros(leaf.shape, jax.dtypes.float0)
        for i, leaf in enumerate(leaves)
    ]


# --- every order ---------------------------------------------------------------------------


def attach(leaves: list[Any], operands: Sequence[Any], rule: Rule) -> list[Any]:
    """Return `leaves` with the rule as their derivative with respect to the operands."""
    positions = rule.static.outputs.differentiable
    ys = [leaves[i] for i in positions]
    places = {id(v): i for i, v in enumerate((*ys, *operands))}
    shared = [places.get(id(r)) for r in rule.residuals]
    rest = [r for r, place in zip(rule.residuals, shared, strict=True) if place is None]
    attached = iter(_attach(ys, list(operands), rest, _Shared(rule.static, shared)))
    return [next(attached) if i in positions else leaf for i, leaf in enumerate(leaves)]


@jax.tree_util.register_static
class _Shared:
    """A rule without its residuals, some of which are among the outputs and the operands."""

    def __init__(self, static: Static, places: Sequence[int | None]) -> None:
        self.static = static
        self._places = places

    def rule(self, ys: Sequence[Any], operands: Sequence[Any], rest: Sequence[Any]) -> Rule:
        known, others = [*ys, *operands], iter(rest)
        return Rule(self.static, [next(others) if p is None else known[p] for p in self._places])


@_signed
def _keep(ys: Any, operands: Any, rest: Any, shared: _Shared) -> Any:
    return ys


@_signed
def _keep_reverse(ys: Any, operands: Any, rest: Any, shared: _Shared) -> Any:
    return _reverse_of(shared)(ys, operands, rest, shared)


@_signed
def _attach_jvp(primals: Any, tangents: Any) -> Any:
    ys, operands, rest, shared = primals
    rule = shared.rule(ys, operands, rest)
    rule.check([not isinstance(t, SymbolicZero) for t in tangents[1]])
    return _attach(*primals), _pushed(rule, ys, operands, tangents[1], None)


@_signed
def _attach_forward(ys: Any, operands: Any, rest: Any, shared: _Shared) -> Any:
    return _attach(ys, operands, rest, shared), shared.rule(ys, operands, rest)


@_signed
def _attach_forward_perturbed(ys: Any, operands: Any, rest: Any, shared: _Shared) -> Any:
    perturbed = [o.perturbed for o in operands]
    values = jax.tree.map(lambda p: p.value, (ys, operands, rest))
    shared.rule(*values).check(perturbed)
    return _attach_forward(*values, shared)


@_signed
def _attach_backward(rule: Rule, cotangents: Any) -> Any:
    return None, rule([_instantiate(c) for c in cotangents]), None, None


# Where JAX puts the function in the place of the custom_jvp, let it be the same as a custom_vjp.
_attach = jax.custom_jvp(_keep_reverse if SCAN_DROPS_CUSTOM_JVP else _keep)
_attach.defjvp(_attach_jvp, symbolic_zeros=True)
_attach_reverse = jax.custom_vjp(_keep)
_attach_reverse.defvjp(_attach_forward, _attach_backward)
_attach_reverse_perturbed = jax.custom_vjp(_keep)
_attach_reverse_perturbed.defvjp(_attach_forward_perturbed, _attach_backward, symbolic_zeros=True)


def _reverse_of(rule: Rule | _Shared) -> Any:
    return _attach_reverse if rule.static.refuse is None else _attach_reverse_perturbed


def depending(leaf: Any, operands: Sequence[Any]) -> Any:
    """Return `leaf` as a value that depends on the operands, which it does not.

    A rule may use what `y` ignores. If vmap maps such an operand, it must map `y` too: else it
    adds the upstreams of all examples up before the rule, and not their gradients after it. It
    compiles to nothing.
    """
    if not spec(leaf).differentiable:
        return leaf  # it has no upstream
    for operand in operands:
        if isinstance(operand, Tracer) and not jnp.issubdtype(operand.dtype, jax.dtypes.extended):
            first = jnp.reshape(operand, (-1,))[:1]
            leaf = jnp.asarray(leaf)
            other = jnp.broadcast_to(jnp.sum(first).astype(leaf.dtype), leaf.shape)
            leaf = jax.lax.select_n(jnp.zeros(leaf.shape, bool), leaf, other)
    return leaf


def _pushed(
    rule: Rule,
    ys: Sequence[Any],
    operands: Sequence[Any],
    tangents: Sequence[Any],
    must_be_linear: _errors.Source | None,
) -> list[Any]:
    """Push the tangents of the operands through the rule, to tangents of the outputs."""
    moved = [
        i
        for i, (t, s) in enumerate(zip(tangents, rule.static.specs, strict=True))
        if s.differentiable and not isinstance(t, SymbolicZero)
    ]
    reached: list[int] = []  # those of them that the rule gives a gradient

    def gradients(cotangents: Sequence[Any]) -> list[Any]:
        found = rule(cotangents)
        reached[:] = [i for i in moved if found[i] is not None]
        return [found[i] for i in reached]

    try:
        return push_forward(gradients, ys, lambda: [tangents[i] for i in reached])
    except NotLinearError as error:
        if must_be_linear is not None:
            raise _errors.not_linear(must_be_linear, str(error)) from None

    # Right in reverse mode, at every order; forward mode meets JAX's own refusal.
    def reverse(*changed: Any) -> Any:
        mixed = list(operands)
        for i, operand in zip(moved, changed, strict=True):
            mixed[i] = operand
        shared = _Shared(rule.static, [None] * len(rule.residuals))
        return _reverse_of(rule)(ys, mixed, rule.residuals, shared)

    return jax.jvp(reverse, [operands[i] for i in moved], [tangents[i] for i in moved])[1]


class CapturedTracerError(Exception):
    """The function closes over a value that JAX is tracing: it must be hoisted."""


@jax.tree_util.register_static
class Direct:
    """A call whose function closes over nothing that JAX traces, as far as is known."""

    has_refused = False

    def __init__(
        self, call: Call, forward_mode: bool, may_capture: bool, variables: Variables | None
    ) -> None:
        self._call = call
        self._may_capture = may_capture  # it may; to be found out while values are concrete
        self._variables = variables
        self.forward_mode = forward_mode
        self.source = call.contract.source
        self.treedef: Any = None  # of `y`, once `f` has run
        self._known: Any = None

    def run_on_values(self, operands: Sequence[Any]) -> None:
        """Run `f` now if, apart from being differentiated, its operands are concrete.

        For versions of JAX that trace even what is called eagerly: they get this result.
        """
        values = [jax.lax.stop_gradient(o) for o in operands]
        if not _traced(values):
            self._known = self._call.apply(values, in_forward_pass=True)
            if _traced(self._known[0]):
                raise CapturedTracerError
            self.treedef = self._known[1].treedef

    def primal(self, operands: Sequence[Any]) -> list[Any]:
        if self._known is not None:
            return self._known[0]
        concrete = self._concrete(operands)
        leaves, outputs, _ = self._call.apply(operands)
        self._still_concrete(concrete, leaves)
        self.treedef = outputs.treedef
        return _depending(leaves, operands)

    def _concrete(self, operands: Sequence[Any]) -> bool:
        """Tell whether `f` is about to see concrete values."""
        concrete = not _traced(operands)
        if self._may_capture and not concrete:
            raise CapturedTracerError
        return concrete

    def _still_concrete(self, concrete: bool, leaves: Sequence[Any]) -> bool:
        """Tell whether all that `f` has seen was: its outputs show a captured tracer."""
        if concrete and _traced(leaves):
            if self._may_capture:
                raise CapturedTracerError
            return False
        return concrete

    def forward(
        self, operands: Sequence[Any], perturbed: Sequence[bool] | None
    ) -> tuple[list[Any], Rule]:
        if self._known is not None and not _traced(operands):
            concrete, (leaves, outputs, grad_fn) = True, self._known
        else:
            concrete = self._concrete(operands)
            leaves, outputs, grad_fn = self._call.apply(operands, in_forward_pass=True)
            concrete = self._still_concrete(concrete, leaves)
            self.treedef = outputs.treedef
        specs = [spec(o) for o in operands]

        def as_it_is() -> Rule:
            return self._rule(lambda _: grad_fn, [], outputs, specs)

        if concrete and not self._may_capture:
            # With concrete values there is nothing for JAX to carry, and nothing to trace.
            return leaves, as_it_is()
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
                leaves = differentiable(self)(self, *operands)
            return leaves, as_it_is()
        if not concrete:
            return attach(_depending(leaves, operands), operands, rule), rule
        if rule.residuals:
            raise CapturedTracerError
        return leaves, as_it_is()

    def _rule(self, rebuild: Any, residuals: Any, outputs: Outputs, specs: Sequence[Spec]) -> Rule:
        contract, variables = self._call.contract, self._variables
        return lifted_rule(contract, rebuild, residuals, outputs, specs, lambda _: variables)


def _depending(leaves: list[Any], operands: Sequence[Any]) -> list[Any]:
    """Make outputs depend on the operands that they certainly do not depend on.

    An output that is one of the operands does not depend on the others; one that another
    transformation traces is not mapped where the operands of this one are.
    """
    kinds = {type(o) for o in operands}
    ids = {id(o) for o in operands}
    if len(kinds) == 1 and all(type(y) in kinds and id(y) not in ids for y in leaves):
        return leaves
    return [
        depending(
            y, [o for o in operands if o is not y and (id(y) in ids or type(o) is not type(y))]
        )
        for y in leaves
    ]


def _traced(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tracer) for v in values)
