"""Transpose a rule, which is what forward mode is made of, and tell when that is wrong.

`push_forward` runs when a derivative is pushed through a rule: `jvp` of a function with
`forward_mode=True`, and a second derivative of any function. `jax.linear_transpose` alone
would accept `dy + c` and drop the `c`, so `_kinds` first walks the rule's equations.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ._compat import evaluate, without_consts
from ._rules import NeedsValuesError

# What an intermediate value of a rule is, as a function of the upstream gradients.
_ZERO, _CONSTANT, _LINEAR = range(3)  # max(a, b) is the kind of a sum

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
    unknown: list[str] = []
    kinds = _kinds(closed.jaxpr, closed.consts, [_LINEAR] * len(closed.jaxpr.invars), unknown)
    if any(_kind(v, kinds) == _CONSTANT for v in closed.jaxpr.outvars):
        raise NotLinearError("a gradient that is not zero and does not depend on the upstreams")
    linear = _linear_part(closed)
    try:
        return list(jax.linear_transpose(linear, *outputs)(list(tangents())))
    except (NotImplementedError, AssertionError, TypeError, ValueError) as error:
        if unknown:
            raise NotLinearError(f"{unknown[0]}, which JAX cannot transpose") from error
        # Linear, but in a form that only differentiation can transpose.
        return list(jax.vjp(linear, *map(jnp.zeros_like, outputs))[1](list(tangents())))


def _pull_back_at_zero(rule: Any, outputs: Sequence[Any]) -> Callable[[Any], Any]:
    """Transpose a rule that branches on values: the derivative of a linear map is the map."""
    zeros = [jnp.zeros_like(y) for y in outputs]
    value, pull_back = jax.vjp(rule, zeros)
    for factor in (1.0, -2.0):
        probe = [jnp.full_like(y, factor) for y in outputs]
        slope = jax.jvp(rule, (zeros,), (probe,))[1]
        try:
            linear = all(
                np.allclose(got, wanted, 1e-2, 1e-3) and not np.any(at_zero)
                for got, wanted, at_zero in zip(rule(probe), slope, value, strict=True)
            )
        except NeedsValuesError:
            raise NotLinearError("a branch on values that are not known") from None
        if not linear:
            raise NotLinearError("a branch on the upstreams, or a constant")
    return lambda tangents: pull_back(tangents)[0]


def _linear_part(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Evaluate what does not depend on the arguments; return the rest, a linear function.

    Left in, the constant part would be evaluated by the transposition, where JAX forgets the
    custom derivatives of what is in it.
    """
    jaxpr = closed.jaxpr
    if not any(map(_is_custom, jaxpr.eqns)):
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
    """Tell whether an equation is a call with a derivative of its own."""
    return eqn.primitive.name.startswith("custom_") and _call_body(eqn) is not None


def _evaluate_bodies(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluate a jaxpr with the bodies of such calls in their place.

    To transpose a map is not to differentiate it: what is declared for its derivative governs
    the derivative of the rule, and not the rule.
    """
    known = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        if _is_custom(eqn):
            body = _call_body(eqn)
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


def _kinds(
    jaxpr: Any, consts: Sequence[Any], given: Sequence[int], unknown: list[str]
) -> dict[Any, int]:
    """Tell of each variable what it is as a function of the arguments, of which kinds are given.

    Raises at the first operation that is not linear. One that is not known here counts as
    linear and is added to `unknown`: `jax.linear_transpose` is the judge of it.
    """
    kinds: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
    kinds.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    for eqn in jaxpr.eqns:
        operands = [_kind(a, kinds) for a in eqn.invars]
        kinds.update(zip(eqn.outvars, _results(eqn, operands, unknown), strict=True))
    return kinds


def _kind(atom: Any, kinds: dict[Any, int]) -> int:
    return _constant(atom.val) if isinstance(atom, Literal) else kinds[atom]


def _results(eqn: Any, operands: Sequence[int], unknown: list[str]) -> Sequence[int]:
    """Return the kinds of the results of an equation, or raise if it is not linear."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in _PRODUCTS:
        if list(operands).count(_LINEAR) > 1:
            raise NotLinearError(f"`{name}` of two upstreams")
        return [min(operands)] * count if _ZERO in operands else [max(operands)] * count
    if name in _LINEAR_IN:
        positions = _LINEAR_IN[name] or range(len(operands))
        kinds = [kind for i, kind in enumerate(operands) if i in positions]
        for i, kind in enumerate(operands):
            if kind == _LINEAR and i not in positions:
                raise NotLinearError(f"`{name}`, which is not linear in its operand {i}")
        return [functools.reduce(functools.partial(_joined, name), kinds)] * count
    if name in _LOOPS:
        return _LOOPS[name](eqn, operands, unknown)
    body = _call_body(eqn)
    if body is not None:
        return _body(body, operands, unknown)
    if _LINEAR not in operands:
        return [_CONSTANT] * count
    unknown.append(f"`{name}`")
    return [_LINEAR] * count


def _call_body(eqn: Any) -> Any:
    """Return the body of an equation that calls it once, with its own operands."""
    for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(parameter)
        if body is not None and len(getattr(body, "jaxpr", body).invars) == len(eqn.invars):
            return body
    return None


def _joined(name: str, a: int, b: int) -> int:
    """Return the kind of a sum, or of a value that is one or the other."""
    if {a, b} == {_CONSTANT, _LINEAR}:
        raise NotLinearError(f"`{name}` of an upstream and a constant")
    return max(a, b)


def _body(body: Any, operands: Sequence[int], unknown: list[str]) -> list[int]:
    jaxpr = getattr(body, "jaxpr", body)  # closed, or open where there are no constants
    kinds = _kinds(jaxpr, getattr(body, "consts", ()), operands, unknown)
    return [_kind(v, kinds) for v in jaxpr.outvars]


def _carried(
    name: str, body: Any, consts: Sequence[int], carry: Sequence[int], xs: Sequence[int],
    unknown: list[str],
) -> list[int]:  # fmt: skip
    """Return the kinds of the results of a loop: those of the carry when they no longer change."""
    carry = list(carry)
    while True:
        results = _body(body, [*consts, *carry, *xs], unknown)
        after = [_joined(name, a, b) for a, b in zip(carry, results[: len(carry)], strict=True)]
        if after == carry:
            return [*carry, *results[len(carry) :]]
        carry = after


def _scan(eqn: Any, operands: Sequence[int], unknown: list[str]) -> list[int]:
    # Versions of JAX name the numbers of these differently; a sequence has one axis more in the
    # equation than in the body.
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    xs = _with_another_shape(eqn.invars, body.invars)
    carry = len(eqn.outvars) - _with_another_shape(eqn.outvars, body.outvars)
    end = len(operands) - xs
    start = end - carry
    parts = operands[:start], operands[start:end], operands[end:]
    return _carried("scan", eqn.params["jaxpr"], *parts, unknown)


def _with_another_shape(these: Sequence[Any], those: Sequence[Any]) -> int:
    return sum(a.aval.shape != b.aval.shape for a, b in zip(these, those, strict=True))


def _while(eqn: Any, operands: Sequence[int], unknown: list[str]) -> list[int]:
    ends, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = ends + count
    body = eqn.params["body_jaxpr"]
    carry = _carried("while", body, operands[ends:start], operands[start:], (), unknown)
    if _body(eqn.params["cond_jaxpr"], [*operands[:ends], *carry], []) == [_LINEAR]:
        raise NotLinearError("`while` whose end depends on an upstream")
    return carry


def _cond(eqn: Any, operands: Sequence[int], unknown: list[str]) -> list[int]:
    if operands[0] == _LINEAR:
        raise NotLinearError("`cond` whose predicate depends on an upstream")
    branches = [_body(branch, operands[1:], unknown) for branch in eqn.params["branches"]]
    return [
        functools.reduce(functools.partial(_joined, "cond"), kinds)
        for kinds in zip(*branches, strict=True)
    ]


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


def _constant(value: Any) -> int:
    """Tell whether a constant of a jaxpr is zero; large ones are not looked into."""
    if isinstance(value, jax.core.Tracer) or np.size(value) > 1 << 16:
        return _CONSTANT
    try:
        return _CONSTANT if np.any(np.asarray(value)) else _ZERO
    except (TypeError, ValueError):  # a PRNG key
        return _CONSTANT
