"""Run code on values, and follow on which of some values its results depend.

A `Follow` is a trace. Code gets tracers for the values that are followed. Each operation runs on
the values themselves, at the level outside; its results are tracers where they depend on one that
is followed, else values. So a cache of constants that the code fills holds values, and what runs is
what would run without us: nothing is recorded to be evaluated later.
"""

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.core import Tracer
from jax.extend.core import Var
from jax.extend.core import find_top_trace as _current_trace
from jax.extend.core import set_current_trace as _set_trace
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import current as _here
from jax.extend.source_info_util import register_exclusion

from .compat import is_ref, is_ref_type
from .jaxpr import Dependence, Mask, SourceInfo, flow_of_one, in_order_of_use
from .reasons import Why, noting
from .trace import AtOnce, is_differentiated, is_staging
from .types import AnyFunction, Aval, Leaf

register_exclusion(__file__)


class _Operation(NamedTuple):
    """An operation, as an analysis of jaxprs knows it."""

    primitive: Any
    params: Any
    invars: Sequence[Var]
    outvars: Sequence[Var]


class FollowedTracer(Tracer):
    """A value that depends on some that are followed."""

    __slots__ = ("mask", "value")

    def __init__(self, trace: "Follow", aval: Aval, value: Leaf, mask: Mask) -> None:
        super().__init__(trace, aval)
        self.value, self.mask = value, mask


class Follow(jax.core.Trace):
    """Follows on which of some values others depend, while it is `running`."""

    def __init__(self, values: Sequence[Leaf], why: Why) -> None:
        super().__init__()
        self.parent_trace: Any = _current_trace(())
        self.requires_low = self.parent_trace.requires_low
        # Nothing differentiates what runs now, nor what is recorded, later. So functions with a
        # derivative of their own need none.
        self.is_plain = not (is_differentiated() or is_staging())
        self.uses: dict[int, SourceInfo] = {}  # where each of them is used first, in order
        self._why, self._current = why, None
        # Each has two bits. The second one ends with what has no derivative, as in a comparison.
        self._count = len(values)
        self._analysis = Dependence(ends=(1 << self._count) - 1 << self._count)
        self._refs: dict[int, tuple[Leaf, Mask]] = {}  # no tracer stands for a Ref
        bits = ((1 << self._count) + 1 << i for i in range(self._count))
        self.values = list(map(self._shown, values, bits))
        self._unused = {id(v): i for i, v in enumerate(self.values)}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run code on `self.values`, which stand for those that are followed."""
        try:
            with AtOnce.inside(self, self._is_followed, calls=True), noting(self._why, trace=self):
                self._current = _current_trace(())
                yield
        finally:
            self.invalidate()
            # JAX may keep the functions of `_entering`, and they keep this object.
            self.parent_trace = self._current = self._why = None
            self.values, self._refs, self._unused = [], {}, {}

    def opened(self, values: Sequence[Leaf]) -> tuple[list[Leaf], list[Mask]]:
        """Return the values for which tracers stand, and on what each of them depends."""
        bare, masks = [], []
        for value in values:
            followed = self._is_followed(value)
            bare.append(value.value if followed else value)
            ref = None if followed else self._refs.get(id(value))
            masks.append(value.mask if followed else 0 if ref is None else ref[1])
        return bare, masks

    def used_by(self, values: Sequence[Leaf], differentiable: bool = False) -> list[int]:
        """Return on which of those that are followed these depend, in order of first use.

        If `differentiable`, a use in a comparison does not count, since it has no derivative.
        """
        _, masks = self.opened(values)
        joined = functools.reduce(operator.or_, masks, 0)
        every = [*self.uses, *(i for i in range(self._count) if i not in self.uses)]
        return [i for i in every if joined >> i + self._count * differentiable & 1]

    def _is_followed(self, value: Leaf) -> bool:
        return type(value) is FollowedTracer and value._trace is self

    def _shown(self, value: Leaf, mask: Mask, aval: Aval | None = None) -> Leaf:
        """Return what code gets for a value."""
        if not mask:
            return value
        aval = aval or jax.typeof(value)
        if is_ref_type(aval):
            self._refs[id(value)] = value, mask
            return value
        return FollowedTracer(self, aval, value, mask)

    # --- what JAX asks of a trace -----------------------------------------------------------------

    def stage_value(self, val: Leaf) -> Leaf:
        return val

    def process_primitive(self, primitive: Any, values: Any, params: Any, /) -> Any:
        bare, masks = self.opened(values)
        result = self.parent_trace.process_primitive(primitive, bare, params)
        results = result if primitive.multiple_results else [result]
        places, typed = ([Var(jax.typeof(v)) for v in some] for some in (values, results))
        one: Any = _Operation(primitive, params, places, typed)
        of_results, after = flow_of_one(one, masks, self._analysis)
        if after is not masks:
            for value, mask in zip(values, after, strict=True):  # what it may have written
                if id(value) in self._refs or (mask and is_ref(value)):
                    self._refs[id(value)] = value, mask
        first = [v for v in values if id(v) in self._unused]
        if len(first) > 1:
            value_of = dict(zip(places, values, strict=True))
            first = [value_of[cast("Var", a)] for a in in_order_of_use(one)]
        for value in first:
            if id(value) in self._unused:
                self.uses.setdefault(self._unused.pop(id(value)), _here())
        shown = list(map(self._shown, results, of_results, (v.aval for v in typed)))
        return shown if primitive.multiple_results else shown[0]

    def process_custom_jvp_call(
        self, primitive: Any, f: Any, jvp: Any, values: Any, /, **params: Any
    ) -> Any:
        masks: list[Mask] = []  # of the results, and then of their tangents
        parts = [self._followed_inside(g, values, 1, masks) for g in (f, jvp)]
        bare, _ = self.opened(values)
        results = self.parent_trace.process_custom_jvp_call(primitive, *parts, bare, **params)
        return list(map(self._shown, results, masks))

    def process_custom_vjp_call(
        self, primitive: Any, f: Any, fwd: Any, bwd: Any, values: Any, /, **params: Any
    ) -> Any:
        masks: list[Mask] = []  # of the residuals, and then of the results
        # `fwd` gets pairs: a value, and whether it is being differentiated.
        parts = [self._followed_inside(g, values, n, masks) for n, g in enumerate((f, fwd), 1)]
        bare, _ = self.opened(values)
        results = self.parent_trace.process_custom_vjp_call(primitive, *parts, bwd, bare, **params)
        return list(map(self._shown, results, masks[-len(results) :]))

    def process_shard_map(self, primitive: Any, f: Any, values: Any, /, **params: Any) -> Any:
        masks: list[Mask] = []
        run = self._entering(f, values, 1, masks)
        bare, _ = self.opened(values)
        results = self.parent_trace.process_shard_map(primitive, run, bare, **params)
        left = iter(masks)
        return results.map(lambda value: self._shown(value, next(left)))

    def _followed_inside(self, f: Any, values: Any, step: int, masks: list[Mask]) -> Any:
        run = self._entering(f.call_wrapped, values, step, masks)
        return wrap_init(run, debug_info=f.debug_info)

    def _entering(
        self, f: AnyFunction, values: Sequence[Leaf], step: int, masks: list[Mask]
    ) -> AnyFunction:
        """Return a function that JAX runs, at a level of its choice; note the masks of its results.

        Every `step`-th of its first arguments stands for one of these values there.
        """
        _, given = self.opened(values)
        which = [self._unused.get(id(v)) for v in values]

        def bare(value: Leaf) -> Leaf:
            (value,), (mask,) = self.opened([value])
            masks.append(mask)
            return value

        def run(*args: Leaf) -> Any:
            if not self.is_valid():  # JAX has recorded the call, and differentiates it now
                return f(*args)
            shown = [*args]
            for k, mask in enumerate(given):
                shown[k * step] = self._shown(args[k * step], mask)
            aliases = {id(shown[k * step]): i for k, i in enumerate(which) if i is not None}
            outside = self.parent_trace, self._unused
            self.parent_trace, self._unused = _current_trace(()), self._unused | aliases
            try:
                with _set_trace(self._current):
                    results = f(*shown)
            finally:
                self.parent_trace, self._unused = outside
            masks.clear()
            return results.map(bare) if hasattr(results, "map") else list(map(bare, results))

        return run
