"""A traced function that closes over tracers, with these as further operands.

`Traced(f, operands)` traces; `captured` and `used` then tell what `f` closed over and what its
results depend on; `release` lets go of the tracers, and `evaluate` calls it on other values.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

    def dependence(self, count: int) -> list[set[int]]:
        """Return for each of the first `count` results what it depends on.

        The constants and operands are numbered, the constants first.
        """
        everything = len(self._jaxpr.invars)
        masks = flow(self._jaxpr, [1 << i for i in range(everything)], _Dependence())
        return [{i for i in range(everything) if mask >> i & 1} for mask in masks[:count]]

    def first_uses(self) -> dict[int, Any]:
        """Return the first equation that uses each captured tracer, in the order of use.

        By id; None for one that is only returned as it is.
        """
        keys = {
            var: id(c)
            for var, c in zip(self._jaxpr.invars, self._consts, strict=False)
            if isinstance(c, Tracer)
        }
        first: dict[int, Any] = {}
        for eqn in self._jaxpr.eqns:
            for var in eqn.invars:
                if not isinstance(var, Literal) and var in keys:
                    first.setdefault(keys[var], eqn)
        for var in self._jaxpr.outvars:
            if not isinstance(var, Literal) and var in keys:
                first.setdefault(keys[var], None)
        return first

    def used(self, count: int) -> dict[int, Any]:
        """Return the first uses of the captured tracers that the first `count` results need."""
        needed = set().union(*self.dependence(count))
        ids = {id(c) for i, c in enumerate(self._consts) if i in needed}
        return {key: eqn for key, eqn in self.first_uses().items() if key in ids}

    def ignored(self, count: int, order: Mapping[int, Any]) -> list[list[int]]:
        """Return for each of the first `count` results what it does not depend on.

        The captured values in this order and the operands are numbered.
        """
        index = {key: position for position, key in enumerate(order)}
        consts = len(self._consts)
        everything = range(len(order) + len(self._jaxpr.invars) - consts)
        ignored = []
        for needed in self.dependence(count):
            uses = {len(order) + i - consts for i in needed if i >= consts}
            uses |= {index.get(id(self._consts[i]), -1) for i in needed if i < consts}
            ignored.append([i for i in everything if i not in uses])
        return ignored


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
