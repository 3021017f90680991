"""A traced function that closes over tracers, with these as further operands.

`Traced(f, operands)` traces; `captured` and `dependence` then tell what `f` closed over and what
its results depend on; `release` lets go of the tracers, and `evaluate` calls it on other values.
`dependence_on` asks the same of a function that cannot be traced, because it branches on values.
"""

import functools
import operator
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import Literal

from tfgrad_jax._frontend.grad_fn import NeedsValuesError
from tfgrad_jax._frontend.structure import spec
from tfgrad_jax._jaxpr import Follow, Followed, evaluate, flow, without_consts


class Dependence(NamedTuple):
    """What the results of a function depend on."""

    masks: list[int]  # for each result, bits of the operands of the jaxpr
    order: list[int]  # these operands in the order of their first use
    uses: dict[int, Any]  # the first equation that uses one; none where it is only returned

    @classmethod
    def of(cls, jaxpr: Any, count: int) -> "Dependence":
        """Return it for the first `count` results of a jaxpr without constants."""
        position = {v: i for i, v in enumerate(jaxpr.invars)}
        masks = flow(jaxpr, [1 << i for i in range(len(position))], _Masks())[:count]
        needed = functools.reduce(operator.or_, masks, 0)
        uses: dict[int, Any] = {}
        for eqn in jaxpr.eqns:
            for atom in eqn.invars:
                i = None if isinstance(atom, Literal) else position.get(atom)
                if i is not None and needed >> i & 1:
                    uses.setdefault(i, eqn)
        rest = [i for i in range(len(position)) if needed >> i & 1 and i not in uses]
        return cls(masks, [*uses, *rest], uses)


class Traced:
    """A jaxpr of a function of the operands; the tracers it captured become operands too."""

    def __init__(
        self,
        f: Callable[..., Any],
        operands: Sequence[Any],
        behind: Mapping[int, Any] = types.MappingProxyType({}),
    ) -> None:
        closed = jax.make_jaxpr(lambda *operands: f(*operands))(*operands)  # no trace of it cached
        self.jaxpr = without_consts(closed)
        self._consts = [behind.get(id(c), c) for c in closed.consts]
        self._places: dict[int, int] = {}  # position among the constants -> among the captured

    def captured(self) -> dict[int, Any]:
        """Return the captured tracers by their id."""
        return {id(c): c for c in self._consts if isinstance(c, Tracer)}

    def stopped(self) -> list[Any]:
        """Return the constants that `lax.stop_gradient` got."""
        known = dict(zip(self.jaxpr.invars, self._consts, strict=False))
        stops = [e.invars[0] for e in self.jaxpr.eqns if e.primitive.name == "stop_gradient"]
        found = (a.val if isinstance(a, Literal) else known.get(a) for a in stops)
        return [value for value in found if value is not None]

    def release(self, order: Mapping[int, int]) -> None:
        """Take the tracers from the captured values, which `order` numbers, from now on."""
        for i, c in enumerate(self._consts):
            if isinstance(c, Tracer):
                self._places[i] = order[id(c)]
                self._consts[i] = None  # it must not outlive its trace

    def evaluate(self, captured: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        consts = list(self._consts)
        for i, position in self._places.items():
            consts[i] = captured[position]
        return evaluate(self.jaxpr, *consts, *operands)

    def used(self, count: int) -> dict[int, Any]:
        """Return the captured tracers that the first `count` results depend on, by id.

        They come in the order of their first use, each with the equation of that.
        """
        dependence, consts = Dependence.of(self.jaxpr, count), self._consts
        used: dict[int, Any] = {}
        for i in dependence.order:
            if i < len(consts) and isinstance(consts[i], Tracer):
                used.setdefault(id(consts[i]), dependence.uses.get(i))
        return used


def dependence_on(
    f: Callable[..., Any], values: Sequence[Any], others: Sequence[Any]
) -> dict[int, Any]:
    """Return which of `values` the results of `f(values, others)` depend on.

    They come by position in the order of their first use, each with the equation of that.
    """
    n = len(values)
    positions = list(range(n))
    try:
        jaxpr = Traced(lambda *all_: f(all_[:n], all_[n:]), [*values, *others]).jaxpr
        first = len(jaxpr.invars) - n - len(others)
    except NeedsValuesError:
        if any(isinstance(v, jax.ShapeDtypeStruct) for v in values):
            return dict.fromkeys(positions)  # no values are known any more
        # It branches on values, so these are concrete, and its derivative can be looked at.
        positions = [i for i in positions if spec(values[i]).differentiable]

        def moving(*moved: Any) -> Any:
            mixed = list(values)
            for i, value in zip(positions, moved, strict=True):
                mixed[i] = value
            return f(mixed, others)

        tangents = [values[i] for i in positions]
        jaxpr = Traced(jax.linearize(moving, *tangents)[1], tangents).jaxpr
        first = len(jaxpr.invars) - len(positions)
    dependence = Dependence.of(jaxpr, len(jaxpr.outvars))
    order = [i - first for i in dependence.order if 0 <= i - first < len(positions)]
    return {positions[i]: dependence.uses.get(i + first) for i in order}


# What the results of a jaxpr depend on, and its operands afterwards, as bits of its operands. Asked
# at every level of nested functions, and the same at each.
_KNOWN: weakref.WeakKeyDictionary[Any, Followed] = weakref.WeakKeyDictionary()


class _Masks:
    """Find the operands that each value depends on, as bits."""

    def constant(self, value: Any) -> int:
        return 0

    def step(self, eqn: Any, operands: Sequence[int]) -> int:
        return functools.reduce(operator.or_, operands, 0)

    def join(self, name: str, a: int, b: int) -> int:
        return a | b

    def branch(self, name: str, predicate: int, result: int) -> int:
        return predicate | result

    def call(self, jaxpr: Any, operands: Sequence[int], follow: Follow) -> Followed:
        if jaxpr not in _KNOWN:
            _KNOWN[jaxpr] = follow([1 << i for i in range(len(operands))])

        def of(mask: int) -> int:
            chosen = (o for i, o in enumerate(operands) if mask >> i & 1)
            return functools.reduce(operator.or_, chosen, 0)

        results, after = _KNOWN[jaxpr]
        return [of(m) for m in results], [of(m) for m in after]
