"""Transpose a rule, which is what forward mode is made of, and tell when that is wrong.

`push_forward` runs when a derivative is pushed through a rule: `jvp` of a function with
`forward_mode=True`, and a second derivative of any function. `jax.linear_transpose` alone
would accept `dy + c` and drop the `c`, so `_kinds` first walks the rule's equations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ._compat import evaluate
from ._rules import NeedsValuesError

# What an intermediate value of a rule is, as a function of the upstream gradients.
_ZERO, _CONSTANT, _LINEAR = range(3)

# Linear in all their operands together.
_TOGETHER = (
    "neg", "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "rev",
    "reduce_sum", "cumsum", "convert_element_type", "reduce_precision", "copy", "copy_p",
    "real", "imag", "conj", "complex", "concatenate", "pad", "add", "sub", "add_any", "psum",
    "psum2", "psum_invariant", "pvary", "pcast", "all_gather", "all_to_all", "ppermute", "fft",
    "reduce_window_sum", "sharding_constraint", "mesh_cast", "reshard",
)  # fmt: skip
# Operations that are linear in the operands at these positions (None: in all of them together),
# while the others, such as indices, are constant.
_LINEAR_IN: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_TOGETHER),
    "gather": (0,),
    "dynamic_slice": (0,),
    "div": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter-add": (0, 2),
    "scatter": (0, 2),
    "triangular_solve": (1,),
    "select_n": tuple(range(1, 100)),
}
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}


class NotLinearError(Exception):
    """The rule is not linear in its upstream gradients; says which operation is not."""


def push_forward(
    rule: Callable[[Sequence[Any]], Sequence[Any]],
    outputs: Sequence[Any],
    tangents: Callable[[], Sequence[Any]],
) -> list[Any]:
    """Return the tangents of `outputs`: the transpose of `rule`, applied to `tangents`.

    `rule` maps cotangents like `outputs` to gradients like `tangents()`, which is asked for
    after the rule has run.
    """
    try:
        closed = jax.make_jaxpr(rule)(outputs)
    except NeedsValuesError:
        return list(_pull_back_at_zero(rule, outputs)(list(tangents())))
    kinds = _kinds(closed, [_LINEAR] * len(closed.jaxpr.invars))
    linear = _linear_part(closed, kinds)
    try:
        transposed = jax.linear_transpose(linear, *outputs)
        return list(transposed(list(tangents())))
    except (NotImplementedError, AssertionError, TypeError, ValueError) as error:
        raise NotLinearError(f"an operation that JAX cannot transpose ({error})") from error


def _pull_back_at_zero(rule: Any, outputs: Sequence[Any]) -> Callable[[Any], Any]:
    """Transpose a rule that branches on values: the derivative of a linear map is the map."""
    zeros = [jnp.zeros_like(y) for y in outputs]
    value, pull_back = jax.vjp(rule, zeros)
    for factor in (1.0, -2.0):
        probe = [jnp.full_like(y, factor) for y in outputs]
        slope = jax.jvp(rule, (zeros,), (probe,))[1]
        for got, linear, at_zero in zip(rule(probe), slope, value, strict=True):
            if not np.allclose(got, linear, 1e-2, 1e-3) or np.any(at_zero):
                raise NotLinearError("a branch on the upstream, or a constant")
    return lambda tangents: pull_back(tangents)[0]


def _linear_part(closed: ClosedJaxpr, kinds: dict[Any, int]) -> Callable[..., list[Any]]:
    """Evaluate what does not depend on the arguments; return the rest, a linear function.

    Left in, the constant part would be evaluated by the transposition, where JAX forgets the
    custom derivatives of what is in it.
    """
    jaxpr = closed.jaxpr
    dependent = [eqn for eqn in jaxpr.eqns if any(kinds.get(v) == _LINEAR for v in eqn.outvars)]
    constant = [eqn for eqn in jaxpr.eqns if all(kinds.get(v) != _LINEAR for v in eqn.outvars)]
    if not any(eqn.primitive.name.startswith("custom_") for eqn in constant):
        return jaxpr_as_fun(closed)
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
    return lambda *cotangents: evaluate(after, *consts, *cotangents)


def _kinds(closed: ClosedJaxpr, given: Sequence[int]) -> dict[Any, int]:
    """Tell of each variable what it is as a function of the arguments, of which kinds are given.

    Raises at the first operation that is not linear. One that is not known here counts as
    linear: `jax.linear_transpose` is the judge of it.
    """
    jaxpr = closed.jaxpr
    kinds: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        kinds[var] = _constant(value)
    for eqn in jaxpr.eqns:
        operands = [_constant(a.val) if isinstance(a, Literal) else kinds[a] for a in eqn.invars]
        kinds.update(zip(eqn.outvars, _results(eqn, operands), strict=True))
    return kinds


def _results(eqn: Any, operands: Sequence[int]) -> Sequence[int]:
    """Return the kinds of the results of an equation, or raise if it is not linear."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if _LINEAR not in operands:
        known = name in _LINEAR_IN or name in _PRODUCTS
        zero = known and all(kind == _ZERO for kind in operands)
        return [_ZERO if zero else _CONSTANT] * count
    if name in _PRODUCTS:
        if list(operands).count(_LINEAR) > 1:
            raise NotLinearError(f"`{name}` of two upstreams")
        return [_ZERO if _ZERO in operands else _LINEAR] * count
    if name in _LINEAR_IN:
        positions = _LINEAR_IN[name]
        for i, kind in enumerate(operands):
            linear_in = positions is None or i in positions
            if kind == _LINEAR and not linear_in:
                raise NotLinearError(f"`{name}`, which is not linear in its operand {i}")
            if kind == _CONSTANT and linear_in:
                raise NotLinearError(f"`{name}` of an upstream and a constant")
        return [_LINEAR] * count
    body = _body(eqn)
    if body is None:
        return [_LINEAR] * count
    inner = _kinds(body, operands)
    return [_constant(v.val) if isinstance(v, Literal) else inner[v] for v in body.jaxpr.outvars]


def _body(eqn: Any) -> ClosedJaxpr | None:
    """Return the body of an equation that calls it once, with its own operands."""
    if eqn.primitive.name not in ("scan", "while"):
        for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            body = eqn.params.get(parameter)
            if isinstance(body, ClosedJaxpr) and len(body.jaxpr.invars) == len(eqn.invars):
                return body
    return None


def _constant(value: Any) -> int:
    """Tell whether a constant of a jaxpr is zero; large ones are not looked into."""
    if isinstance(value, jax.core.Tracer) or np.size(value) > 1 << 16:
        return _CONSTANT
    try:
        return _CONSTANT if np.any(np.asarray(value)) else _ZERO
    except (TypeError, ValueError):  # a PRNG key
        return _CONSTANT
