"""A call whose function closes over nothing that JAX traces, as far as is known.

`_derivatives.differentiable` runs `Direct`: `primal` where it is not differentiated, `forward`
where it is. Both call `f` on the operands themselves. Where it turns out that `f` did close over
a tracer, they raise `CapturedTracerError`, and the call is hoisted (`_closure.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from ._call import Call, Variables
from ._compat import batch_tracer
from ._derivatives import attach, depending, differentiable
from ._rules import NeedsValuesError, Rule, lift, lifted_rule, traced_rule
from ._structure import Outputs, Spec, spec


class CapturedTracerError(Exception):
    """The function closes over a value that JAX is tracing: it must be hoisted."""


@jax.tree_util.register_static
class Direct:
    """A call whose function closes over nothing that JAX traces, as far as is known."""

    has_refused = False

    def __init__(
        self, call: Call, forward_mode: bool, may_capture: bool, variables: Variables | None
    ) -> None:
        self._call = call
        self._may_capture = may_capture  # it may; to be found out while values are concrete
        self._variables = variables
        self.forward_mode = forward_mode
        self.source = call.contract.source
        self.treedef: Any = None  # of `y`, once `f` has run
        self._known: Any = None

    def run_on_values(self, operands: Sequence[Any]) -> None:
        """Run `f` now if, apart from being differentiated, its operands are concrete.

        For versions of JAX that trace even what is called eagerly: they get this result.
        """
        values = [jax.lax.stop_gradient(o) for o in operands]
        if not _traced(values):
            self._known = self._call.apply(values, in_forward_pass=True)
            if self._known[1].traced:
                raise CapturedTracerError
            self.treedef = self._known[1].treedef

    def primal(self, operands: Sequence[Any]) -> list[Any]:
        if self._known is not None:
            return self._known[0]
        concrete = self._concrete(operands)
        leaves, outputs, _ = self._call.apply(operands)
        self._still_concrete(concrete, outputs)
        self.treedef = outputs.treedef
        return _depending(leaves, operands)

    def _concrete(self, operands: Sequence[Any]) -> bool:
        """Tell whether `f` is about to see concrete values."""
        concrete = not _traced(operands)
        if self._may_capture and not concrete:
            raise CapturedTracerError
        return concrete

    def _still_concrete(self, concrete: bool, outputs: Outputs) -> bool:
        """Tell whether all that `f` has seen was: its outputs show a captured tracer."""
        if concrete and outputs.traced:
            if self._may_capture:
                raise CapturedTracerError
            return False
        return concrete

    def forward(
        self, operands: Sequence[Any], perturbed: Sequence[bool] | None
    ) -> tuple[list[Any], Rule]:
        if self._known is not None and not _traced(operands):
            concrete, (leaves, outputs, grad_fn) = True, self._known
        else:
            concrete = self._concrete(operands)
            leaves, outputs, grad_fn = self._call.apply(operands, in_forward_pass=True)
            concrete = self._still_concrete(concrete, outputs)
            self.treedef = outputs.treedef
        specs = [spec(o) for o in operands]

        def as_it_is() -> Rule:
            return self._rule(lambda _: grad_fn, [], outputs, specs)

        if concrete and not self._may_capture:
            # With concrete values there is nothing for JAX to carry, and nothing to trace.
            return leaves, as_it_is()
        try:
            lifted = lift(grad_fn)
            if lifted is not None:
                rule = self._rule(*lifted, outputs, specs)
            else:
                contract = self._call.contract
                rule = traced_rule(contract, grad_fn, leaves, outputs, specs, self._variables)
        except NeedsValuesError:
            if not concrete:
                # The rule branches on values, so these are concrete one level down: let the
                # next level of differentiation call `f` again, where it will see them.
                leaves = differentiable(self)(self, *operands)
            return leaves, as_it_is()
        if not concrete:
            return attach(_depending(leaves, operands), operands, rule), rule
        if rule.residuals:
            raise CapturedTracerError
        return leaves, as_it_is()

    def _rule(self, rebuild: Any, residuals: Any, outputs: Outputs, specs: Sequence[Spec]) -> Rule:
        contract, variables = self._call.contract, self._variables
        return lifted_rule(contract, rebuild, residuals, outputs, specs, lambda _: variables)


def _depending(leaves: list[Any], operands: Sequence[Any]) -> list[Any]:
    """Make outputs depend on the operands that they certainly do not depend on.

    An output that is one of the operands does not depend on the others; one that another
    transformation traces is not mapped where the operands of this one are.
    """
    batched, kinds = batch_tracer(), {type(o) for o in operands}
    ids = {id(o) for o in operands}
    alike = len(kinds) == 1 and (batched not in kinds or len(operands) == 1)
    if alike and all(type(y) in kinds and id(y) not in ids for y in leaves):
        return leaves

    def may_ignore(y: Any, operand: Any) -> bool:
        kind = type(operand)
        # Tracers of two vmaps, one in the other, are of one type.
        return operand is not y and (id(y) in ids or kind is not type(y) or kind is batched)

    return [depending(y, [o for o in operands if may_ignore(y, o)]) for y in leaves]


def _traced(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tracer) for v in values)
