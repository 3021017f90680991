"""Evaluate `push`: forward mode is the transpose of the rule.

A rule maps cotangents of `y` to cotangents of `x`. It is linear, and its transpose maps tangents of
`x` to tangents of `y`. `push_forward` computes that under `jvp`, `jacfwd` and `hessian`; in `grad`,
JAX transposes `push` instead, which runs the rule. Three steps: trace the rule, check that it is
linear, and take its vjp: a linear map is its own derivative, so its vjp is its transpose, the same
at every point. The vjp alone would accept `dy + c` and drop the `c`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from .._jax.compat import is_ref_type, zeros
from .._jax.jaxpr import (
    Analysis,
    Body,
    Followed,
    call_body,
    dependence,
    depends_on,
    evaluate,
    flow,
    is_call,
    is_declared,
    name_of,
    open_jaxpr,
    without_consts,
)
from .._jax.types import NEEDS_VALUES, Aval, Cotangents, Eqn, Leaf, Tangents
from .._jax.watching import recording
from .._messages import errors
from .._messages.errors import Obstacle
from .._messages.source import Source
from .linearity import LINEAR, Degree, Kinds, Linearity, NotLinearError, check, only_for_derivatives

Transposable: TypeAlias = Callable[[Cotangents], list[Leaf]]  # a rule at a point
_Types: TypeAlias = Sequence[Aval]  # of the cotangents, which are the tangents of the result


def push_forward(
    rule: Transposable, types: _Types, tangents: Tangents, source: Source
) -> list[Leaf]:
    """Return the transpose of `rule`, applied to `tangents`.

    `rule` maps cotangents of these types to a gradient, or None, for each of the tangents.
    """
    try:
        with explained(source):
            return transposed(source.named(rule, ()), types, tangents)
    except NotLinearError as error:
        line = source.line(getattr(error.eqn, "source_info", None))
        text = f"{error}{line and f', at {line}'}"
        raise errors.not_linear(source, text, error.obstacle) from None
    except NEEDS_VALUES as error:
        text = errors.has_no_value(source)
        if text not in getattr(error, "__notes__", ()):  # as in a `jvp` of a `jvp`
            error.add_note(text)
        raise


@contextlib.contextmanager
def explained(source: Source) -> Iterator[None]:
    """Add a note to what may be the error of an axis that is not bound.

    A `vmap` whose axis the rule names may be on the way here, and JAX runs the rule outside of it:
    then JAX knows the name, and each of its operations fails in another way.
    """
    try:
        yield
    except (AssertionError, NameError, NotImplementedError) as error:
        if not hasattr(error, "__notes__"):
            error.add_note(errors.unbound_axis(f"Maybe the rule of {source}"))
        raise


def transposed(rule: Transposable, types: _Types, tangents: Tangents) -> list[Leaf]:
    """Return the transpose of `rule`, applied to `tangents`; `NotLinearError` if it has none."""
    closed, given = _traced(rule, types)
    found, dots = check(closed), [tangents[i] for i in given]
    # An eager `jvp` takes 6 times as long as a hand-written `custom_jvp`, and 10 times without this
    # short way. It is no way where a call has a derivative of its own: `jax.linear_transpose` would
    # refuse it, or transpose its body where the next order needs its rule.
    if not (found.declares or found.stops):
        with contextlib.suppress(Exception):  # the type depends on the operation
            return list(jax.linear_transpose(jaxpr_as_fun(closed), *types)(dots))
    return _pulled_back(closed, found, types, dots)


def _traced(rule: Transposable, types: _Types) -> tuple[ClosedJaxpr, list[int]]:
    """Trace a rule, without its `None` gradients; also return the positions of the others.

    It may branch on values of the forward pass, and fill a cache of constants.
    """
    context = recording()

    @functools.wraps(rule)  # JAX's errors show the name and the line of the user's function
    def gradients(cotangents: Cotangents) -> list[Leaf]:
        with context():
            return list(rule(cotangents))

    closed, shapes = jax.make_jaxpr(gradients, return_shape=True)(types)
    return closed, [i for i, shape in enumerate(shapes) if shape is not None]


def _pulled_back(
    closed: ClosedJaxpr, found: Linearity, types: _Types, tangents: Tangents
) -> list[Leaf]:
    """Return the vjp of a traced rule, applied to tangents."""

    def pull(points: Cotangents, tangents: Tangents) -> Cotangents:
        jaxpr = _needed(closed.jaxpr)
        rule = lambda *cts: _evaluated(found, jaxpr, closed.consts, cts)  # noqa: E731
        return jax.vjp(rule, *points)[1](tangents)

    eqn = found.declared[0] if found.declared else None
    try:
        pulled = jax.make_jaxpr(pull)(types, tangents)
    except NotLinearError:
        raise
    except Exception as error:  # the type depends on the operation and the version of JAX
        text = f"an operation that JAX cannot transpose ({error})".partition("\n")[0]
        raise NotLinearError(text, eqn, Obstacle.OPAQUE) from error
    jaxpr, first = _needed(without_consts(pulled)), len(pulled.consts)
    # The vjp is taken at a point. It is the transpose only if it does not depend on that point: the
    # derivative of a linear map is constant. JAX's own operations are checked already. A function
    # with a rule of its own is not: that of `x**2` gives twice the upstream, and is refused here.
    if any(depends_on(mask, first, first + len(types)) for mask in dependence(jaxpr)):
        of = f"`{name_of(eqn)}`" if eqn else "an operation"
        raise NotLinearError(f"{of}, whose derivative depends on the upstream", eqn)
    if eqn:  # the vjp runs the rule of another function: is it linear, too?
        check(pulled, len(tangents))
    return evaluate(jaxpr, *pulled.consts, *map(zeros, types), *tangents)


def _needed(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without its dead code, such as the value at the point, or a log."""
    needed, eqns = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        # What writes to a Ref has no result: without it, a later one would read what was before.
        touches_ref = any(is_ref_type(a.aval) for a in eqn.invars)
        if touches_ref or any(id(v) in needed for v in eqn.outvars):
            needed.update(map(id, eqn.invars))
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns[::-1])


# --- the map ------------------------------------------------------------------------------------

Valued: TypeAlias = tuple[Degree, Leaf]


def _evaluated(
    found: Linearity, jaxpr: Jaxpr, consts: Sequence[Leaf], upstreams: Sequence[Leaf]
) -> list[Leaf]:
    """Evaluate a rule that was checked, such that its derivative is the rule itself."""
    # The derivative of `stop_gradient` is zero, so at an upstream it does nothing. At any other
    # value it keeps its derivative: the next order needs that.
    if not found.stops:
        return jax.core.eval_jaxpr(jaxpr, consts, *upstreams)
    operands = [*((found.constant(c), c) for c in consts), *((LINEAR, u) for u in upstreams)]
    return [value for _, value in flow(jaxpr, operands, _Evaluation(found))]


class _Evaluation(Analysis[Valued]):
    """Evaluate each equation, knowing the degrees of its operands."""

    def __init__(self, found: Linearity) -> None:
        self._found = found
        # A jitted function that is called twice is put together once.
        self._inside: dict[tuple[int, tuple[Degree, ...]], tuple[Eqn, Eqn]] = {}

    def constant(self, value: Leaf) -> Valued:
        return self._found.constant(value), value

    def equation(self, eqn: Eqn, operands: list[Valued]) -> Followed[Valued]:
        kinds, values = [k for k, _ in operands], [v for _, v in operands]
        degrees, after = self._found.equation(eqn, kinds)
        if LINEAR in kinds and only_for_derivatives(eqn):
            body = call_body(eqn)
            results = values if body is None else self._called(body, kinds, values)
        else:
            if LINEAR in kinds and is_call(eqn) and not is_declared(eqn):
                # The operands of a loop have the degrees of its body, which come of the loop.
                eqn = self._put_together(eqn, after if eqn.primitive.name == "scan" else kinds)
            given = zip(eqn.invars, values, strict=True)
            atoms = {a: v for a, v in given if not isinstance(a, Literal)}
            one = _empty().replace(invars=[*atoms], outvars=[*eqn.outvars], eqns=[eqn])
            results = evaluate(one, *atoms.values())
        return list(zip(degrees, results, strict=True)), list(zip(after, values, strict=True))

    def _called(self, body: Body, kinds: Kinds, values: Sequence[Leaf]) -> list[Leaf]:
        operands = [*map(self.constant, getattr(body, "consts", ()))]
        operands += zip(kinds, values, strict=True)
        return [value for _, value in flow(open_jaxpr(body), operands, self)]

    def _put_together(self, eqn: Eqn, kinds: Kinds) -> Eqn:
        """Return the equation with what it calls as these degrees have it."""
        key = id(eqn), tuple(kinds)
        if key not in self._inside:
            if eqn.primitive.name == "shard_map":  # its body runs on each device
                (alone := Linearity()).equation(eqn, [*kinds])
                if alone.stops:
                    raise NotLinearError("a `stop_gradient`, or the like, in a `shard_map`", eqn)
            params = {name: self._traced(value, kinds) for name, value in eqn.params.items()}
            self._inside[key] = eqn, eqn.replace(params=params)
        return self._inside[key][1]

    def _traced(self, parameter: object, kinds: Kinds) -> object:
        if isinstance(parameter, tuple):
            return tuple(self._traced(part, kinds) for part in parameter)
        if not isinstance(parameter, ClosedJaxpr):
            return parameter
        types = [v.aval for v in parameter.jaxpr.invars]
        kinds = kinds[len(kinds) - len(types) :]  # without the predicate of a `cond`
        return jax.make_jaxpr(lambda *args: self._called(parameter, kinds, args))(*types)


@functools.cache
def _empty() -> Jaxpr:
    return jax.make_jaxpr(lambda: ())().jaxpr
