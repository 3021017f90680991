"""A call as a function of its operands, with a rule.

The operands are the captured values and then the inputs. If JAX does not differentiate the call, it
runs `Program.value`. If it does, it runs `forward`, which returns the value, and the rule as a
function of residuals (`_autodiff/custom.py` says when).
"""

import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef, register_static, tree_flatten

from tfgrad_jax._autodiff.function import Forward
from tfgrad_jax._closure.skeleton import Skeleton
from tfgrad_jax._closure.snapshot import Owned
from tfgrad_jax._closure.traced import Uses
from tfgrad_jax._frontend.grad_fn import Apply, Call, CallSpec, Primal, Result
from tfgrad_jax._frontend.within import Within
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import plainly
from tfgrad_jax._jax.types import (
    NEEDS_VALUES,
    Inert,
    Leaf,
    is_differentiable,
    is_traced,
    spec,
)
from tfgrad_jax._messages import errors, gradient_errors
from tfgrad_jax._messages.source import Source

from .ordinary import with_ordinary_gradients
from .rule import (
    CapturedIndex,
    Listing,
    Names,
    Own,
    Refused,
    UserRule,
    Values,
    Wanted,
    hoisted,
    kept,
    names_of,
)
from .transparent import Ran, evaluated, run_copy


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
    captured: int  # how many of the operands are captured values
    ordinary: Sequence[CapturedIndex]  # those that get the ordinary gradient of `f`
    declared: Listing
    undeclared: Collection[CapturedIndex]  # those that the rule lists or refuses, if used
    chooses: bool  # whether a rule that accepts `variables` gets these
    uses: Uses | None = None  # how `y` uses them; None: not known yet
    read: Collection[CapturedIndex] = ()  # those that only a rule reads that accepts `variables`
    written: Names | None = None  # how the user writes both
    reads_hidden: bool = False  # whether a trace has shown a tracer that was not captured
    y: TypeOfY = dataclasses.field(default_factory=TypeOfY)

    @classmethod
    def of(
        cls, call: Call, held: Skeleton, captured: Values, declared: Sequence[CapturedIndex]
    ) -> "Program":
        """Return the program of a call; `held` copies what it holds around what it captured."""
        variables, _ = call.declared
        left = set(range(len(captured))).difference(declared)
        others = {i for i in left if is_differentiable(captured[i].dtype)}
        ordinary = {i for i in others if not is_ref(captured[i])} if call.autodiff else set()
        return cls(
            call.spec,
            call.apply,
            call.primal,
            held,
            captured=len(captured),
            ordinary=sorted(ordinary),
            declared=Listing(declared, variables, []),
            undeclared=others - ordinary,
            chooses=call.variables is None,
        )

    def with_uses(
        self,
        uses: Uses,
        read: Collection[CapturedIndex],
        names: Names,
        accepts_variables: bool,
        reads_hidden: bool,
    ) -> "Program":
        """Return the program, where a trace has shown how `y` uses the captured values."""
        is_listed = accepts_variables and self.chooses
        # All is constant for a function that is written inside a rule and lists no variables.
        has_rule = is_listed or self.spec.within is not Within.RULE
        known = {*uses, *read} if has_rule else ()
        some = {i for i in known if i in self.undeclared}
        facts: dict[str, Any] = {"read": read, "written": names, "reads_hidden": reads_hidden}
        return dataclasses.replace(self, undeclared=some, uses=uses, **facts)

    @property
    def source(self) -> Source:
        return self.spec.source

    @property
    def has_primal(self) -> bool:
        return self.primal is not None

    @property
    def needs_perturbed(self) -> bool:
        """Whether the rule lists the values that are being differentiated, or raises for one."""
        return bool(self.undeclared)

    def names(self) -> list[str]:
        """Return the names of the operands, for JAX's own errors."""
        inputs = self.spec.inputs
        paths = inputs.leaf_paths()
        closed_over = [f"closed over {i}" for i in range(self.captured)]
        return [*closed_over, *(paths[i] for i in inputs.operands)]

    def value(self, operands: Values) -> list[Leaf]:
        """Return the leaves of `y`, in a call that JAX does not differentiate."""
        captured, inputs = self._parted(operands)
        with plainly():
            copies = self.held.copies(captured)
            if self.primal is None:
                leaves, outputs, _ = run_copy(self.spec, self.apply, copies, inputs).result
                treedef = outputs.treedef
            else:
                y = run_copy(self.spec, self.primal, copies, inputs).result
                leaves, treedef = tree_flatten(y)
                leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
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
        captured, inputs = self._parted(operands)
        ((leaves, outputs, grad_fn), watched, owned), uses, read = self._ran(captured, inputs)
        listing, refused = self._given(grad_fn.accepts_variables, captured, uses)
        refused.check(perturbed)
        unlisted = [i for i in perturbed if i in read and i in self.undeclared and i not in uses]
        if unlisted and self.spec.within is not Within.RULE:
            of = self._named(captured, unlisted)
            values = [(of[i], spec(captured[i])) for i in unlisted]
            gradient_errors.warn_of_unlisted(self.source, values)
        values = [captured[i] for i in listing.gives]
        rule = UserRule(
            grad_fn, self.source, listing, refused, self.captured, values, watched, owned
        )
        self.y.note(self.source, outputs.treedef, leaves)
        if is_traced((*operands, *leaves)):
            # A rule that branches on a value of the forward pass finds it concrete one level down,
            # where it runs, if anywhere: it stays as it is.
            with contextlib.suppress(*NEEDS_VALUES):
                own = Own(grad_fn, outputs.only(leaves), owned)
                as_residuals = hoisted(rule, outputs.cotangents(leaves), own, perturbed)
                return Forward(leaves, outputs.differentiable, *as_residuals)
        return Forward(leaves, outputs.differentiable, *kept(rule))

    def _ran(
        self, captured: Values, inputs: Values
    ) -> tuple[Ran[Result], Uses, Collection[CapturedIndex]]:
        """Run a copy of `f`; if it is not known how `y` uses undeclared values, in a trace."""
        uses, read = self.uses or {}, self.read
        if self.undeclared and self.uses is None:
            result, uses, read = evaluated(
                self.spec, self.apply, self.held, captured, inputs, self.undeclared
            )
            if result is not None:
                return Ran(result, [], Owned()), uses, read
        copies = self.held.copies(captured)
        return run_copy(self.spec, self.apply, copies, inputs), uses, read

    def _given(self, accepts: bool, captured: Values, uses: Uses) -> tuple[Listing, Refused]:
        """Return what the rule gives gradients for, and which values must not need one."""
        used = [i for i in uses if i in self.undeclared]
        listed = [i for i in used if accepts and self.chooses and not is_ref(captured[i])]
        # All is constant for a function that is written inside a rule and lists no variables.
        in_rule = self.spec.within is Within.RULE
        missing = [i for i in used if not (i in listed or in_rule)]
        lines = {i: (spec(captured[i]), is_ref(captured[i]), uses[i]) for i in missing}
        names = self._named(captured, missing)
        refused = Refused(self.source, lines, names, self.declared.variables is not None)
        undeclared = Listing(listed, None, [spec(captured[i]) for i in listed])
        return undeclared if listed else self.declared, refused

    def _named(self, captured: Values, some: Sequence[CapturedIndex]) -> Names:
        """Return how the user writes captured values."""
        if not some or self.written is not None:
            return self.written or {}
        (held,) = self.held.copies(captured).values
        return names_of(held, {i: captured[i] for i in some})

    def _parted(self, operands: Values) -> tuple[Values, Values]:
        """Return the captured values and the inputs."""
        return operands[: self.captured], operands[self.captured :]
