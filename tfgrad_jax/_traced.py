"""A traced function that closes over tracers, with these as further operands.

`Traced(f, operands)` traces; `captured` and `dependence` then tell what `f` closed over and what
its results depend on; `release` lets go of the tracers, and `evaluate` calls it on other values.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import Literal

from ._compat import evaluate, without_consts
from ._flow import flow


class Traced:
    """A jaxpr of a function of the operands; the tracers it captured become operands too."""

    def __init__(self, f: Callable[..., Any], operands: Sequence[Any]) -> None:
        closed = jax.make_jaxpr(lambda *operands: f(*operands))(*operands)  # no trace of it cached
        self._jaxpr = without_consts(closed)
        self._consts = list(closed.consts)
        self._captured: dict[int, int] = {}  # position among the constants -> among the captured

    def captured(self) -> dict[int, Any]:
        """Return the captured tracers by their id."""
        return {id(c): c for c in self._consts if isinstance(c, Tracer)}

    def release(self, order: Mapping[int, Any]) -> None:
        """Take the tracers from the captured values, in this order, from now on."""
        index = {key: position for position, key in enumerate(order)}
        for i, c in enumerate(self._consts):
            if isinstance(c, Tracer):
                self._captured[i] = index[id(c)]
                self._consts[i] = None  # it must not outlive its trace

    def evaluate(self, captured: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        consts = list(self._consts)
        for i, position in self._captured.items():
            consts[i] = captured[position]
        return evaluate(self._jaxpr, *consts, *operands)

    def dependence(self, count: int) -> "Dependence":
        """Return what the first `count` results depend on."""
        jaxpr, consts = self._jaxpr, self._consts
        masks = flow(jaxpr, [1 << i for i in range(len(jaxpr.invars))], _Dependence())[:count]
        needed = functools.reduce(operator.or_, masks, 0)
        keys = {
            jaxpr.invars[i]: id(c)
            for i, c in enumerate(consts)
            if needed >> i & 1 and isinstance(c, Tracer)
        }
        used: dict[int, Any] = {}
        for eqn in jaxpr.eqns:
            for var in eqn.invars:
                if not isinstance(var, Literal) and var in keys:
                    used.setdefault(keys[var], eqn)
        for key in keys.values():
            used.setdefault(key, None)
        return Dependence(used, masks, [id(c) for c in consts])


class Dependence(NamedTuple):
    """What the results of a traced function depend on."""

    # The captured tracers, by id in the order of use, each with the first equation that uses it
    # (None where it is only returned as it is).
    used: dict[int, Any]
    masks: list[int]  # for each result, bits of the constants and then of the operands
    consts: list[int]  # ids of the constants

    def ignored(self, order: Mapping[int, Any], operands: int) -> list[list[int]]:
        """Return for each result what it does not depend on.

        The captured values, in this order, and then the operands are numbered.
        """
        place = {key: i for i, key in enumerate(self.consts)}
        bits = [place.get(key) for key in order]
        bits += [len(self.consts) + i for i in range(operands)]
        return [
            [i for i, bit in enumerate(bits) if bit is None or not mask >> bit & 1]
            for mask in self.masks
        ]


class _Dependence:
    """Tell of each value, as bits, which operands it depends on."""

    def constant(self, value: Any) -> int:
        return 0

    def step(self, eqn: Any, operands: Sequence[int]) -> int:
        return functools.reduce(operator.or_, operands, 0)

    def join(self, name: str, a: int, b: int) -> int:
        return a | b

    def branch(self, name: str, predicate: int, result: int) -> int:
        return predicate | result
