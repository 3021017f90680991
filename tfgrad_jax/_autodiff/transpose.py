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
from jax.core import AbstractValue
from jax.errors import TracerArrayConversionError, TracerBoolConversionError
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from tfgrad_jax._jax.compat import zeros
from tfgrad_jax._jax.jaxpr import (
    Atom,
    Body,
    call_body,
    dependence,
    depends_on,
    evaluate,
    name_of,
    open_jaxpr,
    without_consts,
)
from tfgrad_jax._jax.watch import recording
from tfgrad_jax._jax.types import NEEDS_VALUES, Aval, Cotangents, Eqn, Leaf, Tangents
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.errors import Obstacle
from tfgrad_jax._messages.source import Source

from .linearity import EqnPath, Linearity, NotLinearError, check

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
            return transposed(rule, types, tangents)
    except NotLinearError as error:
        raise refusal(source, error) from None


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
            error.add_note(errors.unbound_axis(f"Maybe the gradient function of {source}"))
        raise


def refusal(source: Source, error: NotLinearError) -> TypeError:
    """Return the error that says why the rule of a function has no transpose, and at which line."""
    line = source.line_in(error.error) if error.error else source.line_of(error.eqn)
    return errors.not_linear(source, f"{error}{line and f', at {line}'}", error.obstacle)


def transposed(rule: Transposable, types: _Types, tangents: Tangents) -> list[Leaf]:
    """Return the transpose of `rule`, applied to `tangents`; `NotLinearError` if it has none."""
    closed, given = _traced(rule, types)
    found, dots = check(closed), [tangents[i] for i in given]
    # An eager `jvp` takes 6 times as long as a hand-written `custom_jvp`, and 10 times without this
    # short way. It is no way where a call has a derivative of its own: `jax.linear_transpose` would
    # refuse it, or transpose its body where the next order needs its rule.
    if not (found.declares or found.inlined):
        with contextlib.suppress(Exception):  # the type depends on the operation
            return list(jax.linear_transpose(jaxpr_as_fun(closed), *types)(dots))
    return _pulled_back(closed, found, types, dots)


def _traced(rule: Transposable, types: _Types) -> tuple[ClosedJaxpr, list[int]]:
    """Trace a rule, without its `None` gradients; also return the positions of the others.

    It may branch on values of the forward pass, and fill a cache of constants.
    """
    context = recording()

    def gradients(cotangents: Cotangents) -> list[Leaf]:
        with context():
            return list(rule(cotangents))

    def trace() -> tuple[ClosedJaxpr, list[int]]:
        closed, shapes = jax.make_jaxpr(gradients, return_shape=True)(types)
        return closed, [i for i, shape in enumerate(shapes) if shape is not None]

    with contextlib.suppress(*NEEDS_VALUES):
        return trace()
    try:
        with jax.ensure_compile_time_eval():  # of operations on values
            return trace()
    except NEEDS_VALUES as error:
        text, obstacle = _READS.get(type(error), _READS_VALUE)
        # Does it read the upstream, or a value that `jit` or `vmap` traces? Then it raises for any
        # upstream: with JAX's own error, as in reverse mode. "A branch on the upstream" was untrue.
        try:
            with jax.ensure_compile_time_eval():
                rule(list(map(zeros, types)))
        except NEEDS_VALUES:
            raise
        except Exception:  # any other does not count, such as of a rule that does not accept zeros
            pass
        raise NotLinearError(text, error=error, obstacle=obstacle) from None


_READS: dict[type, tuple[str, Obstacle]] = {
    TracerBoolConversionError: ("a branch on the upstream", Obstacle.NOT_LINEAR),
    TracerArrayConversionError: ("NumPy code that reads the upstream", Obstacle.READS_VALUE),
}
_READS_VALUE = "Python code that reads the value of the upstream", Obstacle.READS_VALUE


def _pulled_back(
    closed: ClosedJaxpr, found: Linearity, types: _Types, tangents: Tangents
) -> list[Leaf]:
    """Return the vjp of a traced rule, applied to tangents."""
    linear = _Inlined(found.inlined)

    def pull(points: Cotangents, tangents: Tangents) -> Cotangents:
        rule = lambda *cts: linear.evaluate(_needed(closed.jaxpr), closed.consts, cts)  # noqa: E731
        return jax.vjp(rule, *points)[1](tangents)

    eqn = found.declared[0] if found.declared else None
    try:
        pulled = jax.make_jaxpr(pull)(types, tangents)
    except NotLinearError:
        raise
    except Exception as error:  # the type depends on the operation and the version of JAX
        text = f"an operation that JAX cannot transpose ({error})".partition("\n")[0]
        raise NotLinearError(text, eqn, obstacle=Obstacle.OPAQUE) from error
    jaxpr, first = _needed(without_consts(pulled)), len(pulled.consts)
    # The vjp is taken at a point. It is the transpose only if it does not depend on that point: the
    # derivative of a linear map is constant. JAX's own operations are checked already. A function
    # with a rule of its own is not: that of `x**2` gives twice the upstream, and is refused here.
    if any(depends_on(mask, first, first + len(types)) for mask in dependence(jaxpr)):
        of = f"`{name_of(eqn)}`" if eqn else "an operation"
        raise NotLinearError(f"{of}, whose derivative depends on the upstream", eqn)
    if eqn:  # the vjp runs the rule of another function: is it linear, too?
        check(pulled, len(tangents))
    operands = zip(jaxpr.invars, [*pulled.consts, *types, *tangents], strict=True)
    used = {id(a) for e in jaxpr.eqns for a in e.invars}.union(map(id, jaxpr.outvars))
    needed = {v: o for v, o in operands if id(v) in used}  # hardly ever the points
    args = [zeros(o) if isinstance(o, AbstractValue) else o for o in needed.values()]
    return evaluate(jaxpr.replace(invars=list(needed)), *args)


class _Inlined:
    """Evaluates a jaxpr without the derivatives that functions of the upstreams declare."""

    # The transpose of a rule is made of those of the functions that it calls. The derivative that
    # one of them declares may be something else: that of a `custom_jvp` may be clipped, that of
    # `stop_gradient` is zero. So where `check` found that an upstream reaches such a call, the call
    # becomes its body, and `stop_gradient` does nothing. All others keep their derivatives: the
    # next order needs them.
    def __init__(self, paths: set[EqnPath]) -> None:
        self._paths = paths

    def evaluate(
        self, jaxpr: Jaxpr, consts: Sequence[Leaf], args: Sequence[Leaf], path: EqnPath = ()
    ) -> list[Leaf]:
        if not self._paths:
            return jax.core.eval_jaxpr(jaxpr, consts, *args)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Atom) -> Leaf:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, list(map(read, eqn.invars)), (*path, id(eqn)))
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: Eqn, values: list[Leaf], path: EqnPath) -> list[Leaf]:
        if path in self._paths:
            body = call_body(eqn)
            return values if body is None else self._called(body, values, path)
        if any(inner[: len(path)] == path for inner in self._paths):
            if eqn.primitive.name == "shard_map":  # its body runs on each device
                raise NotLinearError("a `stop_gradient`, or the like, in a `shard_map`", eqn)
            params = {name: self._traced(value, path) for name, value in eqn.params.items()}
            eqn = eqn.replace(params=params)
        atoms = {a: v for a, v in zip(eqn.invars, values, strict=True) if type(a) is not Literal}
        one = _empty().replace(invars=list(atoms), outvars=list(eqn.outvars), eqns=[eqn])
        return evaluate(one, *atoms.values())

    def _called(self, body: Body, values: Sequence[Leaf], path: EqnPath) -> list[Leaf]:
        return self.evaluate(open_jaxpr(body), getattr(body, "consts", ()), values, path)

    def _traced(self, parameter: object, path: EqnPath) -> object:
        if isinstance(parameter, tuple):
            return tuple(self._traced(part, path) for part in parameter)
        if not isinstance(parameter, ClosedJaxpr):
            return parameter
        types = [v.aval for v in parameter.jaxpr.invars]
        return jax.make_jaxpr(lambda *args: self._called(parameter, args, path))(*types)


@functools.cache
def _empty() -> Jaxpr:
    return jax.make_jaxpr(lambda: ())().jaxpr


def _needed(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without its dead code, such as the value at the point, or a log."""
    needed, eqns = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars):
            needed.update(map(id, eqn.invars))
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns[::-1])
