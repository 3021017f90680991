"""Make JAX use a rule: the one place that knows `jax.custom_vjp` and `jax.custom_jvp`.

A *program* is what gets differentiated: `primal(operands)` is its value, `forward(operands,
perturbed)` its value and its `Rule` (`_rules.py`). `_direct.Direct` calls the user's
function; `_closure.Hoisted` evaluates a jaxpr of it. `differentiable(program)` tells how to run it:

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
from ._call import inside_derivative
from ._compat import SCAN_DROPS_CUSTOM_JVP
from ._linear import NotLinearError, push_forward
from ._rules import Rule, Static
from ._structure import spec, sum_of_nothing


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
    traced = [
        o
        for o in operands
        if isinstance(o, Tracer) and not jnp.issubdtype(o.dtype, jax.dtypes.extended)
    ]
    if not traced or not spec(leaf).differentiable:  # it has no upstream
        return leaf
    leaf = jnp.asarray(leaf)
    return jax.lax.sub(leaf, jax.lax.broadcast(sum_of_nothing(traced, leaf.dtype), leaf.shape))


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
        first = must_be_linear is not None
        return push_forward(gradients, ys, lambda: [tangents[i] for i in reached], first)
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
