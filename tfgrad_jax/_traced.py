"""A traced function that closes over tracers, with these as further operands.

`Traced(f, operands)` traces; `captured` and `used` then tell what `f` closed over and what its
results depend on; `release` lets go of the tracers, and `evaluate` calls it on other values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Literal

from ._compat import evaluate, without_consts


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

    def used(self, results: Sequence[int]) -> tuple[dict[int, Any], set[int]]:
        """Return what the results at these positions depend on.

        Of the captured tracers the ids, in the order of first use, each with the equation that
        first uses it; of the operands their positions.
        """
        outvars = [self._jaxpr.outvars[i] for i in results]
        needed = {v for v in outvars if not isinstance(v, Literal)}
        equations = []  # those that the results depend on, last one first
        for eqn in reversed(self._jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
                equations.append(eqn)
        count = len(self._consts)
        captured = {
            var: id(c)
            for var, c in zip(self._jaxpr.invars, self._consts, strict=False)
            if isinstance(c, Tracer)
        }
        first: dict[int, Any] = {}
        for eqn in reversed(equations):
            for var in eqn.invars:
                if not isinstance(var, Literal) and var in captured:
                    first.setdefault(captured[var], eqn)
        for var in outvars:
            if not isinstance(var, Literal) and var in captured:
                first.setdefault(captured[var], None)  # returned as it is
        operands = enumerate(self._jaxpr.invars[count:])
        return first, {i for i, var in operands if var in needed}
