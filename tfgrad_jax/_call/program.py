"""A call as a function of its operands, with a rule.

The operands are the captured values and then the inputs. If JAX does not differentiate the call, it
runs `Program.value`. If it does, it runs `forward`, which returns the value, and the rule as a
function of residuals (`_autodiff/custom.py` says when).
"""

import contextlib
import dataclasses
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef, register_static, tree_flatten

from tfgrad_jax._autodiff.function import Forward
from tfgrad_jax._autodiff.rule import replaced
from tfgrad_jax._closure.names import named_in
from tfgrad_jax._closure.reach import reach
from tfgrad_jax._closure.skeleton import Skeleton
from tfgrad_jax._frontend.grad_fn import Apply, Call, CallSpec, GradFn, Primal
from tfgrad_jax._frontend.within import Within
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.follow import Follow
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
    Uses,
    Values,
    Wanted,
    hoisted,
    kept,
    names_of,
)
from .transparent import run_copy


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
    written: Names | None = None  # how the user writes them, if `held` does not tell
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
        if not self.undeclared:
            return self._forward(operands, perturbed)
        captured, _ = self._parted(operands)
        some = {i: captured[i] for i in sorted(self.undeclared)}

        def why() -> str:
            return errors.undeclared(self.source, self._named(captured, some).values())

        trace = Follow([*some.values()], why)
        with trace.running():
            followed = replaced(operands, [*some], trace.values)
            found = self._forward(followed, perturbed, trace)
        (leaves, _), (residuals, _) = trace.opened(found.leaves), trace.opened(found.residuals)
        found = found._replace(leaves=leaves, residuals=residuals)
        if is_traced((*operands, *leaves)):
            return found
        run = found.run  # JAX need not carry the residuals
        return found._replace(run=lambda _, *others: run(residuals, *others), residuals=[])

    def _forward(self, operands: Values, perturbed: Wanted, trace: Follow | None = None) -> Forward:
        """Run `f`. A `trace` follows how `y` uses undeclared values."""
        captured, inputs = self._parted(operands)
        copies = self.held.copies(captured)
        with plainly() if trace is not None and trace.is_plain else contextlib.nullcontext():
            ran = run_copy(self.spec, self.apply, copies, inputs)
        (leaves, outputs, grad_fn), watched, owned = ran
        self.y.note(self.source, outputs.treedef, leaves)
        own = Own(grad_fn, outputs.only(leaves), owned)
        uses = {} if trace is None else self._uses(trace, leaves, grad_fn.accepts_variables)
        listing, refused = self._given(grad_fn.accepts_variables, captured, uses)
        refused.check(perturbed)
        if trace is not None and grad_fn.accepts_variables:
            unlisted = [i for i in perturbed if i in self.undeclared and i not in uses]
            self._warn_of_unlisted(trace, captured, unlisted, grad_fn, own)
        values = [captured[i] for i in listing.gives]
        gives = {*listing.gives, *range(self.captured, len(operands))}
        rule = UserRule(
            grad_fn, self.source, listing, refused, self.captured, values, watched, owned
        )
        if is_traced((*operands, *leaves)):
            # A rule that branches on a value of the forward pass finds it concrete one level down,
            # where it runs, if anywhere: it stays as it is.
            allowed = NEEDS_VALUES if trace is None else ()
            with contextlib.suppress(*allowed):
                as_residuals = hoisted(rule, outputs.cotangents(leaves), own, perturbed)
                return Forward(leaves, outputs.differentiable, *as_residuals, gives)
        return Forward(leaves, outputs.differentiable, *kept(rule), gives)

    def _uses(self, trace: Follow, leaves: Values, accepts: bool) -> Uses:
        """Return which undeclared values `y` uses, in order, and where."""
        # A function that is decorated in the body of another one is its rule, mostly, as published
        # for GANs: StyleGAN's leaky rectifier compares `y` in one, and has no derivative by it. So
        # there is nothing to declare. (A threshold that a layer learns is another thing: that is an
        # error.)
        compares = self.spec.within is Within.FUNCTION and not accepts
        some = sorted(self.undeclared)
        return {some[k]: trace.uses.get(k) for k in trace.used_by(leaves, compares)}

    def _warn_of_unlisted(
        self,
        trace: Follow,
        captured: Values,
        unlisted: Sequence[CapturedIndex],
        rule: GradFn,
        own: Own,
    ) -> None:
        """Warn of weights that only a rule reads which accepts `variables`."""
        if not unlisted or self.spec.within is Within.RULE:
            return
        if rule.named is None:
            found = reach([rule.held], own.takes)
            ids = named_in(rule.held, found)
            named = [v for key, v in found.captured.items() if key in ids]
        else:
            named = [rule.held[i] for i in rule.named]
        every = sorted(self.undeclared)
        read = {every[k] for k in trace.used_by(named)}
        if some := [i for i in unlisted if i in read]:
            of = self._named(captured, some)
            values = [(of.get(i, ""), spec(captured[i])) for i in some]
            gradient_errors.warn_of_unlisted(self.source, values)

    def _given(self, accepts: bool, captured: Values, uses: Uses) -> tuple[Listing, Refused]:
        """Return what the rule gives gradients for, and which values must not need one."""
        accepts &= self.declared.variables is None
        listed = [i for i in uses if accepts and not is_ref(captured[i])]
        # All is constant for a function that is written inside a rule and lists no variables.
        in_rule = self.spec.within is Within.RULE
        missing = [i for i in uses if not (i in listed or in_rule)]
        lines = {i: (spec(captured[i]), is_ref(captured[i]), uses[i]) for i in missing}
        names = self._named(captured, missing)
        refused = Refused(self.source, lines, names, self.declared.variables is not None)
        undeclared = Listing(listed, None, [spec(captured[i]) for i in listed])
        return undeclared if listed else self.declared, refused

    def _named(self, captured: Values, some: Collection[CapturedIndex]) -> Names:
        """Return how the user writes captured values."""
        if not some or self.written is not None:
            return self.written or {}
        (held,) = self.held.copies(captured).values
        return names_of(held, {i: captured[i] for i in some})

    def _parted(self, operands: Values) -> tuple[Values, Values]:
        """Return the captured values and the inputs."""
        return operands[: self.captured], operands[self.captured :]
