"""Make JAX differentiate a function by its rule: the one place that knows JAX's custom derivatives.

`differentiated` runs a `Function` on operands:

    if JAX ...                 what runs is ...
    does not differentiate     Function.value
    does                       a custom_jvp: Function.forward, then `push` of the tangents
    drops the custom_jvp       the custom_vjp that we put below it (`KEEPS_CUSTOM_JVP` says when)
    transposes the call        a `push`, whose value is Function.value

`record` is for a forward pass that has run one level down already: a custom_vjp that records the
rule, in reverse mode, or else `attach`, whose derivative is a `push`.

`push` is the linear map that the rule is the transpose of, so reverse mode runs the rule.

The forward pass does not return `y`, whose derivative would be that of `f`'s own operations. It
returns `attach(y, operands, rule)`: the identity on `y`, whose derivative with respect to the
operands is the rule. So the declared gradient holds at every order. Each differentiation removes
one `attach`. Nothing runs twice, and `attach` compiles to no operation.
"""

import dataclasses
import functools
import inspect
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun

from .._jax.compat import KEEPS_CUSTOM_JVP, is_partial_sum, is_ref, is_reverse, weakly_typed, zeros
from .._jax.jaxpr import dependence
from .._jax.trace import below, is_staging, is_transposed
from .._jax.types import (
    AnyFunction,
    Cotangents,
    Indices,
    Leaf,
    Values,
    is_differentiable,
    is_kind,
    is_traced,
)
from .._messages import errors
from .._messages.runs import annotate
from .._messages.source import Source
from .._messages.tracebacks import hidden
from .attached import Forward, Function, arrays, attached, tangents_of, with_rule
from .primitives import depend, push_by_type
from .rule import Rule, replaced
from .transpose import at_any_point


def differentiated(function: Function, name: str, operands: Values) -> list[Leaf]:
    """Run a function on operands so that its rule is its derivative."""
    if any(map(is_ref, operands)):  # JAX accepts them in a custom_vjp alone
        return _reverse(name, function.needs_perturbed)(function, [*operands])
    if any(map(is_transposed, operands)):
        return _linear(function, arrays(operands))
    return _any_mode(name, function.needs_perturbed)(function, [*operands])


def record(
    forward: Forward, name: str, source: Source, operands: Values, primals: Values, of: Any
) -> list[Leaf]:
    """Let JAX differentiate a forward pass that has run one level down.

    In reverse mode, JAX records the rule as a custom_vjp, which is cheaper than to differentiate
    `attach`. It gets only the operands that have a gradient: JAX takes about 10 us for each. A
    function may close over all weights of a model and use one. In the trace of 64 such layers, the
    others took a third of the time.
    """
    both = enumerate(zip(primals, operands, strict=True))
    perturbed = [i for i, (p, o) in both if p is not o and is_differentiable(p.dtype)]
    with below(of):
        leaves, rule = with_rule(forward, source, primals, perturbed)
        if is_reverse(of):
            leaves, rule = attached(leaves, rule, primals)
    if not is_reverse(of):
        return attached(leaves, rule, operands)[0]
    if not rule.perturbed:
        return leaves
    if any(map(is_ref, rule.residuals)):  # a custom_vjp takes none but its own operands
        rule, residuals = rule.apart()
        rule = dataclasses.replace(rule, residuals=residuals)
    with_vjp = jax.custom_vjp(_NOT_RUN)  # JAX would keep this function, and what it holds
    with_vjp.defvjp(_returning(leaves, rule), _backward(name))
    return with_vjp(*[operands[i] for i in rule.perturbed])


def _returning(leaves: Any, rule: Any) -> AnyFunction:
    """Return a function that returns this, with its signature, which JAX would compute."""

    def run(*_: Leaf) -> Any:
        return leaves, rule

    run.__signature__ = _ANY  # type: ignore[attr-defined]
    return run


_ANY = inspect.signature(lambda *_: None)
_NOT_RUN = _returning(None, None)


@functools.cache
def _backward(name: str) -> AnyFunction:
    """Return the backward pass of a custom_vjp of the perturbed operands of a rule."""

    def backward(rule: Rule, cotangents: Cotangents) -> list[Leaf]:
        upstreams = (cotangents[i] for i in rule.outputs)
        upstreams = [zeros(c.aval) if type(c) is SymbolicZero else c for c in upstreams]
        return rule(rule.residuals, upstreams)

    return _shown_as(name, backward)


# If the rule `needs_perturbed`, symbolic zeros show which operands are being differentiated. No
# other function gets them: a Pallas kernel cannot lower them.
@functools.cache
def _any_mode(name: str, needs_perturbed: bool) -> AnyFunction:
    """Return what runs a function that is differentiated in any mode."""
    # From JAX 0.12 on without a custom_vjp: Triton, which compiles kernels, has none.
    value = _value if KEEPS_CUSTOM_JVP else _reverse(name, needs_perturbed)

    def jvp(primals: Any, tangents: Any) -> Any:
        (function, operands), (_, dots) = primals, tangents
        perturbed = [i for i, dot in enumerate(dots) if type(dot) is not SymbolicZero]
        leaves, rule = _forward(function, operands, perturbed)
        return leaves, tangents_of(leaves, rule, dots)

    any_mode = jax.custom_jvp(_shown_as(name, value))
    any_mode.defjvp(_shown_as(name, jvp), symbolic_zeros=needs_perturbed)
    return any_mode


@functools.cache
def _reverse(name: str, needs_perturbed: bool) -> AnyFunction:
    """Return what runs a function that is differentiated in reverse mode, and may be staged.

    JAX does not save a residual that is an operand. Before 0.12 it then uses the wrong value if
    the custom_vjp was staged together with constants. So such residuals are copied. Remove when
    0.12 is the oldest supported.
    """

    def forward(function: Function, operands: list[Any]) -> tuple[Any, Rule]:
        perturbed = range(len(operands))
        if needs_perturbed:
            perturbed = [i for i, o in enumerate(operands) if o.perturbed]
            operands = [o.value for o in operands]
        leaves, rule = _forward(function, operands, perturbed)
        if not KEEPS_CUSTOM_JVP:
            own = {id(o) for o in operands if not is_ref(o)}
            kept = [depend([r], [])[0] if id(r) in own else r for r in rule.residuals]
            rule = dataclasses.replace(rule, residuals=kept)
        return leaves, rule

    def backward(rule: Rule, cotangents: Cotangents) -> tuple[None, list[Leaf]]:
        gradients = pulled_back(rule, cotangents)
        return None, replaced([None] * rule.n_operands, rule.perturbed, gradients)

    pulled_back, with_vjp = _backward(name), jax.custom_vjp(_shown_as(name, _value))
    with_vjp.defvjp(_shown_as(name, forward), backward, symbolic_zeros=needs_perturbed)
    return with_vjp


def _shown_as(name: str, f: AnyFunction) -> AnyFunction:
    """Return `f` such that jaxprs and profiles show it as an operation of this name.

    With its signature, which JAX would compute at every call. (`Source.named` is for what JAX
    traces: it gives errors the names and the line of the user's function.)
    """
    named: Any = hidden(jax.named_scope(name)(f))  # the name of the operations in profiles
    named.__name__ = named.__qualname__ = name
    named.__signature__ = inspect.signature(f)
    del named.__wrapped__  # JAX would show its name
    return named


def _forward(function: Function, operands: Values, perturbed: Indices) -> tuple[list[Leaf], Rule]:
    """Run the forward pass of a function, with the rule attached to what it returns."""
    operands = arrays(operands)
    perturbed = [i for i in perturbed if is_differentiable(operands[i].dtype)]
    try:
        forward = function.forward(operands, perturbed)
    except Exception as error:  # JAX may be unable to differentiate its operations
        annotate(error, function.source)
        raise
    leaves, rule = with_rule(forward, function.source, operands, perturbed)
    leaves, rule = attached(leaves, rule, operands)
    return _with_axis_in_front(function, leaves), rule


def _value(function: Function, operands: Values) -> list[Leaf]:
    """Return the leaves of the value, in a call that JAX does not differentiate."""
    operands = arrays(operands)
    if not is_traced(operands) or any(map(is_ref, operands)):
        leaves = function.value(operands)
    else:
        leaves = _staged(function, operands) if is_staging() else function.value(operands)
        leaves = list(map(_not_transposable, leaves))
    return _with_axis_in_front(function, leaves)


def _staged(function: Function, operands: Values) -> list[Leaf]:
    """Return the leaves of the value, in a call that JAX records."""
    # JAX may map the staged call later, and then differentiate it. If an operand is mapped, each
    # output must be mapped: also one that ignores the operand, which the rule may use, and one that
    # all examples share, as they share a sum over them, while each has its own upstream.

    def run(*operands: Leaf) -> list[Leaf]:
        return function.value(operands)

    value = function.source.named(run, function.names())
    closed = jax.jit(value).trace(*operands).jaxpr
    if len(closed.jaxpr.invars) > len(operands):  # JAX makes operands of captured tracers
        raise errors.leaked(function.source)
    leaves, first = jaxpr_as_fun(closed)(*operands), len(closed.consts)
    for i, mask in enumerate(dependence(closed.jaxpr, mapped=True)):
        ignored = [o for k, o in enumerate(operands, first) if not mask >> k & 1]
        if ignored:
            (leaves[i],) = depend([leaves[i]], ignored)
    return leaves


def _not_transposable(leaf: Leaf) -> Any:
    """Return a leaf such that `jax.linear_transpose` raises.

    It would transpose `f`'s own operations, not run the rule. Before JAX 0.12, the custom_vjp makes
    it raise. The mark must lower in every kernel and compile to nothing, and no import may teach
    JAX to transpose it. With `stop_gradient`, which lineax transposes, a rule of 5 over a body of 2
    gave 2, and no Mosaic GPU kernel lowered; an identity `custom_vjp` does not lower in Triton. A
    bit cast has no type for parts of a sum over devices, and no kernel has these.
    """
    if not KEEPS_CUSTOM_JVP or not is_differentiable(leaf.dtype):
        return leaf
    if is_kind(leaf.dtype, jax.dtypes.extended) or is_partial_sum(leaf):
        return jax.lax.stop_gradient(leaf)
    marked = jax.lax.bitcast_convert_type(leaf, leaf.dtype)
    return weakly_typed(marked) if leaf.weak_type else marked


def _linear(function: Function, operands: Values) -> list[Leaf]:
    """Return the leaves under `jax.linear_transpose`, with the rule as their transpose.

    The rule of a linear function is the same at every point; a gradient that depends on the point
    raises.
    """
    linear = [i for i, o in enumerate(operands) if is_transposed(o)]
    known = [o for o in operands if not is_transposed(o)]
    points = [operands[i] for i in linear]
    types = [jax.typeof(x).to_tangent_aval() for x in points]

    def gradients(points: Values, values: Values, cotangents: Cotangents) -> list[Leaf]:
        every = list(values)
        for i, x in zip(linear, points, strict=True):
            every.insert(i, x)
        _, rule = _forward(function, every, linear)
        dxs = rule(rule.residuals, [cotangents[i] for i in rule.outputs])
        given = {i: dx for i, dx in zip(rule.perturbed, dxs, strict=True) if dx is not None}
        return [given.get(i, zero) for i, zero in zip(linear, points, strict=True)]

    def transpose(values: Values, cotangents: Cotangents, wanted: Any) -> list[Leaf]:
        closed = at_any_point(gradients, types, values, cotangents)
        if closed is None:
            text = "a gradient that depends on its inputs"
            raise errors.not_linear(function.source, text)
        every = jaxpr_as_fun(closed)(*values, *cotangents)
        return [every[x] for x in wanted]

    ys = jax.make_jaxpr(lambda *operands: function.value(operands))(*operands).out_avals
    rule = Rule((), transpose, function.source, range(len(linear)))
    return push_by_type(known, points, rule, tuple(y.to_tangent_aval() for y in ys))


def _with_axis_in_front(function: Function, leaves: list[Leaf]) -> list[Leaf]:
    """Return the leaves with a mapped axis in front, so that `primal` and `f` agree about it.

    `expand_dims` forces it there; unlike `depend`, Pallas can lower it.
    """
    if not (function.has_primal and is_traced(leaves)):
        return leaves
    return [jax.lax.squeeze(jax.lax.expand_dims(leaf, [0]), [0]) for leaf in leaves]
