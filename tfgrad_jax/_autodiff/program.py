"""A call as what JAX differentiates: `primal` is its value, `forward` its value and its rule.

`custom.py` tells JAX which of the two to run, and when. Operands are the captured values, then the
inputs that JAX is tracing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import register_static, tree_unflatten

from tfgrad_jax import _errors
from tfgrad_jax._closure.body import Body, HiddenTracerError
from tfgrad_jax._closure.residuals import Rule, Static, is_traced
from tfgrad_jax._closure.traced import needed
from tfgrad_jax._compat import is_ref, is_staging, plainly
from tfgrad_jax._frontend.structure import spec
from tfgrad_jax._jaxpr import without_consts

from .custom import differentiable
from .primitives import depend


@register_static
class Program:
    """One call. A pytree without leaves: static to JAX."""

    def __init__(self, body: Body, name: str) -> None:
        self._body = body
        self._name = name
        self._treedef: Any = None  # of `y`, once it has run
        self._types: Any = None  # of its leaves

    def __call__(self, captured: Sequence[Any], inputs: Sequence[Any]) -> Any:
        operands = [*captured, *inputs]
        has_refs = any(map(is_ref, operands))
        if has_refs and self._body.may_refuse:
            # With `symbolic_zeros`, JAX lets no rule keep a Ref.
            self._body.settle(captured, inputs)
        run = differentiable(self._name, self._body.may_refuse, has_refs)
        leaves = run(self, *operands)
        return tree_unflatten(self._treedef, leaves)

    def primal(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves of `y`, where nothing is differentiated."""
        if not is_traced(operands) or any(map(is_ref, operands)) or not is_staging():
            return self.laid_out(self._value(*operands))
        # What is staged may be mapped and then differentiated. Then each output must be mapped
        # that has a mapped operand, even if it ignores it: the rule may use it.
        value = jax.jit(self._body.contract.source.named(self._value), inline=True)
        closed = value.trace(*operands).jaxpr
        if len(closed.jaxpr.invars) > len(operands):  # JAX makes operands of captured tracers
            raise HiddenTracerError
        jaxpr = without_consts(closed)
        leaves = value(*operands)
        first = len(jaxpr.invars) - len(operands)
        for i in range(len(leaves)):
            known = needed(jaxpr, [k == i for k in range(len(leaves))])[first:]
            ignored = [o for o, k in zip(operands, known, strict=True) if not k]
            if ignored:
                (leaves[i],) = depend([leaves[i]], ignored)
        return self.laid_out(leaves)

    def laid_out(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves with what `vmap` maps in one place, whether of `primal` or of `f`.

        To broadcast puts a mapped axis in front. Kernels know it, where they do not know `depend`.
        """
        if not (self._body.has_primal and is_traced(leaves)):
            return leaves
        return [jax.lax.squeeze(jax.lax.expand_dims(leaf, [0]), [0]) for leaf in leaves]

    def _value(self, *operands: Any) -> list[Any]:
        n = self._body.count
        with plainly():
            leaves, treedef = self._body.value(operands[:n], operands[n:])
        self._set_type(treedef, leaves)
        return leaves

    def _set_type(self, treedef: Any, leaves: Sequence[Any]) -> None:
        """Note the type of `y`, which is that of `primal` or of `f`."""
        types = [(leaf.shape, leaf.dtype) for leaf in leaves]
        known = self._treedef, self._types
        if self._treedef is not None and known != (treedef, types):
            raise _errors.primal_mismatch(self._body.contract.source, known, (treedef, types))
        self._treedef, self._types = treedef, types

    def forward(self, operands: Sequence[Any], perturbed: Sequence[bool]) -> tuple[list[Any], Rule]:
        """Return the leaves of `y` and the rule, where something is differentiated."""
        n = self._body.count
        result = self._body.result(operands[:n], operands[n:], perturbed)
        self._set_type(result.outputs.treedef, result.leaves)
        moved = [i for i, o in enumerate(operands) if spec(o).differentiable and not is_ref(o)]
        run, positions, refuse = result.run, result.positions, None

        def placed(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            found = run(residuals, cotangents)
            inputs = len(found) - len(positions)
            captured: list[Any] = [None] * n
            for position, g in zip(positions, found[inputs:], strict=True):
                if g is not None:
                    known = captured[position]
                    captured[position] = g if known is None else known + g
            return [*captured, *found[:inputs]]

        if self._body.may_refuse:
            # It may outlive the operands, and must not refer to a tracer.
            known = result._replace(leaves=[], residuals=[])
            types = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands]

            def refuse(perturbed: Mapping[int, bool]) -> None:
                every = [perturbed.get(i, False) for i in range(len(types))]
                self._body.check(types[:n], types[n:], known, every)

        source, outputs = self._body.contract.source, result.outputs.differentiable
        static = Static(placed if n else run, outputs, moved, source, refuse)
        return result.leaves, Rule(static, result.residuals)
