"""A call as a function of its operands, with a rule.

The operands are the captured values and then the inputs. If JAX does not differentiate the call, it
runs `Program.value`. If it does, it runs `forward`, which returns the value, and the rule as a
function of residuals (`_autodiff/custom.py` says when).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import register_static, tree_flatten

from tfgrad_jax._autodiff.custom import Forward, HiddenTracerError
from tfgrad_jax._autodiff.rule import Run
from tfgrad_jax._closure.assigned import Watched, refuse_assigned
from tfgrad_jax._closure.skeleton import Skeleton
from tfgrad_jax._closure.traced import Uses, is_being_traced, uses
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._frontend.structure import Layout
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_staging, plainly
from tfgrad_jax._jax.types import Inert, NeedsValuesError, is_traced, spec
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

from .capture import Capture, CapturedIndex, OperandIndex, Values
from .ordinary import with_ordinary_gradients
from .rule import (
    Declared,
    Gradient,
    Leaf,
    Listing,
    Origin,
    Undeclared,
    UserRule,
    Wanted,
    hoisted,
    kept,
    origin,
)
from .transparent import HoldsRefError, Result, evaluated, trace_call


class _NotRecordedError(Exception):
    """The rule cannot be copied."""


# Of the captured values, without and with a rule that accepts undeclared `variables`: which of the
# two it is, is known when `f` has returned its rule.
Origins: TypeAlias = tuple[Sequence[Origin], Sequence[Origin]]


class TypeOfY:
    """The type of `y`. Every run notes it: `primal` and `f` must agree about it."""

    def __init__(self) -> None:
        self.treedef: Any = None
        self._types: Any = None

    def note(self, source: Source, treedef: Any, leaves: Sequence[Leaf]) -> None:
        types = [(leaf.shape, leaf.dtype) for leaf in leaves]
        earlier = self.treedef, self._types
        if self.treedef is not None and earlier != (treedef, types):
            raise errors.primal_mismatch(source, earlier, (treedef, types))
        self.treedef, self._types = treedef, types


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Program(Inert):
    """A call as a function of its operands, with a rule. It holds no operand: jaxprs keep it."""

    source: Source
    inputs: Layout
    skeleton: Skeleton
    origins: Origins
    declared: Declared
    known_uses: Uses | None  # how `y` uses the captured values, if a trace has shown it
    has_primal: bool
    y: TypeOfY

    @classmethod
    def of(cls, call: Call, capture: Capture) -> "Program":
        variables, _ = call.declared
        declared = set(capture.declared)
        without, accepting = (
            [origin(v, call, i in declared, accepts) for i, v in enumerate(capture.values)]
            for accepts in (False, True)
        )
        return cls(
            call.contract.source,
            call.contract.inputs,
            capture.skeleton,
            (without, accepting),
            Declared(capture.declared, variables),
            capture.uses,
            call.primal is not None,
            TypeOfY(),
        )

    @property
    def needs_perturbed(self) -> bool:
        """Whether the rule lists the values that are being differentiated, or raises for one."""
        return any(o in (Origin.UNDECLARED, Origin.MISSING) for o in self.origins[True])

    def names(self) -> list[str]:
        """Return the names of the operands, for JAX's own errors."""
        paths = self.inputs.leaf_paths()
        closed_over = [f"closed over {i}" for i, _ in enumerate(self.origins[True])]
        return [*closed_over, *(paths[i] for i in self.inputs.operands)]

    def value(self, operands: Values) -> list[Leaf]:
        """Return the leaves of `y`, in a call that JAX does not differentiate."""
        captured, inputs = self._parted(operands)
        with plainly():
            copies = self.skeleton.copies(captured)
            apply, primal, *_ = copies.values
            if primal is None:
                leaves, outputs, _ = apply(inputs)
                treedef = outputs.treedef
            else:
                leaves, treedef = tree_flatten(primal(inputs))
                leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
        refuse_assigned(copies.watched, self.source)
        self.y.note(self.source, treedef, leaves)
        return leaves

    def forward(self, operands: Values, perturbed: Wanted) -> Forward:
        """Return the leaves of `y` and the rule, in a call that JAX differentiates."""
        ordinary = [i for i, o in enumerate(self.origins[True]) if o is Origin.AUTODIFF]
        if ordinary:
            return with_ordinary_gradients(self._forward, ordinary, operands, perturbed)
        return self._forward(operands, perturbed)

    def _forward(self, operands: Values, perturbed: Wanted) -> Forward:
        """Run `f` once, around the current values.

        The rule that it returns may run later, at other values or under another trace, so it
        becomes a function of its residuals.
        """
        known_uses, captured = self.known_uses, self._parted(operands)[0]
        recorded = self._recorded(operands) if known_uses is None else None
        if recorded is not None:
            (leaves, outputs, grad_fn), watched, known_uses = recorded
        else:
            if known_uses is None and self._must_know_uses(perturbed):
                # Before `f` runs: what it leaves outside of the call comes from this last run.
                known_uses = self._uses(operands)
            (leaves, outputs, grad_fn), watched = self._run(operands)
        listing = self._listing(grad_fn.accepts_variables, operands, known_uses)
        listed = [captured[i] for i in listing.gives]
        watched = [*watched, *grad_fn.watched]
        rule = UserRule(grad_fn, self.source, listing, len(captured), listed, watched)
        if is_traced((*operands, *leaves)):
            try:
                run, residuals = hoisted(rule, outputs.cotangents(leaves), perturbed)
            except NeedsValuesError:  # it finds them one level down, where it runs
                run, residuals = kept(rule)
        else:
            run, residuals = kept(rule)
        run = self._refusing(run, grad_fn.accepts_variables, operands, known_uses, perturbed)
        self.y.note(self.source, outputs.treedef, leaves)
        if is_traced(leaves) and not is_traced(operands):
            self._look_for_tracers(operands)
        return Forward(leaves, outputs.differentiable, run, residuals)

    def _run(self, operands: Values) -> tuple[Result, Sequence[Watched]]:
        """Run a copy of `f`; return its result, and what its rule may not assign to."""
        captured, inputs = self._parted(operands)
        copies = self.skeleton.copies(captured)
        result = copies.values[0](inputs)
        refuse_assigned(copies.watched, self.source)
        return result, copies.watched

    def _recorded(self, operands: Values) -> tuple[Result, Sequence[Watched], Uses] | None:
        """Do the same in a trace, which also shows how `y` uses captured values.

        Only for undeclared variables: otherwise `f` would run once more to find them. And where JAX
        records the operations in any case. None if the rule cannot be copied, or holds a Ref.
        """
        if Origin.UNDECLARED not in self.origins[True] or any(map(is_ref, operands)):
            return None
        if not (is_staging() and is_traced(operands)) or is_being_traced(self.source):
            return None
        captured, inputs = self._parted(operands)

        def run(captured: Values, inputs: Values) -> tuple[Result, Sequence[Watched]]:
            return self._run([*captured, *inputs])

        def copyable(result: Result) -> Any:
            raise _NotRecordedError

        try:
            f = trace_call(run, captured, inputs, (self.source, self.inputs), copyable)
        except (_NotRecordedError, HoldsRefError, *NeedsValuesError):
            return None
        if is_traced(f.consts):
            raise HiddenTracerError
        result = evaluated(f.run, f.aside, f.consts, captured, f.aside.refs, inputs)
        every = f.uses(f.aside.outputs.count).items()
        first, count = len(f.consts), len(captured)
        uses = {i - first: at for i, at in every if 0 <= i - first < count}
        return result, (), uses

    def _must_know_uses(self, perturbed: Wanted) -> bool:
        of_perturbed = [self.origins[True][i] for i in perturbed if i < len(self.origins[True])]
        return Origin.UNDECLARED in of_perturbed or Origin.MISSING in of_perturbed

    def _listing(self, accepts: bool, operands: Values, known_uses: Uses | None) -> Listing:
        """Return which captured values a rule gives gradients for."""
        origins = self.origins[accepts]
        if Origin.UNDECLARED not in origins:
            return self.declared
        every = self._uses(operands) if known_uses is None else known_uses
        gives = [i for i in every if origins[i] is Origin.UNDECLARED]
        return Undeclared(gives, [spec(operands[i]) for i in gives])

    def _refusing(
        self,
        run: Run,
        accepts: bool,
        operands: Values,
        known_uses: Uses | None,
        perturbed: Wanted,
    ) -> Run:
        """Return the same rule; it raises where a captured value has no gradient and needs one.

        That is so if the value is being differentiated, and `y` uses it. Raise now, too.
        """
        missing = {i for i, o in enumerate(self.origins[accepts]) if o is Origin.MISSING}
        if not missing:
            return run
        types = [jax.typeof(o) for o in operands]  # not the operands, which the rule may outlive

        def refuse(wanted: Iterable[OperandIndex]) -> None:
            if found := missing.intersection(wanted):
                self._refuse(found, types, known_uses)

        def checked(residuals: Values, cotangents: Values, wanted: Wanted) -> list[Gradient]:
            refuse(wanted)
            return run(residuals, cotangents, wanted)

        refuse(perturbed)
        return checked

    def _refuse(
        self, missing: Iterable[CapturedIndex], types: Sequence[Any], known_uses: Uses | None
    ) -> None:
        every = self._uses(types) if known_uses is None else known_uses
        uses = {i: at for i, at in every.items() if i in missing}
        if uses and all(hasattr(types[i], "inner_aval") for i in uses):
            raise errors.captured_ref(self.source)
        if uses:
            lines = [(spec(types[i]), self.source.line(at)) for i, at in uses.items()]
            declared = self.declared.variables is not None
            raise errors.no_gradient_for_captured(self.source, lines, declared)

    def _uses(self, operands: Values) -> Uses:
        """Return how `y` uses captured values, by a trace of `f` on the operands or their types."""
        if self.skeleton.snapshot.has_iterator:
            raise errors.runs_twice(self.source)
        return uses(self._leaves, *self._parted(operands))

    def _leaves(self, captured: Values, inputs: Values) -> list[Leaf]:
        """Return the leaves of `y`, as `f` computes it, on copies that nobody sees."""
        with plainly():
            apply = self.skeleton.copies(captured, apart=True).values[0]
            return apply(inputs)[0]

    def _look_for_tracers(self, operands: Values) -> None:
        """Raise if `f` holds a tracer that the walk did not see; a trace of `f` shows it.

        The results of `f` are tracers, and no operand is. A `jit` or a `vmap` around the call may
        also make tracers of constants.
        """
        closed = jax.make_jaxpr(lambda: self._leaves(*self._parted(operands)))()
        if is_traced(closed.consts):
            raise HiddenTracerError

    def _parted(self, operands: Values) -> tuple[Values, Values]:
        """Return the captured values and the inputs."""
        count = len(self.origins[True])
        return operands[:count], operands[count:]
