"""Follow a fact about values through a jaxpr, into the jaxprs that it calls.

`flow` runs an `Analysis` over a jaxpr. Each variable gets a value, such as "linear in the
upstreams" (`_autodiff/linearity.py`) or "depends on these operands" (`dependence`). Only this
module knows how a `jit`, a `scan`, a `while_loop`, a `cond` and a `checkpoint` pass values to their
bodies. A Ref has the joined value of everything that was written to it.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive

from .compat import is_ref_type


class Identity(Primitive):
    """An operation that returns its first operands; the others only affect derivatives and `vmap`.

    Those of `_autodiff` are, so that an analysis knows them without their names.
    """

    multiple_results = True


# Each result of these depends only on the operand at the same position.
ONE_BY_ONE = ("device_put", "optimization_barrier", "psum", "psum2", "psum_invariant", "pvary")


def without_consts(closed: ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr with its constants as leading arguments, and without their values."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def evaluate(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a jaxpr that has no constants, equation by equation."""
    return jax.core.eval_jaxpr(jaxpr, (), *args)


Followed: TypeAlias = tuple[
    list[Any], list[Any]
]  # values of the results; of the operands, after writes to Refs


class Analysis(Protocol):
    """The fact to follow. Values can be compared for equality, and `join` is monotone."""

    def constant(self, value: Any) -> Any:
        """Return the value of a constant."""

    def call(self, eqn: Any, operands: Sequence[Any], follow: Callable[..., Followed]) -> Followed:
        """Return `follow(eqn, operands, self)` for an equation that calls something."""

    def step(self, eqn: Any, operands: Sequence[Any]) -> Any:
        """Return the value of each result of an equation that calls nothing, or one for all."""

    def join(self, name: str, a: Any, b: Any) -> Any:
        """Return the value of a result that is either `a` or `b`; `name` is the operation."""

    def branch(self, name: str, predicate: Any, result: Any) -> Any:
        """Return the value of a result that a predicate chooses (`cond`) or ends (`while`)."""


def flow(jaxpr: Any, operands: Iterable[Any], analysis: Analysis) -> list[Any]:
    """Return the values of the results of a jaxpr without constants, from those of its operands."""
    return _flow(jaxpr, operands, analysis)[0]


def _flow(jaxpr: Any, operands: Iterable[Any], analysis: Analysis) -> Followed:
    """Return the values of the results, and of the operands after the jaxpr has written to Refs."""
    values = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return analysis.constant(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        results, after = _equation(eqn, operands, analysis)
        values.update(zip(eqn.outvars, results, strict=True))
        for atom, value in zip(eqn.invars, after, strict=True):
            if is_ref_type(atom.aval):
                values[atom] = value
    return [read(v) for v in jaxpr.outvars], [values[v] for v in jaxpr.invars]


class _Dependence:
    """Follow which operands a value depends on: bit `i` of a number stands for operand `i`."""

    def constant(self, value: Any) -> int:
        return 0

    def call(self, eqn: Any, operands: Sequence[int], follow: Callable[..., Followed]) -> Followed:
        return follow(eqn, operands, self)

    def step(self, eqn: Any, operands: Sequence[int]) -> Any:
        if isinstance(eqn.primitive, Identity) or eqn.primitive.name in ONE_BY_ONE:
            return list(operands[: len(eqn.outvars)])
        return functools.reduce(operator.or_, operands, 0)

    def join(self, name: str, a: int, b: int) -> int:
        return a | b

    def branch(self, name: str, predicate: int, result: int) -> int:
        return predicate | result


def dependence(jaxpr: Any) -> list[int]:
    """Return, for each result of a jaxpr without constants, which operands it depends on.

    Bit `i` stands for operand `i`.
    """
    return flow(jaxpr, [1 << i for i in range(len(jaxpr.invars))], _Dependence())


class _Reads(_Dependence):
    """Also follow constant arrays: their bits come after those of the operands."""

    def __init__(self, operands: int) -> None:
        self._operands = operands
        self.arrays: list[Any] = []

    def constant(self, value: Any) -> int:
        if not isinstance(value, jax.Array):
            return 0
        self.arrays.append(value)
        place = next(i for i, array in enumerate(self.arrays) if array is value)
        return 1 << self._operands + place


def reads(closed: ClosedJaxpr) -> list[tuple[set[int], list[Any]]]:
    """Return for each result which operands it depends on (positions), and which constant arrays.

    These are the constants of the jaxpr and of those that it calls, such as of a jitted function.
    """
    count = len(closed.jaxpr.invars)
    analysis = _Reads(count)
    constants = [analysis.constant(c) for c in closed.consts]
    operands = [1 << i for i in range(count)]
    return [
        (
            {i for i in range(count) if mask >> i & 1},
            [a for i, a in enumerate(analysis.arrays, count) if mask >> i & 1],
        )
        for mask in flow(without_consts(closed), [*constants, *operands], analysis)
    ]


def call_body(eqn: Any) -> Any:
    """Return the body of an equation that calls it once, with its own operands, or None."""
    if eqn.primitive.name != "scan":
        for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "fwd_jaxpr"):
            body = eqn.params.get(parameter)
            if body is not None and len(open_jaxpr(body).invars) == len(eqn.invars):
                return body
    return None


def is_declared(eqn: Any) -> bool:
    """Return whether an equation is a call with a derivative of its own."""
    return eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))


def in_order_of_use(eqn: Any) -> list[Any]:
    """Return the operands of an equation; those of a call with its own derivative, as it uses them.

    A decorated function is no such call where only its value is computed. The order is the same.
    """
    body = call_body(eqn) if is_declared(eqn) else None
    if body is None:
        return eqn.invars
    jaxpr = open_jaxpr(body)
    atom_of = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    used = [a for e in jaxpr.eqns for a in in_order_of_use(e) if not isinstance(a, Literal)]
    return [atom_of[a] for a in used if a in atom_of] + list(eqn.invars)


def name_of(eqn: Any) -> str:
    """Return the name of the function that an equation calls."""
    return eqn.params.get("name") or open_jaxpr(call_body(eqn)).debug_info.func_name


def open_jaxpr(body: Any) -> Any:
    return getattr(body, "jaxpr", body)  # some parameters have a ClosedJaxpr, others a Jaxpr


def _body(body: Any, operands: Sequence[Any], analysis: Analysis) -> Followed:
    jaxpr, consts = open_jaxpr(body), [analysis.constant(c) for c in getattr(body, "consts", ())]
    opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    results, after = _flow(opened, [*consts, *operands], analysis)
    return results, after[len(consts) :]


def _equation(eqn: Any, operands: list[Any], analysis: Analysis) -> Followed:
    name = eqn.primitive.name
    if name in _LOOPS_AND_BRANCHES:
        return analysis.call(eqn, operands, _LOOPS_AND_BRANCHES[name])
    if call_body(eqn) is not None:
        return analysis.call(eqn, operands, _call)
    result = analysis.step(eqn, operands)
    if isinstance(result, list):
        return result, operands
    if any(is_ref_type(a.aval) for a in eqn.invars):  # the operation may write to the Ref
        join = functools.partial(analysis.join, name)
        return [result] * len(eqn.outvars), [functools.reduce(join, operands)] * len(operands)
    return [result] * len(eqn.outvars), operands


def _call(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> Followed:
    return _body(call_body(eqn), operands, analysis)


def _loop(name: str, body: Any, parts: Sequence[Sequence[Any]], analysis: Analysis) -> Followed:
    """Return the values of the results of a loop, once those of its carry reach a fixed point."""
    consts, carry, xs = map(list, parts)
    while True:
        results, after = _body(body, [*consts, *carry, *xs], analysis)
        joined = [analysis.join(name, a, b) for a, b in zip(carry, results, strict=False)]
        consts, before = after[: len(consts)], consts  # a body may write to Refs among these
        if joined == carry and consts == before:
            return [*carry, *results[len(carry) :]], [*consts, *carry, *xs]
        carry = joined


def _scan(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> Followed:
    # The versions of JAX have different names for these numbers, so `carry_of` looks at the shapes.
    start, end = carry_of(eqn)
    parts = operands[:start], operands[start:end], operands[end:]
    return _loop("scan", eqn.params["jaxpr"], parts, analysis)


def carry_of(eqn: Any) -> tuple[int, int]:
    """Return where the carry of a scan begins and ends among its operands.

    The sequences follow the carry. They have one axis more in the equation than in the body.
    """
    body = open_jaxpr(eqn.params["jaxpr"])
    end = len(eqn.invars) - _unequal(eqn.invars, body.invars)
    return end - (len(eqn.outvars) - _unequal(eqn.outvars, body.outvars)), end


def _unequal(these: Sequence[Any], those: Sequence[Any]) -> int:
    return sum(a.aval.shape != b.aval.shape for a, b in zip(these, those, strict=True))


def _while(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> Followed:
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    parts = operands[first:second], operands[second:], ()
    carry, after = _loop("while", eqn.params["body_jaxpr"], parts, analysis)
    (end,), tests = _body(eqn.params["cond_jaxpr"], [*operands[:first], *carry], analysis)
    after = [*tests[:first], *after]
    return [analysis.branch("while", end, value) for value in carry], after


def _cond(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> Followed:
    predicate, *rest = operands
    first, *others = (_body(branch, rest, analysis) for branch in eqn.params["branches"])
    results, after = first
    for more, later in others:
        results = [analysis.join("cond", a, b) for a, b in zip(results, more, strict=True)]
        after = [analysis.join("cond", a, b) for a, b in zip(after, later, strict=True)]
    return [analysis.branch("cond", predicate, value) for value in results], [predicate, *after]


_LOOPS_AND_BRANCHES = {"scan": _scan, "while": _while, "cond": _cond}
