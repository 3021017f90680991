"""Follow a fact about values through a jaxpr, into the jaxprs that it calls.

`flow` runs an `Analysis` over a jaxpr: each variable gets a value, such as "linear in the
upstreams" (`_linear.py`) or "depends on these operands" (`_traced.py`). What a `jit`, a
`scan`, a `while_loop`, a `cond` and a `checkpoint` do to the values of their bodies is the same
for every analysis, and stands here alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jax.extend.core import Literal


class Analysis(Protocol):
    """What is followed. Values have an equality, and `join` only ever climbs."""

    def constant(self, value: Any) -> Any:
        """Return the value of a constant."""

    def step(self, eqn: Any, operands: Sequence[Any]) -> Any:
        """Return the value of all results of an equation that calls nothing."""

    def join(self, name: str, a: Any, b: Any) -> Any:
        """Return the value of what is one or the other, by the operation of that name."""

    def branch(self, name: str, predicate: Any, result: Any) -> Any:
        """Return the value of a result that is chosen, or ends, by a predicate."""


def flow(jaxpr: Any, operands: Iterable[Any], analysis: Analysis) -> list[Any]:
    """Return the values of the results of a jaxpr without constants, given its operands'."""
    values = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return analysis.constant(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = _equation(eqn, [read(a) for a in eqn.invars], analysis)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def call_body(eqn: Any) -> Any:
    """Return the body of an equation that calls it once, with its own operands, or None."""
    if eqn.primitive.name != "scan":
        for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            body = eqn.params.get(parameter)
            if body is not None and len(_open(body).invars) == len(eqn.invars):
                return body
    return None


def _open(body: Any) -> Any:
    return getattr(body, "jaxpr", body)  # closed, or open where it has no constants


def _body(body: Any, operands: Sequence[Any], analysis: Analysis) -> list[Any]:
    jaxpr = _open(body)
    consts = [analysis.constant(c) for c in getattr(body, "consts", ())]
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return flow(jaxpr, [*consts, *operands], analysis)


def _equation(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> list[Any]:
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, operands, analysis)
    if name == "while":
        return _while(eqn, operands, analysis)
    if name == "cond":
        return _cond(eqn, operands, analysis)
    body = call_body(eqn)
    if body is not None:
        return _body(body, operands, analysis)
    return [analysis.step(eqn, operands)] * len(eqn.outvars)


def _loop(name: str, body: Any, parts: Sequence[Sequence[Any]], analysis: Analysis) -> list[Any]:
    """Return the values of the results of a loop, when those of its carry no longer change."""
    consts, carry, xs = map(list, parts)
    while True:
        results = _body(body, [*consts, *carry, *xs], analysis)
        after = [analysis.join(name, a, b) for a, b in zip(carry, results, strict=False)]
        if after == carry:
            return [*carry, *results[len(carry) :]]
        carry = after


def _scan(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> list[Any]:
    # Versions of JAX tell these numbers by different names; a sequence has one axis more in the
    # equation than in the body.
    body = _open(eqn.params["jaxpr"])
    end = len(operands) - _unequal(eqn.invars, body.invars)
    start = end - (len(eqn.outvars) - _unequal(eqn.outvars, body.outvars))
    parts = operands[:start], operands[start:end], operands[end:]
    return _loop("scan", eqn.params["jaxpr"], parts, analysis)


def _unequal(these: Sequence[Any], those: Sequence[Any]) -> int:
    return sum(a.aval.shape != b.aval.shape for a, b in zip(these, those, strict=True))


def _while(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> list[Any]:
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    parts = operands[first:second], operands[second:], ()
    carry = _loop("while", eqn.params["body_jaxpr"], parts, analysis)
    (end,) = _body(eqn.params["cond_jaxpr"], [*operands[:first], *carry], analysis)
    return [analysis.branch("while", end, value) for value in carry]


def _cond(eqn: Any, operands: Sequence[Any], analysis: Analysis) -> list[Any]:
    predicate, *rest = operands
    first, *others = (_body(branch, rest, analysis) for branch in eqn.params["branches"])
    for results in others:
        first = [analysis.join("cond", a, b) for a, b in zip(first, results, strict=True)]
    return [analysis.branch("cond", predicate, value) for value in first]
