"""Evaluate `push`: transpose a rule, which is what forward mode is made of.

`push_forward` runs when a tangent is pushed through a rule and not transposed again: `jvp`,
`jacfwd`, `hessian`. `jax.linear_transpose` alone would accept `dy + c` and drop the `c`, so
`linearity.check` is asked first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from tfgrad_jax import _errors
from tfgrad_jax._compat import zeros
from tfgrad_jax._jaxpr import call_body, evaluate, open_jaxpr, without_consts
from tfgrad_jax._source import Source
from tfgrad_jax._types import NeedsValuesError

from .linearity import NotLinearError, check


def push_forward(
    rule: Callable[[Sequence[Any]], Sequence[Any]],
    types: Sequence[Any],
    tangents: Sequence[Any],
    source: Source,
) -> list[Any]:
    """Return the transpose of `rule`, applied to `tangents`.

    `rule` maps cotangents of these types to a gradient, or None, for each of the tangents.
    """
    try:
        return transposed(rule, types, tangents)
    except NotLinearError as error:
        raise _errors.not_linear(source, str(error)) from None


def transposed(
    rule: Callable[[Sequence[Any]], Sequence[Any]], types: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Do what `push_forward` does; raise `NotLinearError` where there is no transpose."""
    kept: list[int] = []

    def gradients(cotangents: Sequence[Any]) -> list[Any]:
        found = rule(cotangents)
        kept[:] = [i for i, g in enumerate(found) if g is not None]
        return [found[i] for i in kept]

    try:
        closed = jax.make_jaxpr(gradients)(types)
    except NeedsValuesError:
        closed = _traced_on_values(gradients, types)
    unknown = check(closed)
    linear = _linear_part(closed)
    moved = [tangents[i] for i in kept]
    try:
        return list(jax.linear_transpose(linear, *types)(moved))
    except Exception as error:  # of any type, by version and operation
        if unknown:
            text = f"`{unknown[0].primitive.name}`, which JAX cannot transpose"
            raise NotLinearError(text, unknown[0]) from error
        # Linear, but in a form that only differentiation can transpose.
        return list(jax.vjp(linear, *map(zeros, types))[1](moved))


def _traced_on_values(rule: Callable[..., Sequence[Any]], types: Sequence[Any]) -> ClosedJaxpr:
    """Trace a rule that branches on values of the forward pass.

    JAX records what a rule for tangents does with these, and evaluates everything else.
    """

    @jax.custom_jvp
    def probe(*ys: Any) -> Any:
        return ys

    @probe.defjvp
    def _(_: Any, tangents: Any) -> Any:
        found = rule(list(tangents))
        return [np.zeros(g.shape, g.dtype) for g in found], list(found)

    try:
        push = jax.linearize(probe, *map(zeros, types))[1]
    except NeedsValuesError:
        raise NotLinearError("a branch on the upstream") from None
    return jax.make_jaxpr(lambda cotangents: push(*cotangents))(types)


def _linear_part(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Evaluate what does not depend on the arguments; return the rest, a linear function.

    Left in, the constant part would be evaluated by the transposition, where JAX forgets the
    custom derivatives of what is in it.
    """
    jaxpr = closed.jaxpr
    if not any(map(_is_replaced, jaxpr.eqns)):
        return jaxpr_as_fun(closed)
    reached = set(jaxpr.invars)
    constant, dependent = [], []
    for eqn in jaxpr.eqns:
        if any(not isinstance(a, Literal) and a in reached for a in eqn.invars):
            reached.update(eqn.outvars)
            dependent.append(eqn)
        else:
            constant.append(eqn)
    needed = {v for eqn in dependent for v in eqn.invars if not isinstance(v, Literal)}
    needed.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    computed = [v for eqn in constant for v in eqn.outvars if v in needed]
    consts = list(closed.consts)
    before = jaxpr.replace(
        constvars=[], invars=list(jaxpr.constvars), outvars=computed, eqns=constant
    )
    arguments = [*jaxpr.constvars, *computed, *jaxpr.invars]
    after = jaxpr.replace(constvars=[], invars=arguments, eqns=dependent)
    consts += evaluate(before, *consts)
    return lambda *cotangents: _evaluate_bodies(after, *consts, *cotangents)


def _is_custom(eqn: Any) -> bool:
    """Return whether an equation is a call with a derivative of its own."""
    return eqn.primitive.name.startswith("custom_") and call_body(eqn) is not None


def _is_replaced(eqn: Any) -> bool:
    """Return whether an equation holds something that matters to derivatives alone."""
    if _is_custom(eqn) or eqn.primitive.name == "stop_gradient":
        return True
    body = call_body(eqn)
    return body is not None and any(
        e.primitive.name == "stop_gradient" for e in open_jaxpr(body).eqns
    )


def _evaluate_bodies(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluate a jaxpr with the bodies of such calls in their place, and without stops.

    To transpose a map is not to differentiate it: what is declared for its derivative governs
    the derivative of the rule, and not the rule.
    """
    known = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "stop_gradient":
            results = [read(a) for a in eqn.invars]
        elif _is_replaced(eqn):
            body = call_body(eqn)
            values = [read(a) for a in eqn.invars]
            results = _evaluate_bodies(without_consts(body), *body.consts, *values)
        else:
            variables = list({a: None for a in eqn.invars if not isinstance(a, Literal)})
            single = jaxpr.replace(
                constvars=[], invars=variables, outvars=list(eqn.outvars), eqns=[eqn]
            )
            results = evaluate(single, *map(read, variables))
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]
