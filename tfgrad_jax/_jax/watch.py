"""Run code as it is, and see which tracers it takes from outside.

A `Watch` is a trace, like the tape of TensorFlow that watches variables: every operation of the
code passes through it. An operand that is a tracer from outside is noted, at its first use. Where
JAX differentiates the code (`of` is its trace), the value inside such a tracer takes its place, and
the operation runs one level down. So the code need not be copied around values.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import find_top_trace as _current_trace
from jax.extend.core import set_current_trace as _set_trace
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import current as _here
from jax.extend.source_info_util import register_exclusion

from tfgrad_jax._closure.functions import leads_to

from . import trace as _trace
from .compat import is_ref
from .types import Leaf, PyTree

register_exclusion(__file__)


class Use(NamedTuple):
    """A value from outside that code takes."""

    value: Leaf
    line: Any


class _Local(threading.local):
    def __init__(self) -> None:
        # JAX caches operations for each trace that has been; so each is used again.
        self.free: list[Watch] = []
        self.free_to_replace: list[_Replacing] = []
        self.replacing = 0  # how many `replacing` run


_local = _Local()


class _Life(jax.core.Trace):
    """Ends with the run of a function, and with it what `Shown` tracers may be used for."""


class Shown(Tracer):
    """What a function has computed from a weight: it shows its value, and ends with the call."""

    __slots__ = ("value",)

    def __init__(self, life: _Life, value: Leaf) -> None:
        super().__init__(life, jax.typeof(value))
        self.value = value

    def _now(self) -> Leaf:
        if not self._trace.is_valid():
            raise jax.errors.UnexpectedTracerError("a value that a decorated function has left in an object")
        return self.value

    def to_concrete_value(self) -> Any:
        value = self._now()
        return value.to_concrete_value() if isinstance(value, Tracer) else value

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self._now(), *args, **kwargs)

    def __float__(self) -> float:
        return float(self._now())

    def __int__(self) -> int:
        return int(self._now())

    def __complex__(self) -> complex:
        return complex(self._now())

    def __bool__(self) -> bool:
        return bool(self._now())

    def __index__(self) -> int:
        return self._now().__index__()

    def __format__(self, spec: str) -> str:
        return format(self._now(), spec)

    def item(self, *args: Any) -> Any:
        return self._now().item(*args)

    def tolist(self) -> Any:
        return self._now().tolist()

    def __repr__(self) -> str:
        return repr(self.value)


class Watch(jax.core.Trace):
    """The current trace while code runs that is watched."""

    parent_trace: Any = None  # where its operations run
    of: Any = None  # the trace whose tracers stand for values there; None: of none
    outer: "Watch | None" = None

    @classmethod
    @contextlib.contextmanager
    def running(cls, of: Any = None, inputs: Sequence[Leaf] = (), is_plain: bool = False) -> Iterator["Watch"]:
        self = _local.free.pop() if _local.free else cls()
        self.is_plain = is_plain  # nothing is differentiated: calls with a derivative run their bodies
        now = _current_trace(())
        self.outer = now if of is not None and isinstance(now, Watch) else None
        self.of, self.parent_trace = of, now if of is None else of.parent_trace
        self.requires_low = self.parent_trace.requires_low
        self.uses: dict[int, Use] = {}  # in order of first use
        self.seen: dict[int, Leaf] = {}  # all from outside, also where it has no derivative
        self._made = {id(v): v for v in inputs}
        self.of_ref: dict[int, Leaf] = {}  # what depends on what a Ref from outside holds
        self._results: set[int] = set()  # of values that operations made: what was before is none
        self._own = [getattr(self.parent_trace, "recording", self.parent_trace)]
        self._records = of is None
        self.life = _Life() if of is not None and has_values(of.parent_trace) else None
        try:
            with _set_trace(self):
                yield self
        finally:
            if self.life is not None:
                self.life.invalidate()
            self.life = None
            self.of = self.parent_trace = self.outer = None
            self._made, self._own, self.uses, self.seen = {}, [], {}, {}
            self._results, self.of_ref = set(), {}
            _local.free.append(self)

    def is_own(self, v: Leaf) -> bool:
        return isinstance(v, Tracer) and any(v._trace is t for t in self._own)

    def is_outside(self, v: Leaf) -> bool:
        """Return whether code has a value from outside: no input, and nothing that it made."""
        if not isinstance(v, Tracer) or type(v) is Shown:
            return is_ref(v) and id(v) not in self._made
        if self._records:  # all else is of a trace that ends with this one
            return not any(v._trace is t for t in self._own) and id(v) not in self._made
        return id(v) not in self._made

    def bare(self, v: Leaf) -> Leaf:
        """Return what stands for a value one level down."""
        if self.outer is not None:
            v = self.outer.bare(v)
        if type(v) is Shown:
            return v.value
        if self.of is not None and isinstance(v, Tracer) and v._trace is self.of:
            v = self.of.to_primal_tangent_pair(v)[0]
            if not (isinstance(v, jax.Array) or is_ref(v)):  # a Python number
                with _set_trace(self.of.parent_trace):
                    v = jnp.asarray(v)
        return v

    def replaced(self, v: Leaf) -> Leaf:
        """Return what `replacing` puts in the place of a value, if it does."""
        if self.outer is None:
            return _replaced(self.parent_trace, v)
        return v if self.outer.replaced(v) is v else self.bare(v)

    def _opened(self, values: Sequence[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        outside = [v for v in values if self.is_outside(v)]
        for v in outside:
            self.seen.setdefault(id(v), v)
            if self.outer is not None:
                self.outer._opened([v])
        return [self.bare(v) for v in values], outside

    def _count(self, outside: Sequence[Leaf]) -> None:
        for v in outside:
            if id(v) not in self.uses:
                self.uses[id(v)] = Use(v, _here())

    def reads_ref(self, values: Sequence[Leaf]) -> bool:
        """Return whether values depend on what a Ref from outside holds."""
        return any(id(v) in self.of_ref for v in values)

    def returned(self, values: Sequence[Leaf]) -> list[Leaf]:
        """Return what stands for values that the code returns: one may be from outside."""
        bare, outside = self._opened(values)
        self._count(outside)
        return bare

    def _keep(
        self, results: Sequence[Leaf], values: Sequence[Leaf] = (), outside: Sequence[Leaf] = ()
    ) -> None:
        if any(map(is_ref, outside)) or (self.of_ref and any(id(v) in self.of_ref for v in values)):
            self.of_ref |= {id(r): r for r in results}
        for r in results:
            if not isinstance(r, Tracer):
                self._results.add(id(r))
            elif not self._records:
                self._made[id(r)] = r

    def has_made(self, v: Leaf, held: Any) -> bool:
        """Return whether code that holds this has made a value, and did not find it."""
        if isinstance(v, Tracer):
            return not self.is_outside(v)
        if id(v) in self._results:
            return True
        return isinstance(v, (jax.Array, np.ndarray, np.generic)) and not leads_to(held, lambda o: o is v)

    # --- what JAX asks of a trace -----------------------------------------------------------------

    def stage_value(self, val: Leaf) -> Leaf:
        made = self.parent_trace.stage_value(self.bare(val))
        if made is not val and not isinstance(val, Tracer):
            self._keep([made])
        return made

    def process_primitive(self, primitive: Any, values: Any, params: Any, /) -> Any:
        bare, outside = self._opened(values)
        out = self.parent_trace.process_primitive(primitive, bare, params)
        results = out if primitive.multiple_results else [out]
        if outside and results:
            self._count(outside)
        self._keep(results, values, outside)
        if self.life is not None and any(isinstance(v, Tracer) and (type(v) is Shown or self.is_outside(v)) for v in values):
            shown = [Shown(self.life, r) for r in results]
            return shown if primitive.multiple_results else shown[0]
        return out

    def _called(self, name: str, parts: Any, values: Any, params: Any) -> Any:
        bare, outside = self._opened(values)
        self._count(outside)
        results = getattr(self.parent_trace, name)(*parts, bare, **params)
        self._keep(results, values, outside)
        if self.life is not None and any(isinstance(v, Tracer) for v in values):
            return [Shown(self.life, self.bare(r)) for r in results]
        return results

    def _inside(self, f: Any) -> Any:
        """Return a function that JAX runs, maybe at another level, such that it is watched."""

        def run(*args: Leaf) -> Any:
            if self.parent_trace is None:
                return f.call_wrapped(*args)
            before = self.parent_trace, self._own, self._made
            self.parent_trace = _current_trace(())
            self._own = [*self._own, self.parent_trace]
            self._made = dict(self._made)  # what is made there may end there
            self._keep(args)
            try:
                with _set_trace(self):
                    return f.call_wrapped(*args)
            finally:
                self.parent_trace, self._own, self._made = before

        return wrap_init(run, debug_info=f.debug_info)

    def process_custom_jvp_call(
        self, primitive: Any, f: Any, jvp: Any, values: Any, /, **params: Any
    ) -> Any:
        if self.is_plain:
            with _set_trace(self):
                return f.call_wrapped(*values)
        parts = primitive, self._inside(f), self._inside(jvp)
        return self._called("process_custom_jvp_call", parts, values, params)

    def process_custom_vjp_call(
        self, primitive: Any, f: Any, fwd: Any, bwd: Any, values: Any, /, **params: Any
    ) -> Any:
        if self.is_plain:
            with _set_trace(self):
                return f.call_wrapped(*values)
        parts = primitive, self._inside(f), self._inside(fwd), bwd
        return self._called("process_custom_vjp_call", parts, values, params)

    def process_shard_map(self, primitive: Any, f: Any, values: Any, /, **params: Any) -> Any:
        bare, outside = self._opened(values)
        self._count(outside)
        results = self.parent_trace.process_shard_map(primitive, f, bare, **params)
        self._keep(getattr(results, "val", results), values, outside)
        return results


def current_derivative() -> Any:
    """Return the innermost trace if JAX differentiates there, seen through watches; else None."""
    trace = _current_trace(())
    while isinstance(trace, Watch):
        trace = trace.parent_trace
    return trace if hasattr(trace, "to_primal_tangent_pair") else None


def has_values(trace: Any) -> bool:
    """Return whether operations at this trace run at once."""
    while isinstance(trace, Watch):
        trace = trace.parent_trace
    return trace == _trace._IDLE


@contextlib.contextmanager
def revived(of: Any, life: Any = None) -> Iterator[None]:
    """Run a rule in which tracers of a derivative that is over count as running, by their primals."""
    was, of._invalidated = of._invalidated, False
    if life is not None:
        life._invalidated = False
    self = Watch()
    self.of, self.parent_trace, self.outer = of, _current_trace(()), None
    self.requires_low = self.parent_trace.requires_low
    self.is_plain = False
    self.uses, self.seen, self._own, self._records = {}, {}, [], False
    self._made, self.of_ref, self._results, self.life = {}, {}, set(), None
    try:
        with _set_trace(self):
            yield
    finally:
        of._invalidated = was
        if life is not None:
            life.invalidate()


# --- other values for arrays ----------------------------------------------------------------------

# Is told of each operation: what it takes, its parameters, and its results.
Note: TypeAlias = Callable[[Sequence[Leaf], Mapping[str, Any], Sequence[Leaf]], None]


class _Replacing(Watch):
    """The trace under which each operation takes new values for old arrays."""

    is_plain = False
    old: Sequence[Leaf] = ()  # kept alive, so that no other array has the id of one
    new: Mapping[int, Leaf] = types.MappingProxyType({})
    note: Note | None = None

    def bare(self, v: Leaf) -> Leaf:
        return self.new.get(id(v), v)

    replaced = bare

    def _opened(self, values: Sequence[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        return [self.bare(v) for v in values], []

    def _inside(self, f: Any) -> Any:
        return f

    def stage_value(self, val: Leaf) -> Leaf:
        return self.parent_trace.stage_value(self.bare(val))

    def _done(self, values: Any, params: Any, results: Any) -> Any:
        if self.note is not None:
            self.note(values, params, results if isinstance(results, tuple | list) else [results])
        return results

    def process_primitive(self, primitive: Any, values: Any, params: Any, /) -> Any:
        bare, _ = self._opened(values)
        return self._done(
            values, params, self.parent_trace.process_primitive(primitive, bare, params)
        )

    def _called(self, name: str, parts: Any, values: Any, params: Any) -> Any:
        bare, _ = self._opened(values)
        return self._done(values, params, getattr(self.parent_trace, name)(*parts, bare, **params))

    def process_shard_map(self, primitive: Any, f: Any, values: Any, /, **params: Any) -> Any:
        return self._called("process_shard_map", (primitive, f), values, params)


@contextlib.contextmanager
def replacing(old: Sequence[Leaf], new: Sequence[Leaf], note: Note | None = None) -> Iterator[None]:
    """Run code, which may hold arrays anywhere, as if it held others.

    Each operation that takes one of the old arrays, which it knows by identity, takes the new one.
    So do the declared variables of decorated functions: the new ones may be tracers of a derivative
    that is current. What JAX has traced with an old array inside, such as a function under
    `jax.jit`, keeps that. `note` is told of each operation, with the old arrays.
    """
    self = _local.free_to_replace.pop() if _local.free_to_replace else _Replacing()
    self.old, self.new = old, {id(v): w for v, w in zip(old, new, strict=True)}
    self.parent_trace, self.note = _current_trace(()), note
    self.requires_low = self.parent_trace.requires_low
    self.is_plain = has_values(self.parent_trace)  # nothing is differentiated here
    _local.replacing += 1
    try:
        with _set_trace(self), _trace.plainly() if self.is_plain else contextlib.nullcontext():
            yield
    finally:
        _local.replacing -= 1
        self.parent_trace, self.old, self.new, self.note = None, (), {}, None
        _local.free_to_replace.append(self)


def replaced(tree: PyTree) -> PyTree:
    """Return a pytree with the values that `replacing` puts in the place of its arrays."""
    if not _local.replacing:
        return tree
    return jax.tree.map(functools.partial(_replaced, _current_trace(())), tree)


def _replaced(trace: Any, v: Leaf) -> Leaf:
    while trace is not None:
        if isinstance(trace, Watch):
            return trace.replaced(v)
        trace = getattr(trace, "parent_trace", None)
    return v
