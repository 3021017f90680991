"""A call as a function of its operands, with a rule.

The operands are the captured values and then the inputs. If JAX does not differentiate the call, it
runs `Program.value`. If it does, it runs `forward`, which returns the value, and the rule as a
function of residuals (`_autodiff/custom.py` says when).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef, register_static, tree_flatten

from tfgrad_jax._autodiff.function import Forward
from tfgrad_jax._autodiff.rule import Run
from tfgrad_jax._closure.assigned import Watched, refuse_assigned
from tfgrad_jax._closure.skeleton import Skeleton
from tfgrad_jax._closure.traced import Uses, is_being_traced, uses
from tfgrad_jax._frontend.grad_fn import Apply, CallSpec, Primal, Result
from tfgrad_jax._frontend.structure import Outputs
from tfgrad_jax._jax.compat import is_ref, is_ref_type
from tfgrad_jax._jax.trace import is_staging, plainly
from tfgrad_jax._jax.types import NEEDS_VALUES, Aval, Inert, Leaf, OperandIndex, is_traced, spec
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.runs import note_another_run
from tfgrad_jax._messages.source import Source

from .capture import Capture, CapturedIndex, Values
from .ordinary import with_ordinary_gradients
from .rule import (
    Declared,
    Gradient,
    Listing,
    Origin,
    Undeclared,
    UserRule,
    Wanted,
    hoisted,
    kept,
    origin,
)
from .transparent import HoldsRefError, RuleNotCopiedError, evaluated, trace_call


class _Ran(NamedTuple):
    """What one run of `f` has given."""

    result: Result
    watched: Sequence[Watched]  # what its rule may not assign to
    uses: Uses | None  # how `y` uses captured values, if that had to be known


class Origins(NamedTuple):
    """Where the gradients of captured values come from: two lists, until `f` returns its rule."""

    without: Sequence[Origin]  # if it does not accept undeclared `variables`
    accepting: Sequence[Origin]  # if it does: only here are some UNDECLARED

    def with_rule(self, accepts_variables: bool) -> Sequence[Origin]:
        return self.accepting if accepts_variables else self.without


_BY_USE = (Origin.UNDECLARED, Origin.MISSING)  # these need to know what `y` uses


class TypeOfY:
    """The type of `y`. Every run notes it: `primal` and `f` must agree about it."""

    def __init__(self) -> None:
        self.treedef: PyTreeDef | None = None
        self._types: Sequence[object] = ()

    def note(self, source: Source, treedef: PyTreeDef, leaves: Sequence[Leaf]) -> None:
        types = [(leaf.shape, leaf.dtype) for leaf in leaves]
        earlier = self.treedef, self._types
        if self.treedef is not None and earlier != (treedef, types):
            raise errors.primal_mismatch(source, earlier, (treedef, types))
        self.treedef, self._types = treedef, types


@register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Program(Inert):
    """A call as a function of its operands, with a rule. It holds no operand: jaxprs keep it."""

    spec: CallSpec
    apply: Apply
    primal: Primal | None
    held: Skeleton  # copies `Call.held`
    origins: Origins
    ordinary: Sequence[CapturedIndex]  # those that get the ordinary gradient of `f`
    declared: Declared
    known_uses: Uses | None  # how `y` uses the captured values, if a trace has shown it
    y: TypeOfY

    @classmethod
    def of(cls, capture: Capture) -> "Program":
        call, declared = capture.call, set(capture.declared)
        variables, _ = call.declared
        without, accepting = (
            [origin(v, call, i in declared, accepts) for i, v in enumerate(capture.values)]
            for accepts in (False, True)
        )
        return cls(
            call.spec,
            call.apply,
            call.primal,
            capture.skeleton,
            Origins(without, accepting),
            [i for i, o in enumerate(without) if o is Origin.AUTODIFF],
            Declared(capture.declared, variables),
            capture.uses,
            TypeOfY(),
        )

    @property
    def source(self) -> Source:
        return self.spec.source

    @property
    def has_primal(self) -> bool:
        return self.primal is not None

    @property
    def needs_perturbed(self) -> bool:
        """Whether the rule lists the values that are being differentiated, or raises for one."""
        return any(o in _BY_USE for o in self.origins.accepting)

    def names(self) -> list[str]:
        """Return the names of the operands, for JAX's own errors."""
        inputs = self.spec.inputs
        paths = inputs.leaf_paths()
        closed_over = [f"closed over {i}" for i, _ in enumerate(self.origins.accepting)]
        return [*closed_over, *(paths[i] for i in inputs.operands)]

    def value(self, operands: Values) -> list[Leaf]:
        """Return the leaves of `y`, in a call that JAX does not differentiate."""
        captured, inputs = self._parted(operands)
        with plainly():
            copies = self.held.copies(captured)
            if self.primal is None:
                leaves, outputs, _ = self.apply(copies.values, inputs)
                treedef = outputs.treedef
            else:
                leaves, treedef = tree_flatten(self.primal(copies.values, inputs))
                leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
        refuse_assigned(copies.watched, self.source)
        self.y.note(self.source, treedef, leaves)
        return leaves

    def forward(self, operands: Values, perturbed: Wanted) -> Forward:
        """Return the leaves of `y` and the rule, in a call that JAX differentiates.

        `f` runs once, around the current values. The rule that it returns may run later, at other
        values or under another trace, so it becomes a function of its residuals.
        """
        if self.ordinary:
            by_rule = dataclasses.replace(self, ordinary=())
            return with_ordinary_gradients(by_rule.forward, self.ordinary, operands, perturbed)
        ran = self._recorded(operands)
        if ran is None:
            ran = self._ran(operands, self._uses_needed(operands, perturbed))
        (leaves, outputs, grad_fn), watched, known_uses = ran
        captured, _ = self._parted(operands)
        listing = self._listing(grad_fn.accepts_variables, operands, known_uses)
        values = [captured[i] for i in listing.gives]
        rule = UserRule(grad_fn, self.source, listing, len(captured), values, watched)
        run, residuals = self._as_residuals(rule, leaves, outputs, operands, perturbed)
        run = self._refusing(run, grad_fn.accepts_variables, operands, known_uses, perturbed)
        self.y.note(self.source, outputs.treedef, leaves)
        if is_traced(leaves) and not is_traced(operands):
            self._look_for_tracers(operands)
        return Forward(leaves, outputs.differentiable, run, residuals)

    def _uses_needed(self, operands: Values, perturbed: Wanted) -> Uses | None:
        """Return how `y` uses captured values, if the rule may list or refuse them.

        It lists, or refuses, only those that are being differentiated.
        """
        origins = self.origins.accepting
        by_use = any(i < len(origins) and origins[i] in _BY_USE for i in perturbed)
        if by_use and self.known_uses is None:
            # Before `f` runs, not after: so what it leaves for the user, such as the activations
            # of a layer in a dictionary, comes from the last run, in which it sees values.
            return self._uses(operands)
        return self.known_uses

    def _ran(self, operands: Values, known_uses: Uses | None) -> _Ran:
        """Run a copy of `f`."""
        captured, inputs = self._parted(operands)
        copies = self.held.copies(captured)
        result = self.apply(copies.values, inputs)
        refuse_assigned(copies.watched, self.source)
        return _Ran(result, [*copies.watched, *result[2].watched], known_uses)

    def _recorded(self, operands: Values) -> _Ran | None:
        """Run the copy in a trace, where JAX records the operations in any case.

        The trace also shows how `y` uses captured values. Without it, `f` would run once more under
        `jit` to find undeclared variables, and an iterator that it reads would move on twice. None
        if there are no undeclared variables, or if the rule cannot be returned from a trace.
        """
        if self.known_uses is not None or Origin.UNDECLARED not in self.origins.accepting:
            return None
        if any(map(is_ref, operands)):
            return None
        if not (is_staging() and is_traced(operands)) or is_being_traced(self.source):
            return None

        def run(captured: Values, inputs: Values) -> tuple[Result, Sequence[Watched]]:
            result, watched, _ = self._ran([*captured, *inputs], None)
            return result, watched

        captured, inputs = self._parted(operands)
        try:
            f = trace_call(run, captured, inputs, self.source, self.spec.inputs, None)
        except (RuleNotCopiedError, HoldsRefError, *NEEDS_VALUES):
            return None
        if is_traced(f.consts):
            raise errors.hidden_tracer(self.source)
        shown, refs = f.aside
        held = [*f.consts, *captured, *refs]
        result = evaluated(f.run, shown, len(held) - len(refs), held, inputs)
        first, every = len(f.consts), f.uses(shown.outputs.count).items()
        uses = {i - first: at for i, at in every if first <= i < first + len(captured)}
        return _Ran(result, result[2].watched, uses)

    def _as_residuals(
        self, rule: UserRule, leaves: Values, outputs: Outputs, operands: Values, perturbed: Wanted
    ) -> tuple[Run, list[Leaf]]:
        """Return a rule as what JAX carries: a `Run`, and its residuals."""
        if is_traced((*operands, *leaves)):
            # A rule that branches on a value of the forward pass finds it concrete one level down,
            # where it runs, if anywhere: it stays as it is.
            with contextlib.suppress(*NEEDS_VALUES):
                return hoisted(rule, outputs.cotangents(leaves), perturbed)
        return kept(rule)

    def _listing(self, accepts: bool, operands: Values, known_uses: Uses | None) -> Listing:
        """Return which captured values a rule gives gradients for."""
        origins = self.origins.with_rule(accepts)
        undeclared = [i for i, o in enumerate(origins) if o is Origin.UNDECLARED]
        if not undeclared:
            return self.declared
        if known_uses is not None:
            undeclared = [i for i in known_uses if origins[i] is Origin.UNDECLARED]
            return Undeclared(undeclared, [spec(operands[i]) for i in undeclared], None)
        # None of them is being differentiated. An outer derivative may ask for one later; `f` runs
        # again only then. At once, it would leave tracers of that run in what the user keeps.
        types = [jax.typeof(o) for o in operands]
        specs = [spec(operands[i]) for i in undeclared]
        return Undeclared(undeclared, specs, functools.cache(lambda: self._uses(types)))

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
        missing = {i for i, o in enumerate(self.origins.with_rule(accepts)) if o is Origin.MISSING}
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
        self, missing: Iterable[CapturedIndex], types: Sequence[Aval], known_uses: Uses | None
    ) -> None:
        every = self._uses(types) if known_uses is None else known_uses
        uses = {i: at for i, at in every.items() if i in missing}
        if uses and all(is_ref_type(types[i]) for i in uses):
            raise errors.captured_ref(self.source)
        if uses:
            lines = [(spec(types[i]), self.source.line(at)) for i, at in uses.items()]
            declared = self.declared.variables is not None
            raise errors.no_gradient_for_captured(self.source, lines, declared)

    def _uses(self, operands: Values) -> Uses:
        """Return how `y` uses captured values, by a trace of `f` on the operands or their types."""
        if self.held.snapshot.has_iterator:
            raise errors.runs_twice(self.source)
        note_another_run(self.source)
        return uses(self._leaves, *self._parted(operands))

    def _leaves(self, captured: Values, inputs: Values) -> list[Leaf]:
        """Return the leaves of `y`, as `f` computes it, on copies that nobody sees."""
        with plainly():
            held = self.held.copies(captured, apart=True).values
            return self.apply(held, inputs)[0]

    def _look_for_tracers(self, operands: Values) -> None:
        """Raise if `f` holds a tracer that the walk did not see; a trace of `f` shows it.

        The results of `f` are tracers, and no operand is. A `jit` or a `vmap` around the call may
        also make tracers of constants.
        """
        note_another_run(self.source)
        closed = jax.make_jaxpr(lambda: self._leaves(*self._parted(operands)))()
        if is_traced(closed.consts):
            raise errors.hidden_tracer(self.source)

    def _parted(self, operands: Values) -> tuple[Values, Values]:
        """Return the captured values and the inputs."""
        count = len(self.origins.accepting)
        return operands[:count], operands[count:]
