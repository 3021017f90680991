"""Evaluate `push`: forward mode is the transpose of the rule.

A rule maps cotangents of `y` to cotangents of `x`. It is linear, and its transpose maps tangents of
`x` to tangents of `y`. `push_forward` computes that under `jvp`, `jacfwd` and `hessian`; in `grad`,
JAX transposes `push` instead, which runs the rule. Three steps: trace the rule, check that it is
linear, and take its vjp: a linear map is its own derivative, so its vjp is its transpose, the same
at every point. The vjp alone would accept `dy + c` and drop the `c`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import AbstractValue
from jax.errors import TracerArrayConversionError, TracerBoolConversionError
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from tfgrad_jax._jax.compat import zeros
from tfgrad_jax._jax.jaxpr import (
    call_body,
    dependence,
    evaluate,
    name_of,
    open_jaxpr,
    without_consts,
)
from tfgrad_jax._jax.types import NeedsValuesError
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

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
        raise refusal(source, error) from None


def refusal(source: Source, error: NotLinearError) -> TypeError:
    """Return the error that says why the rule of a function has no transpose, and at which line."""
    line = source.line_in(error.error) if error.error else source.line_of(error.eqn, __file__)
    return errors.not_linear(source, f"{error}{line and f', at {line}'}")


def transposed(
    rule: Callable[[Sequence[Any]], Sequence[Any]], types: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Do the same; raise `NotLinearError` if the rule has no transpose."""
    kept: list[int] = []

    def gradients(cotangents: Sequence[Any]) -> list[Any]:
        every = rule(cotangents)
        kept[:] = [i for i, g in enumerate(every) if g is not None]
        return [every[i] for i in kept]

    closed = _traced(gradients, types)
    found, tangents = check(closed), [tangents[i] for i in kept]
    if not (found.declares or found.inlined):  # a shorter way, for eager forward mode
        with contextlib.suppress(Exception):  # the type depends on the operation
            return list(jax.linear_transpose(jaxpr_as_fun(closed), *types)(tangents))
    linear = _Inlined(found.inlined)

    def pull(points: Sequence[Any], tangents: Sequence[Any]) -> Any:
        rule = lambda *cts: linear.evaluate(_needed(closed.jaxpr), closed.consts, cts)  # noqa: E731
        return jax.vjp(rule, *points)[1](tangents)

    eqn = found.declared[0] if found.declared else None
    try:
        pulled = jax.make_jaxpr(pull)(types, tangents)
    except NotLinearError:
        raise
    except Exception as error:  # the type depends on the operation and the version of JAX
        text = f"an operation that JAX cannot transpose ({error})".partition("\n")[0]
        raise NotLinearError(text, eqn) from error
    jaxpr, first = _needed(without_consts(pulled)), len(pulled.consts)
    if any(mask >> first & ~(-1 << len(types)) for mask in dependence(jaxpr)):
        of = f"`{name_of(eqn)}`" if eqn else "an operation"
        raise NotLinearError(f"{of}, whose derivative depends on the upstream", eqn)
    if eqn:  # the vjp runs the rule of another function: is it linear, too?
        check(pulled, len(tangents))
    operands = zip(jaxpr.invars, [*pulled.consts, *types, *tangents], strict=True)
    used = {id(a) for e in jaxpr.eqns for a in e.invars}.union(map(id, jaxpr.outvars))
    operands = {v: o for v, o in operands if id(v) in used}  # hardly ever the points
    args = [zeros(o) if isinstance(o, AbstractValue) else o for o in operands.values()]
    return evaluate(jaxpr.replace(invars=list(operands)), *args)


def _traced(rule: Callable[..., Sequence[Any]], types: Sequence[Any]) -> ClosedJaxpr:
    """Trace a rule, which may branch on values of the forward pass."""
    with contextlib.suppress(*NeedsValuesError):
        return jax.make_jaxpr(rule)(types)
    try:
        with jax.ensure_compile_time_eval():  # of operations on values
            return jax.make_jaxpr(rule)(types)
    except NeedsValuesError as error:
        # Of the upstream, or of a value that `jit` or `vmap` traces? Then the rule raises for any
        # upstream, with JAX's own error, as it does in reverse mode.
        with jax.ensure_compile_time_eval(), contextlib.suppress(NotLinearError):
            rule(list(map(zeros, types)))
        raise NotLinearError(_READS.get(type(error), _READS_VALUE), error=error) from None


_READS: dict[type, str] = {
    TracerBoolConversionError: "a branch on the upstream",
    TracerArrayConversionError: "NumPy code that reads the upstream",
}
_READS_VALUE = "Python code that reads the value of the upstream"


class _Inlined:
    """Evaluates a jaxpr without the derivatives that functions of the upstreams declare.

    The transpose of a rule is that of the functions that it calls. So, where `check` found that its
    operand depends on an upstream, a call with a derivative of its own becomes its body, and
    `stop_gradient` does nothing.
    """

    def __init__(self, paths: set[tuple[int, ...]]) -> None:
        self._paths = paths

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: tuple[int, ...] = ()
    ) -> list[Any]:
        if not self._paths:
            return jax.core.eval_jaxpr(jaxpr, consts, *args)
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        read = lambda a: a.val if isinstance(a, Literal) else known[a]  # noqa: E731
        for eqn in jaxpr.eqns:
            results = self._equation(eqn, list(map(read, eqn.invars)), (*path, id(eqn)))
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: Any, values: list[Any], path: tuple[int, ...]) -> list[Any]:
        if path in self._paths:
            body = call_body(eqn)
            return values if body is None else self._called(body, values, path)
        if any(inner[: len(path)] == path for inner in self._paths):
            if eqn.primitive.name == "shard_map":  # its body runs on each device
                raise NotLinearError("a `stop_gradient`, or the like, in a `shard_map`", eqn)
            params = {name: self._traced(value, path) for name, value in eqn.params.items()}
            eqn = eqn.replace(params=params)
        atoms = {a: v for a, v in zip(eqn.invars, values, strict=True) if type(a) is not Literal}
        one = empty().replace(invars=list(atoms), outvars=list(eqn.outvars), eqns=[eqn])
        return evaluate(one, *atoms.values())

    def _called(self, body: Any, values: Sequence[Any], path: tuple[int, ...]) -> list[Any]:
        return self.evaluate(open_jaxpr(body), getattr(body, "consts", ()), values, path)

    def _traced(self, parameter: Any, path: tuple[int, ...]) -> Any:
        if isinstance(parameter, tuple):
            return tuple(self._traced(part, path) for part in parameter)
        if not isinstance(parameter, ClosedJaxpr):
            return parameter
        types = [v.aval for v in parameter.jaxpr.invars]
        return jax.make_jaxpr(lambda *args: self._called(parameter, args, path))(*types)


@functools.cache
def empty() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr


def _needed(jaxpr: Any) -> Any:
    """Return a jaxpr without its dead code, such as the value at the point, or a log."""
    needed, eqns = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars):
            needed.update(map(id, eqn.invars))
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns[::-1])
