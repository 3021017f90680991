"""Run code as it is, under a trace of ours that sees each of its operations.

A `Watch` is the current trace while `f`, or its rule, runs. What it does depends on who starts it:

    watching     `f`, where JAX differentiates it: it runs one level down, on primals
    recording    code that JAX traces because we ask for it
    reviving     a rule that runs eagerly, after the derivative of its function is over
    evaluating   code of which nobody wants a derivative
    replacing    code in which some arrays are others

All note, as TensorFlow's tape does, which tracers an operation takes from outside. Where JAX
differentiates the code (`of` is its trace), the value inside such a tracer takes its place. So the
code runs on the user's own objects, and nothing need be copied around other values.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.errors import UnexpectedTracerError
from jax.extend.core import find_top_trace as _current_trace
from jax.extend.core import set_current_trace as _set_trace
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import current as _here
from jax.extend.source_info_util import register_exclusion

from . import trace as _trace
from .compat import is_ref
from .trace import Transparent, concrete, is_of, is_staging, plainly, revived
from .types import AnyFunction, Leaf, is_differentiable

# Where JAX names the line that led to an operation, it is no line of this module.
register_exclusion(__file__)

Trace: TypeAlias = Any  # one of JAX's; a type checker does not know them
Mask: TypeAlias = int  # a set of what a run takes: bit `i` stands for `taken[i]`


class Use(NamedTuple):
    """A value from outside that an operation takes, and where the first one does."""

    value: Leaf
    line: object  # as JAX records it


class _Local(threading.local):
    def __init__(self) -> None:  # runs once in each thread
        # JAX's cache of compiled functions keeps an entry for each operation on values under each
        # trace that has been, and searches through them: after 6,000 traces an operation
        # took 1.2 ms instead of 0.04. So each trace is used again. Remove when JAX mends that.
        self.free: list[Watch] = []
        self.running: list[Watch] = []


_local = _Local()


class Run(jax.core.Trace):
    """What one run of a function takes. It is also the trace of what the run shows.

    The values that a run computes may be left in an object of the user's. JAX asks whether the
    trace of an operand is still valid: it is, in every run under the same derivative.
    """

    def __init__(self, of: Trace, inputs: Sequence[Leaf], left: Callable[[], Exception]) -> None:
        super().__init__()
        self.of = of
        self.taken: list[Leaf] = list(inputs)
        self.inputs = len(self.taken)
        self.uses: list[Use] = []  # in their order
        self.numbers: dict[int, tuple[Leaf, Leaf]] = {}  # tracers, and arrays for what is inside
        self.returned: Mask | None = None  # what results depend on; None: it is not known
        self._used: Mask = 0
        self._moving: Mask = 0  # what an operation takes whose result has a derivative
        self._bits: dict[int, Mask] = {}
        self._left = left

    def is_valid(self) -> bool:
        """Return True, or raise an error that names the function which has left a value behind."""
        if not self.is_known():
            raise self._left()
        return True

    def is_known(self) -> bool:
        """Return whether a run under the same derivative is on, in this thread."""
        return any(self.of is of for watch in _local.running for of in watch.ofs)

    def is_outside(self, v: Leaf) -> bool:
        """Return whether a value is none of this run."""
        return not (isinstance(v, Tracer) and v._trace is self)

    def is_on(self) -> bool:
        return any(watch.run is self for watch in _local.running)

    def bit(self, v: Leaf) -> Mask:
        """Return the bit of a value from outside."""
        if id(v) not in self._bits:
            self._bits[id(v)] = 1 << len(self.taken)
            self.taken.append(v)
        return self._bits[id(v)]

    def of_mask(self, mask: Mask) -> list[Leaf]:
        return [v for i, v in enumerate(self.taken) if mask >> i & 1]

    def use(self, mask: Mask, results: Sequence[Leaf] = (), moves: bool = False) -> None:
        """Note that an operation with results takes some values, or that the code returns them."""
        new = (mask & ~self._used) >> self.inputs << self.inputs
        if new:
            line = _here()
            self.uses += [Use(v, line) for v in self.of_mask(new)]
            self._used |= new
        if mask & ~self._moving and (moves or any(map(_has_derivative, results))):
            self._moving |= mask

    def may_return(self, v: Leaf) -> bool:
        """Return whether what the code returns may depend on a value from outside."""
        return self.returned is None or bool(self._bits[id(v)] & self.returned)

    def is_compared(self, v: Leaf) -> bool:
        """Return whether operations without a derivative alone take a value from outside."""
        return not self._bits[id(v)] & self._moving


class Shown(Tracer):
    """What a run has computed from what it takes. It shows its value to Python.

    A plain value would do, but for what is left in an object: a `cached_property` that `f` fills
    was a constant for the loss that read it later, and its gradient was lost without an error.
    """

    __slots__ = ("mask", "value")

    def __init__(self, run: Run, value: Leaf, mask: Mask) -> None:
        super().__init__(run, jax.typeof(value))
        self.value, self.mask = value, mask

    def _now(self) -> Any:
        self._trace.is_valid()
        return concrete(self.value)

    def to_concrete_value(self) -> Any:
        value = self._now()
        return None if isinstance(value, Tracer) else value

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

    def item(self, *args: int) -> Any:
        return self._now().item(*args)

    def tolist(self) -> Any:
        return self._now().tolist()

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__


def _has_derivative(v: Leaf) -> bool:
    return not is_ref(v) and is_differentiable(v.dtype)


def is_live(v: object) -> bool:
    """Return whether a value must be an operand: a tracer whose trace runs, or a Ref."""
    if not isinstance(v, Tracer):
        return is_ref(v)
    if type(v) is Shown:
        return v._trace.is_known()
    # Which derivatives enclose this one, the current trace does not always tell.
    return v._trace.is_valid() and (
        hasattr(v._trace, "to_primal_tangent_pair") or _trace.is_live(v)
    )


class Watch(Transparent):
    """The current trace while code runs that is watched."""

    above: Trace = None  # where those on values alone run; None: there, too
    # The derivatives whose tracers it opens, from that of the outermost call on; not the one at
    # which operations run.
    ofs: tuple[Trace, ...] = ()
    outer: "Watch | None" = None  # in a call of another function: the watch of that one
    run: Run
    is_plain = False
    instead: Mapping[int, Leaf] = {}

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        parent: Trace,
        run: Run,
        *,
        ofs: tuple[Trace, ...] = (),
        outer: "Watch | None" = None,
        above: Trace = None,
        own: tuple[Trace, ...] = (),
        is_plain: bool = False,
        instead: Mapping[int, Leaf] | None = None,
    ) -> Iterator["Watch"]:
        """Run code under a watch, one that no other code uses now."""
        self = _local.free.pop() if _local.free else cls()
        self.parent_trace, self.run, self.above = parent, run, above
        self.ofs, self.outer = ofs, outer
        self.is_plain, self.instead = is_plain, instead or {}
        self.requires_low = parent.requires_low
        # What operations make of nothing, and the arguments of inner functions: not from outside.
        self._made: dict[int, Leaf] = {}
        self._own = own  # traces whose tracers are not from outside
        self._touched: Mask = 0  # what operations have taken since this was set to 0
        _local.running.append(self)
        try:
            with _set_trace(self):
                yield self
        finally:
            _local.running.remove(self)
            self.parent_trace = self.above = self.outer = None
            self.ofs, self._made, self._own, self.instead = (), {}, (), {}
            del self.run
            _local.free.append(self)

    # --- values -------------------------------------------------------------------------------

    def shown(self, inputs: Sequence[Leaf]) -> list[Leaf]:
        """Return the inputs of the code such that what it computes from them is known."""
        return [v if is_ref(v) else Shown(self.run, v, 1 << i) for i, v in enumerate(inputs)]

    def lower(self, v: Leaf) -> Leaf:
        """Return what stands for a value where the operations run."""
        v = self.instead.get(id(v), v)
        for of in self.ofs:
            if type(v) is Shown and v._trace.of is of:
                v = v.value
            if isinstance(v, Tracer) and of is not self.parent_trace and is_of(v, of):
                v = self._primal(v, of)
        return v

    def _primal(self, w: Leaf, of: Trace) -> Leaf:
        v = of.to_primal_tangent_pair(w)[0]
        if isinstance(v, jax.Array) or is_ref(v):
            return v
        numbers = self.run.numbers  # of Python: one array for each
        if id(w) not in numbers:
            with _set_trace(of.parent_trace):
                numbers[id(w)] = w, jnp.asarray(v)
        return numbers[id(w)][1]

    def is_outside(self, v: Leaf) -> bool:
        """Return whether code has a value from outside: no input, and nothing that it made."""
        if id(v) in self._made:
            return False
        if not isinstance(v, Tracer):
            return is_ref(v)
        return v._trace is not self.run and not any(v._trace is t for t in self._own)

    def take(self, v: Leaf) -> Mask:
        """Note a value that the code has; return what it depends on."""
        if type(v) is Shown and v._trace is self.run:
            return v.mask
        if not self.is_outside(v):
            return 0
        if type(v) is Shown and v._trace.of is self.run.of and not v._trace.is_on():
            mask = 0  # a call under the same derivative has left it: it depends on what that took
            for source in v._trace.of_mask(v.mask):
                mask |= self.take(source)
            return mask
        return self.run.bit(v)

    def returned(self, values: Sequence[Leaf]) -> list[Leaf]:
        """Return what stands for values that the code returns: one may be from outside."""
        bare, mask = self._opened(values)
        self.run.use(mask, moves=True)
        if self.ofs:
            self.run.returned = mask
        return bare

    def marked(self, results: Any, mask: Mask) -> Any:
        """Return results of an operation such that what they depend on is known."""
        if self.is_plain:
            return results
        marks, marked = self.run.of is not None and mask, []
        for r in results:
            if marks and _has_derivative(r):
                r = Shown(self.run, r, mask)
            elif isinstance(r, Tracer):
                self._made[id(r)] = r
            marked.append(r)
        return marked

    def handed_on(self, taken: Sequence[Leaf], results: Sequence[Leaf]) -> Sequence[Leaf]:
        """Note what a call of another function took, and return what it returned, marked."""
        _, mask = self._opened(taken)
        self.run.use(mask, moves=True)
        return self.marked(results, mask)

    def _opened(self, values: Sequence[Leaf]) -> tuple[Sequence[Leaf], Mask]:
        if self.is_plain:
            return values, 0
        bare, mask = list[Leaf](), 0
        for v in values:
            v = self.instead.get(id(v), v)
            if isinstance(v, Tracer) or is_ref(v):
                mask |= self.take(v)
                v = self.lower(v)
            bare.append(v)
        self._touched |= mask
        return bare, mask

    # --- what JAX asks of a trace -------------------------------------------------------------

    def _level(self, values: Sequence[Leaf], stays: bool = False) -> Trace:
        """Return where an operation on these values runs.

        In a trace that we have started, operations on values run at once, at the level outside. So
        the code sees values, and a cache of constants that it fills holds values. JAX's
        `ensure_compile_time_eval` would do, but for Refs: it reads one at once whose write it has
        only recorded. The gradient of a Ref that `f` had made was 0.
        """
        if self.above is None or stays or any(isinstance(v, Tracer) or is_ref(v) for v in values):
            return self.parent_trace
        return self.above

    def stage_value(self, val: Leaf) -> Leaf:
        (bare,), mask = self._opened([val])
        return self.marked([self._level([bare]).stage_value(bare)], mask)[0]

    def process_primitive(self, primitive: Any, values: Any, params: Any, /) -> Any:
        bare, mask = self._opened(values)
        # Effects in order, and the making of a Ref, belong to what is recorded beside them.
        stays = primitive.name == "new_ref" or params.get("ordered", False)
        out = self._level(bare, stays).process_primitive(primitive, bare, params)
        results = out if primitive.multiple_results else [out]
        if mask and results:  # a print has no result
            self.run.use(mask, results)
        marked = self.marked(results, mask)
        return marked if primitive.multiple_results else marked[0]

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
        return self._called("process_shard_map", (primitive, self._inside(f)), values, params)

    def _called(self, name: str, parts: Any, values: Any, params: Any) -> Any:
        bare, mask = self._opened(values)
        before, self._touched = self._touched, 0
        level = self._level(bare)
        try:
            results = getattr(level, name)(*parts, bare, **params)
        except UnexpectedTracerError:  # the function holds a tracer of what is recorded
            if level is self.parent_trace:
                raise
            results = getattr(self.parent_trace, name)(*parts, bare, **params)
        mask |= self._touched
        self._touched = before | mask
        self.run.use(mask, moves=True)
        if hasattr(results, "map"):  # a shard_map of JAX 0.12 returns more than a list
            return results.map(lambda r: self.marked([r], mask)[0])
        return self.marked(results, mask)

    def _inside(self, f: Any) -> Any:
        """Return a function that JAX runs, maybe at another level, such that it is watched."""
        of_run = self.run

        def run(*args: Leaf) -> Any:
            # JAX may keep it, and run it later, in any thread: then another run may be on.
            if getattr(self, "run", None) is not of_run or self not in _local.running:
                return call(*args)
            before = self.parent_trace, self.above, self._own, self._made
            self.parent_trace, self.above = _current_trace(()), None
            if self.parent_trace is not before[0]:
                self._own = (*self._own, self.parent_trace)
            tracers = {id(v): v for v in args if isinstance(v, Tracer)}
            self._made = {**self._made, **tracers}  # and what is made there may end there
            try:
                with _set_trace(self):
                    results = call(*args)
                    if hasattr(results, "map"):
                        return results.map(self.lower)
                    return list(map(self.lower, results))
            finally:
                self.parent_trace, self.above, self._own, self._made = before

        call: AnyFunction = getattr(f, "call_wrapped", f)
        return wrap_init(run, debug_info=f.debug_info) if hasattr(f, "call_wrapped") else run


def _none_left() -> Exception:
    return AssertionError("a run that shows nothing")


def recording() -> AnyFunction:
    """Return what makes the context for code in a trace that is started next.

    There, operations on values run at once, unless JAX records all operations now, so that there
    are no values.
    """
    outside = _current_trace(())
    above = outside.above if isinstance(outside, Watch) else None
    if above is None and not is_staging():
        above = outside

    def context() -> contextlib.AbstractContextManager[Watch]:
        now = _current_trace(())
        return Watch.running(now, Run(None, (), _none_left), above=above, own=(now,))

    return context


def evaluating() -> contextlib.AbstractContextManager[Watch]:
    """Return a context for code of which nobody wants a derivative.

    Functions with a derivative of their own run their bodies. Without it, JAX would stage nested
    calls again at each level.
    """
    return Watch.running(_current_trace(()), Run(None, (), _none_left), is_plain=True)


def replacing(values: Mapping[int, Leaf]) -> contextlib.AbstractContextManager[Watch]:
    """Return a context in which operations take others instead of some values, by identity.

    Whoever calls it keeps the values alive.
    """
    return Watch.running(_current_trace(()), Run(None, (), _none_left), instead=values)


@contextlib.contextmanager
def reviving(ofs: tuple[Trace, ...]) -> Iterator[Watch]:
    """Run a rule in which tracers of derivatives that are over count as running.

    Its value is computed: what it calls needs no rules of its own.
    """
    run = Run(ofs[-1], (), _none_left)
    with contextlib.ExitStack() as stack:
        for of in ofs:
            stack.enter_context(revived(of))
        watch = stack.enter_context(Watch.running(_current_trace(()), run, ofs=ofs))
        stack.enter_context(plainly())
        yield watch
