"""Run code as it is, under a trace of ours that sees each of its operations.

A `Watch` is the current trace while `f`, or its rule, runs. What it does depends on who starts it:

    watching     `f`, where JAX differentiates it: it runs one level down, on primals
    recording    code that JAX traces because we ask for it
    reviving     a rule that runs eagerly, after the derivative of its function is over
    replacing    code in which some arrays are others

All note, as TensorFlow's tape does, which tracers an operation takes from outside. Where JAX
differentiates the code (`of` is its trace), the value inside such a tracer takes its place. So the
code runs on the user's own objects, and nothing need be copied around other values.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.errors import UnexpectedTracerError
from jax.extend.core import find_top_trace as _current_trace
from jax.extend.linear_util import wrap_init

from .compat import is_ref, primal, trace_of
from .shown import Mask, Run, Shown, Trace, has_derivative
from .trace import Transparent, at, below, local
from .types import AnyFunction, Leaf, Values

# Is told of each operation: what it takes, its parameters, and its results.
Note: TypeAlias = Callable[[Values, Mapping[str, Any], Values], None]


class Watch(Transparent):
    """The current trace while code runs that is watched."""

    level: Trace = None  # where those of `f` itself run; of functions inside, at `parent_trace`
    above: Trace = None  # where those on values alone run; None: there, too
    # The derivatives whose tracers it opens, from that of the outermost call on; not the one at
    # which operations run.
    ofs: tuple[Trace, ...] = ()
    outer: "Watch | None" = None  # in a call of another function: the watch of that one
    run: Run
    _made: dict[int, Leaf]  # what operations make of nothing, and arguments of inner functions
    _own: tuple[Trace, ...] = ()  # traces whose tracers are not from outside
    _touched: Mask = 0  # what operations have taken since this was set to 0
    # By identity: what operations take instead, and of that what `replacing` put there.
    instead: Mapping[int, Leaf] = types.MappingProxyType({})
    replaced: Mapping[int, Leaf] = instead
    note: "Note | None" = None

    @classmethod
    def now(cls) -> "Watch | None":
        """Return the watch under which code runs, if it is the current trace."""
        trace = _current_trace(())
        return trace if isinstance(trace, cls) else None

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
        aliases: Mapping[int, Leaf] | None = None,
        replaced: Mapping[int, Leaf] | None = None,
        note: "Note | None" = None,
    ) -> Iterator["Watch"]:
        """Run code under a watch, one that no other code uses now."""
        self = local.free.pop() if local.free else cls()
        self.parent_trace = self.level = parent
        self.run, self.above = run, above
        self.ofs, self.outer, self.note = ofs, outer, note
        self.replaced = replaced or (outer.replaced if outer else {})
        self.instead = {**self.replaced, **aliases} if aliases else self.replaced
        self.requires_low = parent.requires_low
        self._made, self._own, self._touched = {}, own, 0
        local.watches.append(self)
        try:
            with at(self):
                yield self
        finally:
            local.watches.remove(self)
            vars(self).clear()  # and hold nothing
            local.free.append(self)

    # --- values -------------------------------------------------------------------------------

    def shown(self, inputs: Values) -> list[Leaf]:
        """Return the inputs of the code such that what it computes from them is known."""
        every = enumerate(inputs)
        return [v if is_ref(v) else Shown(self.run, v, 1 << i, jax.typeof(v)) for i, v in every]

    def lower(self, v: Leaf) -> Leaf:
        """Return what stands for a value where the operations run."""
        v = self.instead.get(id(v), v)
        for of in self.ofs:
            if type(v) is Shown and v.run.of is of:
                v = v.value
            # Not if `f` runs at this derivative, with "autodiff". What a `custom_jvp` inside closes
            # over must stay an error further down: opened, its gradient was 0.
            if isinstance(v, Tracer) and of is not self.level:
                v = self._primal(v, of)
        return v

    def _primal(self, w: Leaf, of: Trace) -> Leaf:
        v = primal(w, of)
        if isinstance(v, (Tracer, jax.Array)) or is_ref(v):
            return v
        numbers = self.run.numbers  # of Python: one array for each
        if id(w) not in numbers:
            with below(of):
                numbers[id(w)] = w, jnp.asarray(v)
        return numbers[id(w)][1]

    def is_outside(self, v: Leaf) -> bool:
        """Return whether code has a value from outside: no input, and nothing that it made."""
        if id(v) in self._made:
            return False
        if not isinstance(v, Tracer):
            return is_ref(v)
        return trace_of(v) is not self.run and not any(trace_of(v) is t for t in self._own)

    def take(self, v: Leaf) -> Mask:
        """Note a value that the code has; return what it depends on."""
        if type(v) is Shown and v.run is self.run:
            return v.mask
        if not self.is_outside(v):
            return 0
        if type(v) is Shown and v.run.of is self.run.of and not v.run.is_on():
            mask = 0  # a call under the same derivative has left it: it depends on what that took
            for source in v.run.of_mask(v.mask):
                mask |= self.take(source)
            return mask
        return self.run.bit(v)

    def returned(self, values: Values) -> list[Leaf]:
        """Return what stands for values that the code returns: one may be from outside."""
        bare, mask = self._opened(values)
        self.run.use(mask, moves=True)
        return bare

    def marked(self, results: Any, mask: Mask) -> Any:
        """Return results of an operation such that what they depend on is known."""
        run, marked = self.run, []
        for r in results:
            if mask and run.of is not None and has_derivative(aval := jax.typeof(r)):
                r = Shown(run, r, mask, aval)
            elif isinstance(r, Tracer):
                self._made[id(r)] = r
            marked.append(r)
        return marked

    def handed_on(self, taken: Values, results: Values) -> Values:
        """Note what a call of another function took, and return what it returned, marked."""
        _, mask = self._opened(taken)
        self.run.use(mask, moves=True)
        return self.marked(results, mask)

    def _opened(self, values: Values) -> tuple[list[Leaf], Mask]:
        bare, mask, run = [], 0, self.run
        for v in values:
            if type(v) is Shown and v.run is run:  # as is almost every operand
                mask |= v.mask
                v = v.value
            else:
                v = self.instead.get(id(v), v)
                if isinstance(v, Tracer) or is_ref(v):
                    mask |= self.take(v)
                    v = self.lower(v)
            bare.append(v)
        self._touched |= mask
        return bare, mask

    # --- what JAX asks of a trace -------------------------------------------------------------

    def _level(self, values: Values, stays: bool = False) -> Trace:
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
        if self.note is not None:
            self.note(values, params, results)
        marked = self.marked(results, mask)
        return marked if primitive.multiple_results else marked[0]

    def process_custom_jvp_call(
        self, primitive: Any, f: Any, jvp: Any, values: Any, /, **params: Any
    ) -> Any:
        parts = primitive, self._inside(f), self._inside(jvp)
        return self._called("process_custom_jvp_call", parts, values, params)

    def process_custom_vjp_call(
        self, primitive: Any, f: Any, fwd: Any, bwd: Any, values: Any, /, **params: Any
    ) -> Any:
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
        if self.note is not None:
            self.note(values, params, list(results))
        if hasattr(results, "map"):  # a shard_map of JAX 0.12 returns more than a list
            return results.map(lambda r: self.marked([r], mask)[0])
        return self.marked(results, mask)

    def _inside(self, f: Any) -> Any:
        """Return a function that JAX runs, maybe at another level, such that it is watched."""
        key = self.run.key

        def run(*args: Leaf) -> Any:
            # JAX may keep it, and run it later, in any thread: then another run may be on.
            is_on = any(watch is self and watch.run.key is key for watch in local.watches)
            if not is_on:
                return call(*args)
            before = self.parent_trace, self.above, self._own, self._made, self.instead
            # Not the aliases: further down, a value is the one inside of several weights.
            self.instead = self.replaced
            self.parent_trace, self.above = _current_trace(()), None
            if self.parent_trace is not before[0]:
                self._own = (*self._own, self.parent_trace)
            tracers = {id(v): v for v in args if isinstance(v, Tracer)}
            self._made = {**self._made, **tracers}  # and what is made there may end there
            try:
                with at(self):
                    results = call(*args)
                    if hasattr(results, "map"):
                        return results.map(self.lower)
                    return list(map(self.lower, results))
            finally:
                self.parent_trace, self.above, self._own, self._made, self.instead = before

        call: AnyFunction = getattr(f, "call_wrapped", f)
        return wrap_init(run, debug_info=f.debug_info) if hasattr(f, "call_wrapped") else run
