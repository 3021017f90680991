"""Follow a fact about values through a jaxpr, into the jaxprs that it calls.

`flow` runs an `Analysis` over a jaxpr. Each variable gets a value, such as "linear in the
upstreams" (`_autodiff/linearity.py`) or "depends on these operands" (`dependence`). Only this
module knows how a `jit`, a `scan`, a `while_loop`, a `cond` and a `checkpoint` pass values to their
bodies. A Ref has the joined value of everything that was written to it.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var

from .compat import is_ref_type
from .types import Aval, Eqn, Leaf, is_differentiable

_V = TypeVar("_V")  # the fact that is followed
Atom: TypeAlias = Var | Literal
Followed: TypeAlias = tuple[list[_V], list[_V]]  # of results; of operands, after writes to Refs
Body: TypeAlias = Jaxpr | ClosedJaxpr  # a parameter of the equation that calls it
SourceInfo: TypeAlias = object  # where an operation comes from, as JAX records it
Mask: TypeAlias = int  # a set of operands: bit `i` stands for operand `i`


class Identity(Primitive):
    """An operation that returns its first operands; the others only affect derivatives and `vmap`.

    Those of `_autodiff` are, so that an analysis knows them without their names.
    """

    multiple_results = True


# Each result of these depends only on the operand at the same position.
ONE_BY_ONE = ("device_put", "optimization_barrier", "psum", "psum2", "psum_invariant", "pvary")


def without_consts(closed: ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr with its constants as leading arguments, and without their values."""
    return _opened(closed.jaxpr)


def _opened(jaxpr: Jaxpr) -> Jaxpr:
    if not jaxpr.constvars:
        return jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def evaluate(jaxpr: Jaxpr, *args: Leaf) -> list[Leaf]:
    """Evaluate a jaxpr that has no constants, equation by equation."""
    return jax.core.eval_jaxpr(jaxpr, (), *args)


class Analysis(Generic[_V]):
    """The fact to follow. Values can be compared for equality, and `join` is monotone."""

    def constant(self, value: Leaf) -> _V:
        """Return the value of a constant."""
        raise NotImplementedError

    def call(
        self, eqn: Eqn, operands: Sequence[_V], follow: Callable[..., Followed[_V]]
    ) -> Followed[_V]:
        """Return the values of an equation that calls something: `follow` computes them."""
        return follow(eqn, operands, self)

    def step(self, eqn: Eqn, operands: Sequence[_V]) -> list[_V]:
        """Return the values of the results of an equation that calls nothing."""
        raise NotImplementedError

    def join(self, name: str, a: _V, b: _V) -> _V:
        """Return the value of a result that is either `a` or `b`; `name` is the operation."""
        raise NotImplementedError

    def branch(self, name: str, predicate: _V, result: _V) -> _V:
        """Return the value of a result that a predicate chooses (`cond`) or ends (`while`)."""
        return self.join(name, predicate, result)


def flow(jaxpr: Jaxpr, operands: Iterable[_V], analysis: Analysis[_V]) -> list[_V]:
    """Return the values of the results of a jaxpr without constants, from those of its operands."""
    return _flow(jaxpr, operands, analysis)[0]


def _flow(jaxpr: Jaxpr, operands: Iterable[_V], analysis: Analysis[_V]) -> Followed[_V]:
    """Return the values of the results, and of the operands after the jaxpr has written to Refs."""
    values: dict[Var, _V] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Atom) -> _V:
        return analysis.constant(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(a) for a in eqn.invars]
        results, after = flow_of_one(eqn, inputs, analysis)
        values.update(zip(eqn.outvars, results, strict=True))
        if after is inputs:
            continue
        for atom, value in zip(eqn.invars, after, strict=True):
            if isinstance(atom, Var) and is_ref_type(atom.aval):
                values[atom] = value
    return [read(v) for v in jaxpr.outvars], [values[v] for v in jaxpr.invars]


class Dependence(Analysis[Mask]):
    """Follow which operands a value depends on."""

    def __init__(self, ends: Mask = 0) -> None:
        self._ends = ends  # with what has no derivative, as a comparison has none

    def constant(self, value: Leaf) -> Mask:
        return 0

    def step(self, eqn: Eqn, operands: Sequence[Mask]) -> list[Mask]:
        n = len(eqn.outvars)
        if isinstance(eqn.primitive, Identity) or eqn.primitive.name in ONE_BY_ONE:
            return list(operands[:n])
        joined = functools.reduce(operator.or_, operands, 0)
        if not joined & self._ends:
            return [joined] * n
        dtypes = [cast("Aval", v.aval).dtype for v in eqn.outvars]
        return [joined if is_differentiable(d) else joined & ~self._ends for d in dtypes]

    def join(self, name: str, a: Mask, b: Mask) -> Mask:
        return a | b


def dependence(jaxpr: Jaxpr) -> list[Mask]:
    """Return, for each result of a jaxpr without constants, which operands it depends on."""
    return flow(jaxpr, [1 << i for i in range(len(jaxpr.invars))], Dependence())


class _Mapped(Dependence):
    """Follow for which operands `vmap` certainly maps a value, if it maps one of them."""

    def call(
        self, eqn: Eqn, operands: Sequence[Mask], follow: Callable[..., Followed[Mask]]
    ) -> Followed[Mask]:
        if eqn.primitive.name == "custom_vmap_call":  # its rule says what is mapped
            return [0] * len(eqn.outvars), list(operands)
        return follow(eqn, operands, self)

    def step(self, eqn: Eqn, operands: Sequence[Mask]) -> list[Mask]:
        # All examples share the result of a collective, which has an effect. So has what reads or
        # writes a Ref, which says nothing here. Any other effect counts as a collective's: then
        # `depend` is in vain, and compiles to nothing. To learn the type of a collective's effect
        # takes a trace, and JAX fails to make one inside a checked `shard_map`.
        if eqn.effects and not any(is_ref_type(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return [0] * len(eqn.outvars)
        return super().step(eqn, operands)


def mapped_with(jaxpr: Jaxpr) -> list[Mask]:
    """Return, for each result, with which operands `vmap` certainly maps it."""
    return flow(jaxpr, [1 << i for i in range(len(jaxpr.invars))], _Mapped())


def depends_on(mask: Mask, start: int, stop: int) -> bool:
    """Return whether a value depends on any of the operands from `start` to `stop`."""
    these = (1 << stop) - (1 << start)
    return bool(mask & these)


class _Reads(Dependence):
    """Also follow constant arrays: their bits come after those of the operands."""

    def __init__(self, operands: int) -> None:
        super().__init__()
        self._operands = operands
        self.arrays: list[jax.Array] = []

    def constant(self, value: Leaf) -> Mask:
        if not isinstance(value, jax.Array):
            return 0
        self.arrays.append(value)
        place = next(i for i, array in enumerate(self.arrays) if array is value)
        return 1 << self._operands + place


def reads(closed: ClosedJaxpr) -> list[tuple[set[int], list[jax.Array]]]:
    """Return for each result which operands it depends on (positions), and which constant arrays.

    These are the constants of the jaxpr and of those that it calls, such as of a jitted function.
    """
    n = len(closed.jaxpr.invars)
    analysis = _Reads(n)
    constants = [analysis.constant(c) for c in closed.consts]
    operands = [1 << i for i in range(n)]
    return [
        (
            {i for i in range(n) if depends_on(mask, i, i + 1)},
            [a for i, a in enumerate(analysis.arrays, n) if depends_on(mask, i, i + 1)],
        )
        for mask in flow(without_consts(closed), [*constants, *operands], analysis)
    ]


def call_body(eqn: Eqn) -> Body | None:
    """Return the body of an equation that calls it once, with its own operands, or None."""
    if eqn.primitive.name != "scan":
        for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "fwd_jaxpr"):
            body = eqn.params.get(parameter)
            if body is not None and len(open_jaxpr(body).invars) == len(eqn.invars):
                return body
    return None


def is_declared(eqn: Eqn) -> bool:
    """Return whether an equation is a call with a derivative of its own."""
    return eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))


def _bodies(eqn: Eqn) -> Iterator[tuple[Jaxpr, Sequence[Atom]]]:
    """Yield what an equation calls, each with its operands."""
    name, atoms = eqn.primitive.name, eqn.invars
    if name == "cond":
        yield from ((open_jaxpr(body), atoms[1:]) for body in eqn.params["branches"])
    elif name == "while":
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        yield open_jaxpr(eqn.params["cond_jaxpr"]), [*atoms[:first], *atoms[second:]]
        yield open_jaxpr(eqn.params["body_jaxpr"]), atoms[first:]
    elif (body := eqn.params["jaxpr"] if name == "scan" else call_body(eqn)) is not None:
        yield open_jaxpr(body), atoms


def name_of(eqn: Eqn) -> str:
    """Return the name of the function that an equation calls."""
    body = cast("Body", call_body(eqn))
    return eqn.params.get("name") or open_jaxpr(body).debug_info.func_name


def open_jaxpr(body: Body) -> Jaxpr:
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def _body(body: Body, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    consts = [analysis.constant(c) for c in getattr(body, "consts", ())]
    results, after = _flow(_opened(open_jaxpr(body)), [*consts, *operands], analysis)
    return results, after[len(consts) :]


def flow_of_one(eqn: Eqn, operands: list[_V], analysis: Analysis[_V]) -> Followed[_V]:
    """Return the values of the results of one equation, and of its operands after it."""
    name = eqn.primitive.name
    if name in _LOOPS_AND_BRANCHES:
        return analysis.call(eqn, operands, _LOOPS_AND_BRANCHES[name])
    if (body := call_body(eqn)) is not None:
        return analysis.call(eqn, operands, lambda _, *others: _body(body, *others))
    results = analysis.step(eqn, operands)
    if not any(is_ref_type(a.aval) for a in eqn.invars):
        return results, operands
    # The operation may write any operand to the Ref. What one iteration of a `scan` writes, the
    # next one reads, so a Ref that misses it here has the value that it had before the loop.
    written = functools.reduce(functools.partial(analysis.join, name), operands)
    return results, [written] * len(operands)


def _loop(
    name: str, body: Body, parts: Sequence[Sequence[_V]], analysis: Analysis[_V]
) -> Followed[_V]:
    """Return the values of the results of a loop."""
    # What one iteration computes, the next one gets. So the body is followed until its carry has
    # the values that it had before: a delay line passes an upstream on three steps late.
    consts, carry, xs = map(list, parts)
    while True:
        results, after = _body(body, [*consts, *carry, *xs], analysis)
        joined = [analysis.join(name, a, b) for a, b in zip(carry, results, strict=False)]
        consts, before = after[: len(consts)], consts  # a body may write to Refs among these
        if joined == carry and consts == before:
            return [*carry, *results[len(carry) :]], [*consts, *carry, *xs]
        carry = joined


def _scan(eqn: Eqn, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    start, end = carry_of(eqn)
    parts = operands[:start], operands[start:end], operands[end:]
    return _loop("scan", eqn.params["jaxpr"], parts, analysis)


def carry_of(eqn: Eqn) -> tuple[int, int]:
    """Return where the carry of a scan begins and ends among its operands."""
    # The parameters of the equation say so, but their names differ between versions of JAX (such as
    # `num_consts`). The shapes do not: the sequences, which follow the carry, have one axis more in
    # the equation than in the body.
    body = open_jaxpr(eqn.params["jaxpr"])
    end = len(eqn.invars) - _unequal(eqn.invars, body.invars)
    return end - (len(eqn.outvars) - _unequal(eqn.outvars, body.outvars)), end


def _unequal(these: Sequence[Atom], those: Sequence[Atom]) -> int:
    shapes = lambda atoms: [cast("Aval", a.aval).shape for a in atoms]  # noqa: E731
    return sum(a != b for a, b in zip(shapes(these), shapes(those), strict=True))


def _while(eqn: Eqn, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    parts = operands[first:second], operands[second:], ()
    carry, after = _loop("while", eqn.params["body_jaxpr"], parts, analysis)
    (end,), tests = _body(eqn.params["cond_jaxpr"], [*operands[:first], *carry], analysis)
    after = [*tests[:first], *after]
    return [analysis.branch("while", end, value) for value in carry], after


def _cond(eqn: Eqn, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    predicate, *rest = operands
    first, *others = (_body(branch, rest, analysis) for branch in eqn.params["branches"])
    results, after = first
    for more, later in others:
        results = [analysis.join("cond", a, b) for a, b in zip(results, more, strict=True)]
        after = [analysis.join("cond", a, b) for a, b in zip(after, later, strict=True)]
    return [analysis.branch("cond", predicate, value) for value in results], [predicate, *after]


_LOOPS_AND_BRANCHES = {"scan": _scan, "while": _while, "cond": _cond}
