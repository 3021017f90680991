"""Follow a fact about values through a jaxpr, into the jaxprs that it calls.

`Analysis.follow` gives each variable a value, such as "linear in the upstreams"
(`_autodiff/linearity.py`) or "depends on these operands" (`dependence`). Only this module knows how
a `jit`, a `scan`, a `while_loop`, a `cond` and a `checkpoint` pass values to their bodies. What is
in a Ref is not followed: an analysis says what it takes it for.
"""

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar, cast

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var

from .compat import is_ref_type
from .types import Aval, Eqn, Leaf

_V = TypeVar("_V")  # the fact that is followed
Atom: TypeAlias = Var | Literal
Followed: TypeAlias = list[_V]  # of results
Body: TypeAlias = Jaxpr | ClosedJaxpr  # a parameter of the equation that calls it
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
    jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return jaxpr
    return jaxpr.replace(constvars=[], invars=_inputs(jaxpr))


def _inputs(jaxpr: Jaxpr) -> list[Var]:
    return [*jaxpr.constvars, *jaxpr.invars]


class Analysis(Generic[_V]):
    """The fact to follow. Values can be compared for equality, and `join` is monotone."""

    def __init__(self) -> None:
        # What came of each jaxpr that was followed, which is kept so that no other gets its id. A
        # jitted function is traced once: without this, 16 of them that each call the next one twice
        # would be followed 65,536 times.
        self._memo: dict[Hashable, tuple[Jaxpr, Followed[_V]]] = {}

    def constant(self, value: Leaf) -> _V:
        """Return the value of a constant."""
        raise NotImplementedError

    def call(self, eqn: Eqn, operands: Sequence[_V], follow: "Follow[_V]") -> Followed[_V]:
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

    def follow(self, jaxpr: Jaxpr, operands: Iterable[_V]) -> Followed[_V]:
        """Return the values of the results. Among the operands, those of constants come first."""
        values: dict[Var, _V] = dict(zip(_inputs(jaxpr), operands, strict=True))

        def read(atom: Atom) -> _V:
            return self.constant(atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            given, follow = [*map(read, eqn.invars)], _LOOPS_AND_BRANCHES.get(eqn.primitive.name)
            if follow is None and call_body(eqn) is None:
                results = self.step(eqn, given)
            else:
                results = self.call(eqn, given, follow or _call)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def called(self, body: Body, operands: Iterable[_V]) -> Followed[_V]:
        """Return the same for what an equation calls, without its constants."""
        jaxpr, consts = open_jaxpr(body), [self.constant(c) for c in getattr(body, "consts", ())]
        key = id(jaxpr), *consts, *operands
        if key not in self._memo:
            self._memo[key] = jaxpr, self.follow(jaxpr, key[1:])
        return self._memo[key][1]

    def joined(self, name: str, these: Sequence[_V], those: Sequence[_V]) -> list[_V]:
        """Return the values of results that are either `these` or `those`."""
        return [self.join(name, a, b) for a, b in zip(these, those, strict=True)]


Follow: TypeAlias = Callable[[Eqn, Sequence[_V], Analysis[_V]], Followed[_V]]


class Dependence(Analysis[Mask]):
    """Follow which operands a value depends on.

    Or, if `mapped`, with which operands `vmap` certainly maps it.
    """

    def __init__(self, mapped: bool) -> None:
        super().__init__()
        self._mapped = mapped

    def constant(self, value: Leaf) -> Mask:
        return 0

    def call(self, eqn: Eqn, operands: Sequence[Mask], follow: Follow[Mask]) -> Followed[Mask]:
        if self._mapped and eqn.primitive.name == "custom_vmap_call":  # its rule says what is
            return [0] * len(eqn.outvars)
        return follow(eqn, operands, self)

    def step(self, eqn: Eqn, operands: Sequence[Mask]) -> list[Mask]:
        n = len(eqn.outvars)
        # What is in a Ref may depend on anything, and nothing certainly maps it.
        touches_ref = any(is_ref_type(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if touches_ref:
            return [0 if self._mapped else -1] * n
        # All examples share the result of a collective, which has an effect. Any other effect
        # counts as a collective's: then `depend` is in vain, and compiles to nothing. To learn the
        # type of a collective's effect takes a trace, and JAX fails to make one inside a checked
        # `shard_map`.
        if self._mapped and eqn.effects:
            return [0] * n
        if isinstance(eqn.primitive, Identity) or eqn.primitive.name in ONE_BY_ONE:
            return list(operands[:n])
        return [functools.reduce(operator.or_, operands, 0)] * n

    def join(self, name: str, a: Mask, b: Mask) -> Mask:
        return a | b


def dependence(jaxpr: Jaxpr, mapped: bool = False) -> list[Mask]:
    """Return, for each result of a jaxpr, which constants and operands it depends on.

    Or, if `mapped`, with which of them `vmap` certainly maps it.
    """
    masks = [1 << i for i in range(len(_inputs(jaxpr)))]
    return Dependence(mapped).follow(jaxpr, masks)


def call_body(eqn: Eqn) -> Body | None:
    """Return the body of an equation that calls it once, with its own operands, or None."""
    if eqn.primitive.name != "scan":
        for parameter in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "fwd_jaxpr"):
            body = eqn.params.get(parameter)
            if body is not None and len(open_jaxpr(body).invars) == len(eqn.invars):
                return body
    return None


def name_of(eqn: Eqn) -> str:
    """Return the name of the function that an equation calls."""
    body = cast("Body", call_body(eqn))
    return eqn.params.get("name") or open_jaxpr(body).debug_info.func_name


def open_jaxpr(body: Body) -> Jaxpr:
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def _call(eqn: Eqn, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    return analysis.called(cast("Body", call_body(eqn)), operands)


def _loop(
    name: str, body: Body, parts: Sequence[Sequence[_V]], analysis: Analysis[_V]
) -> Followed[_V]:
    """Return the values of the results of a loop."""
    # What one iteration computes, the next one gets. So the body is followed until its carry has
    # the values that it had before: a delay line passes an upstream on three steps late.
    consts, carry, xs = map(list, parts)
    while True:
        results, before = analysis.called(body, [*consts, *carry, *xs]), carry
        carry = analysis.joined(name, carry, results[: len(carry)])
        if carry == before:
            return [*carry, *results[len(carry) :]]


def _scan(eqn: Eqn, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    # The parameters of the equation say where the carry is, but their names differ between versions
    # of JAX (such as `num_consts`). The shapes do not: the sequences, which follow the carry, have
    # one axis more in the equation than in the body.
    body = open_jaxpr(eqn.params["jaxpr"])
    end = len(eqn.invars) - _unequal(eqn.invars, body.invars)
    start = end - (len(eqn.outvars) - _unequal(eqn.outvars, body.outvars))
    parts = operands[:start], operands[start:end], operands[end:]
    return _loop("scan", eqn.params["jaxpr"], parts, analysis)


def _unequal(these: Sequence[Atom], those: Sequence[Atom]) -> int:
    shapes = lambda atoms: [cast("Aval", a.aval).shape for a in atoms]  # noqa: E731
    return sum(a != b for a, b in zip(shapes(these), shapes(those), strict=True))


def _while(eqn: Eqn, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    parts = operands[first:second], operands[second:], ()
    carry = _loop("while", eqn.params["body_jaxpr"], parts, analysis)
    (end,) = analysis.called(eqn.params["cond_jaxpr"], [*operands[:first], *carry])
    return [analysis.branch("while", end, value) for value in carry]


def _cond(eqn: Eqn, operands: Sequence[_V], analysis: Analysis[_V]) -> Followed[_V]:
    predicate, *rest = operands
    each = [analysis.called(branch, rest) for branch in eqn.params["branches"]]
    results = functools.reduce(functools.partial(analysis.joined, "cond"), each)
    return [analysis.branch("cond", predicate, value) for value in results]


_LOOPS_AND_BRANCHES = {"scan": _scan, "while": _while, "cond": _cond}
