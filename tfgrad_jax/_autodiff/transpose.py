"""Evaluate `push`: forward mode is the transpose of the rule.

A rule maps cotangents of `y` to cotangents of `x`. It is linear, and its transpose maps tangents of
`x` to tangents of `y`. `push_forward` computes that under `jvp`, `jacfwd` and `hessian`; in `grad`,
JAX transposes `push` instead, which runs the rule. Three steps: trace the rule, check that it is
linear, transpose the jaxpr. `jax.linear_transpose` alone would accept `dy + c` and drop the `c`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import TracerArrayConversionError, TracerBoolConversionError
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from tfgrad_jax import _errors
from tfgrad_jax._compat import zeros
from tfgrad_jax._jaxpr import (
    ONE_BY_ONE,
    call_body,
    carry_of,
    dependence,
    evaluate,
    is_declared,
    name_of,
    open_jaxpr,
    without_consts,
)
from tfgrad_jax._source import Source
from tfgrad_jax._types import NeedsValuesError

from .linearity import NotLinearError, check

_LOOPS_AND_BRANCHES = ("scan", "while", "cond")


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
        line = source.line_in(error.error) if error.error else source.line_of(error.eqn, __file__)
        raise _errors.not_linear(source, f"{error}{line and f', at {line}'}") from None


def transposed(
    rule: Callable[[Sequence[Any]], Sequence[Any]], types: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Do the same; raise `NotLinearError` if the rule has no transpose."""
    kept: list[int] = []

    def gradients(cotangents: Sequence[Any]) -> list[Any]:
        every = rule(cotangents)
        kept[:] = [i for i, g in enumerate(every) if g is not None]
        return [every[i] for i in kept]

    try:
        closed = jax.make_jaxpr(gradients)(types)
    except NeedsValuesError:
        closed = _traced_on_values(gradients, types)
    declared = check(closed)
    linear = _linear_part(closed, declared)
    tangents = [tangents[i] for i in kept]
    if declared:
        return _transposed_by_vjp(linear, types, tangents, declared)
    try:
        return list(jax.linear_transpose(linear, *types)(tangents))
    except NotLinearError:
        raise
    except Exception as error:  # the type depends on the operation and the version of JAX
        return _transposed_by_vjp(linear, types, tangents, cause=error)


def _transposed_by_vjp(
    linear: Callable[..., list[Any]],
    types: Sequence[Any],
    tangents: Sequence[Any],
    declared: Sequence[Any] = (),
    cause: Exception | None = None,
) -> list[Any]:
    """Transpose a map with `jax.vjp`, where `jax.linear_transpose` cannot.

    A linear map is its own derivative, so its vjp is its transpose, the same at every point. If the
    derivative depends on the point, the map is not linear, and this raises. The `declared` calls in
    the map have rules of their own, which `jax.vjp` runs.
    """
    eqn = declared[0] if declared else None
    points = tuple(map(zeros, types))
    pull = jax.make_jaxpr(lambda points, tangents: jax.vjp(linear, *points)[1](tangents))
    try:
        closed = pull(points, tangents)
    except NotLinearError:
        raise
    except Exception as error:  # as above
        text = f"an operation that JAX cannot transpose ({cause or error})".partition("\n")[0]
        raise NotLinearError(text, eqn) from (cause or error)
    jaxpr, first = without_consts(closed), len(closed.consts)
    if any(mask >> first & ~(-1 << len(points)) for mask in dependence(jaxpr)):
        of = f"`{name_of(eqn)}`" if eqn else "an operation"
        raise NotLinearError(f"{of}, whose derivative depends on the upstream", eqn)
    check(closed, len(tangents))
    return _evaluate_needed(jaxpr, *closed.consts, *points, *tangents)


def _traced_on_values(rule: Callable[..., Sequence[Any]], types: Sequence[Any]) -> ClosedJaxpr:
    """Trace a rule that branches on values of the forward pass.

    `make_jaxpr` would have no values. So the rule runs as the jvp rule of a probe, under
    `jax.linearize`: JAX records the operations on its tangents, the cotangents of the rule, and
    evaluates all others.
    """
    probe = jax.custom_jvp(lambda *ys: ys)

    @probe.defjvp
    def _(_: Any, tangents: Any) -> Any:
        dxs = rule(list(tangents))
        return [np.zeros(g.shape, g.dtype) for g in dxs], list(dxs)

    try:
        push = jax.linearize(probe, *map(zeros, types))[1]
    except TracerBoolConversionError as error:
        raise NotLinearError("a branch on the upstream", error=error) from None
    except TracerArrayConversionError as error:
        raise NotLinearError("NumPy code that reads the upstream", error=error) from None
    except NeedsValuesError as error:
        text = "Python code that reads the value of the upstream"
        raise NotLinearError(text, error=error) from None
    return jax.make_jaxpr(lambda cotangents: push(*cotangents))(types)


def _linear_part(closed: ClosedJaxpr, declared: Sequence[Any]) -> Callable[..., list[Any]]:
    """Evaluate what does not depend on the arguments; return the rest, a linear function.

    Otherwise `jax.linear_transpose` would evaluate that, and drop the custom derivatives inside.
    """
    jaxpr, stripped = closed.jaxpr, _Stripped(declared)
    if not any(map(stripped.replaces, jaxpr.eqns)):
        return jaxpr_as_fun(closed)
    known, rest = dict(zip(jaxpr.constvars, closed.consts, strict=True)), []
    for eqn in jaxpr.eqns:
        if all(isinstance(a, Literal) or a in known for a in eqn.invars):
            values = [a.val if isinstance(a, Literal) else known[a] for a in eqn.invars]
            known.update(zip(eqn.outvars, _bind(eqn, values), strict=True))
        else:
            rest.append(eqn)
    after = jaxpr.replace(constvars=[], invars=[*known, *jaxpr.invars], eqns=rest)
    linear = [False] * len(known) + [True] * len(jaxpr.invars)
    return lambda *cts: stripped.evaluate(after, [*known.values(), *cts], linear)[0]


@functools.cache
def empty() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr


def _bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation."""
    known = {a: v for a, v in zip(eqn.invars, values, strict=True) if not isinstance(a, Literal)}
    jaxpr = empty().replace(invars=list(known), outvars=list(eqn.outvars), eqns=[eqn])
    return evaluate(jaxpr, *known.values())


class _Stripped:
    """Evaluates a jaxpr without the parts that only affect derivatives.

    Transposing a map is not differentiating it: a declared derivative concerns the derivative of
    the rule, not the rule. So, on values that depend on the upstreams (*linear* ones):

    - A call with a derivative of its own becomes its body, unless it is one of the `declared`,
      whose bodies JAX cannot transpose.
    - A call with a `vmap` rule of its own becomes its body, as JAX cannot transpose the call.
    - `stop_gradient` does nothing.
    - An equation with several operands and as many results becomes one equation for each. If one
      operand is linear, JAX takes all results for linear, and refuses to transpose code that reads
      the others. A solver such as `cg` has such a `device_put`.

    Equations on other values stay as they are.
    """

    def __init__(self, declared: Sequence[Any]) -> None:
        self._declared = {id(eqn) for eqn in declared}

    def replaces(self, eqn: Any, in_shard_map: bool = False) -> bool:
        """Return whether an equation becomes something else, or holds one that does.

        `_equation` cannot rebuild a `shard_map`. So inside one, this counts only the equations that
        must be replaced.
        """
        if id(eqn) in self._declared:
            return False
        if eqn.primitive.name in ("stop_gradient", "custom_vmap_call") or is_declared(eqn):
            return True
        if not in_shard_map and (_names_no_device(eqn) or _has_several_results(eqn)):
            return True
        in_shard_map = in_shard_map or eqn.primitive.name == "shard_map"
        inside = itertools.chain.from_iterable(open_jaxpr(b).eqns for b in _bodies(eqn))
        return any(self.replaces(e, in_shard_map) for e in inside)

    def evaluate(
        self, jaxpr: Any, args: Sequence[Any], linear: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        """Return the results, and which are linear, given which of the arguments are."""
        known = dict(zip(jaxpr.invars, zip(args, linear, strict=True), strict=True))

        def read(atom: Any) -> tuple[Any, bool]:
            return (atom.val, False) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            values, flags = [], []
            for value, flag in map(read, eqn.invars):
                values.append(value)
                flags.append(flag)
            if any(flags) and self.replaces(eqn):
                results, flags = self._equation(eqn, values, flags)
            else:
                results, flags = _bind(eqn, values), _linear_results(eqn, flags)
            known.update(zip(eqn.outvars, zip(results, flags, strict=True), strict=True))
        pairs = [read(v) for v in jaxpr.outvars]
        return [value for value, _ in pairs], [flag for _, flag in pairs]

    def _equation(
        self, eqn: Any, values: list[Any], linear: list[bool]
    ) -> tuple[list[Any], list[bool]]:
        name, body = eqn.primitive.name, call_body(eqn)
        if name == "stop_gradient" or _names_no_device(eqn):
            return values, linear
        if _has_several_results(eqn):
            apart = zip(_one_by_one(eqn), values, strict=True)
            return [result for one, value in apart for result in _bind(one, [value])], linear
        if name == "shard_map":  # its body runs on each device, so it cannot be inlined
            raise NotLinearError("a `stop_gradient`, or the like, in a `shard_map`", eqn)
        if body is not None:
            return self._called(body, values, linear)
        within = _linear_within(eqn, linear)
        params = {k: self._traced(v, within) for k, v in eqn.params.items()}
        return _bind(eqn.replace(params=params), values), _linear_results(eqn, linear)

    def _called(
        self, body: Any, values: Sequence[Any], linear: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        jaxpr, consts = open_jaxpr(body), getattr(body, "consts", ())
        opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        return self.evaluate(opened, [*consts, *values], [*[False] * len(consts), *linear])

    def _traced(self, parameter: Any, linear: Sequence[bool]) -> Any:
        if isinstance(parameter, tuple):
            return tuple(self._traced(p, linear) for p in parameter)
        if not isinstance(parameter, ClosedJaxpr):
            return parameter
        types = [v.aval for v in parameter.jaxpr.invars]
        return jax.make_jaxpr(lambda *args: self._called(parameter, args, linear)[0])(*types)


def _names_no_device(eqn: Any) -> bool:
    """Return whether a `device_put` names no device. JAX may be unable to transpose it eagerly."""
    is_put = eqn.primitive.name == "device_put"
    return is_put and all(device is None for device in eqn.params["devices"])


def _has_several_results(eqn: Any) -> bool:
    return eqn.primitive.name in ONE_BY_ONE and len(eqn.outvars) > 1


def _one_by_one(eqn: Any) -> Iterator[Any]:
    """Split an equation with several results into one for each operand and its result."""
    for i, operand in enumerate(eqn.invars):
        params = eqn.params
        if eqn.primitive.name == "device_put":  # a tuple for each parameter
            params = {name: of_each[i : i + 1] for name, of_each in params.items()}
        yield eqn.replace(invars=[operand], outvars=[eqn.outvars[i]], params=params)


def _linear_results(eqn: Any, linear: Sequence[bool]) -> list[bool]:
    """Return which results of an equation depend on its linear operands."""
    atoms = {a: flag for a, flag in zip(eqn.invars, linear, strict=True) if type(a) is not Literal}
    jaxpr = empty().replace(invars=list(atoms), outvars=list(eqn.outvars), eqns=[eqn])
    mask = sum(1 << i for i, flag in enumerate(atoms.values()) if flag)
    return [bool(depends & mask) for depends in dependence(jaxpr)]


def _linear_within(eqn: Any, linear: Sequence[bool]) -> Sequence[bool]:
    """Return which operands of the body of a scan or a branch are linear.

    `linearity.check` has refused a `while` of linear values.
    """
    if eqn.primitive.name == "cond":
        return linear[1:]
    if eqn.primitive.name != "scan":
        return linear
    body, (start, end) = without_consts(eqn.params["jaxpr"]), carry_of(eqn)
    consts, flags = len(body.invars) - len(linear), list(linear)
    while True:  # a carry that becomes linear is linear in the next iteration
        mask = sum(1 << consts + i for i, flag in enumerate(flags) if flag)
        results = [bool(depends & mask) for depends in dependence(body)]
        carry = [a or b for a, b in zip(flags[start:end], results, strict=False)]
        if carry == flags[start:end]:
            return flags
        flags[start:end] = carry


def _bodies(eqn: Any) -> Iterator[Any]:
    """Return the jaxprs of a loop, a branch or a call."""
    body = call_body(eqn)
    if body is not None:
        return iter((body,))
    if eqn.primitive.name not in _LOOPS_AND_BRANCHES:
        return iter(())  # such as a solver, which has a transpose of its own
    values = (eqn.params[key] for key in ("jaxpr", "cond_jaxpr", "body_jaxpr") if key in eqn.params)
    return itertools.chain(values, eqn.params.get("branches", ()))


def _evaluate_needed(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluate a jaxpr without its dead code: `jax.vjp` also computes the value at the point."""
    needed, eqns = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars):
            needed.update(map(id, eqn.invars))
            eqns.append(eqn)
    return evaluate(jaxpr.replace(eqns=eqns[::-1]), *args)
