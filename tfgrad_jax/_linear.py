"""Transpose a rule, which is what forward mode is made of, and tell when that is wrong.

`push_forward` runs when a derivative is pushed through a rule: `jvp` of a function with
`forward_mode=True`, and a second derivative of any function. `jax.linear_transpose` alone
would accept `dy + c` and drop the `c`, so `_Linearity` is asked first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ._compat import SYSTEM_LOSES_ZEROS, derivative_tracers, evaluate, varying, without_consts
from ._flow import call_body, flow, open_jaxpr
from ._rules import NeedsValuesError
from ._structure import sum_of_nothing
from ._system import solved

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
# Operations of which JAX stores what they compute on the way, once they are transposed.
_STORED = {"scan", "while", "cond", "remat2", "checkpoint"}
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}


class NotLinearError(Exception):
    """The rule is not linear in its upstream gradients; says which operation is not."""


def push_forward(
    rule: Callable[[Sequence[Any]], Sequence[Any]],
    outputs: Sequence[Any],
    tangents: Callable[[], Sequence[Any]],
    first: bool,
) -> list[Any]:
    """Return the tangents of `outputs`: the transpose of `rule`, applied to `tangents`.

    `rule` maps cotangents like `outputs` to gradients like `tangents()`, which is asked for
    after the rule has run. It may be a first derivative, which reverse mode is about to take.
    """
    try:
        closed = jax.make_jaxpr(rule)(outputs)
    except NeedsValuesError:
        return list(_pull_back_at_zero(rule, outputs)(list(tangents())))
    analysis = _Linearity()
    jaxpr = without_consts(closed)
    kinds = [*map(analysis.constant, closed.consts), *[_LINEAR] * len(closed.jaxpr.invars)]
    if _CONSTANT in flow(jaxpr, kinds, analysis):
        raise NotLinearError("a gradient that is not zero and does not depend on the upstreams")
    linear = _linear_part(closed)

    def push(tangents: list[Any]) -> Sequence[Any]:
        try:
            return jax.linear_transpose(linear, *outputs)(tangents)
        except Exception as error:  # of any type, by version and operation
            if analysis.unknown:
                unknown = analysis.unknown[0]
                raise NotLinearError(f"{unknown}, which JAX cannot transpose") from error
            # Linear, but in a form that only differentiation can transpose.
            zeros = [jnp.zeros_like(y) - sum_of_nothing([y], y.dtype) for y in outputs]
            return jax.vjp(linear, *zeros)[1](tangents)

    moved = list(tangents())
    compiled = any(isinstance(y, Tracer) for y in outputs)
    if (
        first
        and _gives_itself_back(moved, outputs)
        and (_stores(closed.jaxpr) or (analysis.subtracts and compiled))
    ):
        pull = functools.partial(evaluate, jaxpr, *closed.consts)
        return solved(push, lambda cotangents: pull(*cotangents), moved, outputs)
    return list(push(moved))


def _gives_itself_back(tangents: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Tell whether the rule had better be part of a system: reverse mode gets it back from that.

    Where the outputs are being differentiated themselves, by `hessian` for one, it had not: the
    derivative of a system computes what the rule computes once more for each of its parts.
    """
    return (
        any(isinstance(t, Tracer) for t in tangents)
        and not any(type(y) in derivative_tracers() for y in outputs)
        and not SYSTEM_LOSES_ZEROS
        and not any(map(varying, (*tangents, *outputs)))  # its parts must vary alike
    )


def _stores(jaxpr: Any) -> bool:
    """Tell whether JAX, to transpose a function twice, would store what is computed on the way."""
    for eqn in jaxpr.eqns:
        body = call_body(eqn)
        if eqn.primitive.name in _STORED or (body is not None and _stores(open_jaxpr(body))):
            return True
    return False


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
    return eqn.primitive.name.startswith("custom_") and call_body(eqn) is not None


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


class _Linearity:
    """Tell of each value what it is as a function of the upstreams.

    Raises at the first operation that is not linear. One that is not known here counts as
    linear and is added to `unknown`: `jax.linear_transpose` is the judge of it.
    """

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.subtracts = False

    def constant(self, value: Any) -> int:
        """Tell whether a constant is zero; large ones are not looked into."""
        if isinstance(value, jax.core.Tracer) or np.size(value) > 1 << 16:
            return _CONSTANT
        try:
            return _CONSTANT if np.any(np.asarray(value)) else _ZERO
        except (TypeError, ValueError):  # a PRNG key
            return _CONSTANT

    def step(self, eqn: Any, operands: Sequence[int]) -> int:
        name = eqn.primitive.name
        if name in _PRODUCTS:
            if list(operands).count(_LINEAR) > 1:
                raise NotLinearError(f"`{name}` of two upstreams")
            return _ZERO if _ZERO in operands else max(operands)
        if name in _LINEAR_IN:
            positions = _LINEAR_IN[name] or range(len(operands))
            for i, kind in enumerate(operands):
                if kind == _LINEAR and i not in positions:
                    raise NotLinearError(f"`{name}`, which is not linear in its operand {i}")
            if name == "sub" and operands[1] == _LINEAR:
                self.subtracts = True
            kinds = [kind for i, kind in enumerate(operands) if i in positions]
            return functools.reduce(functools.partial(self.join, name), kinds)
        if _LINEAR not in operands:
            return _CONSTANT
        self.unknown.append(f"`{name}`")
        return _LINEAR

    def join(self, name: str, a: int, b: int) -> int:
        if {a, b} == {_CONSTANT, _LINEAR}:
            raise NotLinearError(f"`{name}` of an upstream and a constant")
        return max(a, b)

    def branch(self, name: str, predicate: int, result: int) -> int:
        if predicate == _LINEAR:
            raise NotLinearError(f"`{name}` whose predicate depends on an upstream")
        return result
