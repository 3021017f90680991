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
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from .._jax.compat import is_ref_type, zeros
from .._jax.jaxpr import dependence, name_of, without_consts
from .._jax.types import Aval, Cotangents, Leaf, Tangents, Values
from .._jax.watching import recording
from .._messages import errors
from .._messages.source import Source
from .linearity import NotLinearError, check

Transposable: TypeAlias = Callable[[Cotangents], list[Leaf]]  # a rule at a point
_Types: TypeAlias = Sequence[Aval]  # of the cotangents, which are the tangents of the result


def push_forward(
    rule: Transposable, types: _Types, tangents: Tangents, source: Source
) -> list[Leaf]:
    """Return the transpose of `rule`, applied to `tangents`.

    `rule` maps cotangents of these types to a gradient, or None, for each of the tangents.
    """
    try:
        return _transposed(source.named(rule, ()), types, tangents)
    except NotLinearError as error:
        line = source.line(getattr(error.eqn, "source_info", None))
        text = f"{error}{line and f', at {line}'}"
        raise errors.not_linear(source, text) from None


def _transposed(rule: Transposable, types: _Types, tangents: Tangents) -> list[Leaf]:
    """Return the transpose of `rule`, applied to `tangents`; `NotLinearError` if it has none."""
    closed, given = _traced(rule, types)
    found, dots = check(closed), [tangents[i] for i in given]
    run, eqn = jaxpr_as_fun(closed), found.declared
    # An eager `jvp` takes 6 times as long as a hand-written `custom_jvp`, and 10 times without this
    # short way. It is no way where a call has a derivative of its own: `jax.linear_transpose` would
    # refuse it, or transpose its body where the next order needs its rule.
    if not found.declares:
        with contextlib.suppress(Exception):  # the type depends on the operation
            return list(jax.linear_transpose(run, *types)(dots))

    def pull(points: Cotangents, *dots: Leaf) -> Values:
        try:
            return jax.vjp(run, *points)[1](list(dots))
        except Exception as error:  # the type depends on the operation and the version of JAX
            text = f"an operation that JAX cannot transpose ({error})".partition("\n")[0]
            raise NotLinearError(text, eqn) from error

    # JAX's own operations are checked already. A function with a rule of its own is not: that of
    # `x**2` gives twice the upstream, and is refused here.
    pulled = at_any_point(pull, types, *dots)
    if pulled is None:
        of = f"`{name_of(eqn)}`" if eqn else "an operation"
        raise NotLinearError(f"{of}, whose derivative depends on the upstream", eqn)
    if eqn:  # the vjp runs the rule of another function: is it linear, too?
        check(pulled, is_transpose=True)
    return jaxpr_as_fun(pulled)(*dots)


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
    given = [i for i, shape in enumerate(shapes) if shape is not None]
    return closed.replace(jaxpr=_needed(closed.jaxpr)), given


def at_any_point(f: Callable[..., Any], types: _Types, *args: Any) -> ClosedJaxpr | None:
    """Trace `f(points, *args)` as a function of `args` alone.

    None if it depends on the points, which are of these types. The derivative of a linear map is
    the same everywhere, and no other derivative is a transpose.
    """
    closed = jax.make_jaxpr(f)(types, *args)
    jaxpr, n, first = _needed(without_consts(closed)), len(types), len(closed.consts)
    if any(mask >> first & ((1 << n) - 1) for mask in dependence(jaxpr)):
        return None
    constants, operands = jaxpr.invars[: first + n], jaxpr.invars[first + n :]
    jaxpr = jaxpr.replace(constvars=constants, invars=operands)
    return ClosedJaxpr(jaxpr, [*closed.consts, *map(zeros, types)])


# --- jaxprs without what they do not need ---------------------------------------------------------


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
