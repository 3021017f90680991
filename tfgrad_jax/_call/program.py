"""A call as a function of its operands, with a rule.

The operands are the captured values and then the inputs. If JAX does not differentiate the call, it
runs `Program.value`. If it does, it runs `forward`, which returns the value, and the rule as a
function of residuals (`_autodiff/custom.py` says when).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_static, tree_flatten

from tfgrad_jax._autodiff.custom import Forward, HiddenTracerError
from tfgrad_jax._closure.traced import Uses, dependence_on
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import plainly
from tfgrad_jax._jax.types import NeedsValuesError, is_traced, spec
from tfgrad_jax._messages import errors

from .hoist import Capture
from .rule import (
    CapturedIndex,
    Leaf,
    Leaves,
    Listing,
    OperandIndex,
    Origin,
    Values,
    hoisted,
    kept,
    origin,
)


@register_static
class Program:
    """A call as a function of its operands, with a rule. It holds no operand: jaxprs keep it."""

    def __init__(self, call: Call, captured: Capture) -> None:
        self.source, self._inputs = call.contract.source, call.contract.inputs
        self.has_primal = call.primal is not None
        self._skeleton, values, self._declared = captured
        self._variables, _ = call.declared
        self._count = len(values)
        self._refs = [i for i, v in enumerate(values) if is_ref(v)]
        # By whether the rule accepts undeclared `variables`, which the rule itself shows.
        self._origins = {
            accepts: [origin(v, call, i in self._declared, accepts) for i, v in enumerate(values)]
            for accepts in (False, True)
        }
        # The rule lists the captured values that are being differentiated, or raises for one.
        self.needs_perturbed = not {Origin.UNDECLARED, Origin.MISSING}.isdisjoint(
            self.origins(True)
        )
        self._uses: Uses | None = None  # of the captured values, once they are known
        self.treedef: Any = None  # of `y`, once it is known
        self._types: Any = None  # of its leaves

    def names(self) -> list[str]:
        """Return the names of the operands, for JAX's own errors."""
        paths = self._inputs.leaf_paths()
        closed_over = [f"closed over {i}" for i in range(self._count)]
        return [*closed_over, *(paths[i] for i in self._inputs.operands)]

    def value(self, operands: Values) -> list[Leaf]:
        """Return the leaves of `y`, in a call that JAX does not differentiate."""
        captured, inputs = self._parted(operands)
        with plainly():
            apply, primal, *_ = self._skeleton.copies(captured)
            if primal is None:
                leaves, outputs, _ = apply(inputs)
                treedef = outputs.treedef
            else:
                leaves, treedef = tree_flatten(primal(inputs))
                leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
        self._note_type(treedef, leaves)
        return leaves

    def forward(self, operands: Values, perturbed: Sequence[OperandIndex]) -> Forward:
        """Return the leaves of `y` and the rule, in a call that JAX differentiates.

        `f` runs once, around the current values. The rule that it returns may run later, at other
        values or under another trace, so it becomes a function of its residuals.
        """
        captured, inputs = self._parted(operands)
        apply, *_ = self._skeleton.copies(captured)
        leaves, outputs, grad_fn = apply(inputs)
        listing = self._listing(grad_fn.accepts_variables, operands, perturbed)
        values = [captured[i] for i in listing.gives]
        run, residuals = kept(listing, grad_fn, values, self._skeleton.snapshot)
        if is_traced((*operands, *leaves)):
            types = outputs.cotangents(leaves)
            # A rule that branches on a value finds it concrete one level down, where it runs.
            with contextlib.suppress(*NeedsValuesError):
                run, residuals = hoisted(listing, grad_fn, values, types, perturbed)
        self._note_type(outputs.treedef, leaves)
        if is_traced(leaves) and not is_traced(operands):
            self._look_for_tracers(operands)
        return Forward(leaves, outputs.differentiable, run, residuals)

    def origins(self, accepts_variables: bool) -> list[Origin]:
        """Return where the gradient of each captured value comes from."""
        return self._origins[accepts_variables]

    def _listing(
        self, accepts_variables: bool, operands: Values, perturbed: Sequence[OperandIndex]
    ) -> Listing:
        """Return which captured values the rule gives gradients for.

        Raise if one has no gradient, is being differentiated, and `y` uses it.
        """
        origins, gives, specs = self.origins(accepts_variables), self._declared, None
        missing = {i for i, o in enumerate(origins) if o is Origin.MISSING}
        chooses = Origin.UNDECLARED in origins
        if chooses or missing.intersection(perturbed):
            uses = self.uses(operands)  # now: later there are only types
            if chooses:
                gives = [i for i in uses if origins[i] is Origin.UNDECLARED]
                specs = [spec(operands[i]) for i in gives]
        types = [jax.typeof(o) for o in operands]  # not the operands, which the rule may outlive
        refuse = lambda missing: self._refuse(missing, types)  # noqa: E731
        variables = self._variables
        listing = Listing(self.source, self._count, gives, variables, specs, missing, refuse)
        listing.listed(perturbed)
        return listing

    def _refuse(self, missing: Sequence[CapturedIndex], types: Sequence[Any]) -> None:
        """Raise if `y` uses one of these captured values, which have no gradient."""
        uses = {i: at for i, at in self.uses(types).items() if i in missing}
        if uses and all(i in self._refs for i in uses):
            raise errors.captured_ref(self.source)
        if uses:
            lines = [(spec(types[i]), self.source.line(at)) for i, at in uses.items()]
            declared = self._variables is not None
            raise errors.no_gradient_for_captured(self.source, lines, declared)

    def uses(self, operands: Values) -> Uses:
        """Return how `y` uses captured values, by a trace of `f` on the operands or their types."""
        if self._uses is None:
            self._uses = dependence_on(self._leaves, *self._parted(operands))
        return self._uses

    def _leaves(self, captured: Values, inputs: Values) -> list[Leaf]:
        """Return the leaves of `y`, as `f` computes it."""
        with plainly():
            apply, *_ = self._skeleton.copies(captured, apart=True)
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
        return operands[: self._count], operands[self._count :]

    def _note_type(self, treedef: Any, leaves: Leaves) -> None:
        """Note the type of `y`, which must be the same of `primal` and of `f`."""
        types = [(leaf.shape, leaf.dtype) for leaf in leaves]
        known = self.treedef, self._types
        if self.treedef is not None and known != (treedef, types):
            raise errors.primal_mismatch(self.source, known, (treedef, types))
        self.treedef, self._types = treedef, types
