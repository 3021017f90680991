"""The derivative of a function at a point.

A `Rule` is a pytree whose leaves are the residuals: JAX carries it from the forward to the backward
pass. It is a parameter of our primitives, too, without its residuals, which are their operands:
`Rule.apart`. `Rule.batched` is the rule under `vmap`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax

from .._jax.compat import is_ref, mapped_over
from .._jax.types import Cotangents, Dim, Indices, Leaf, LeafIndex, OperandIndex, Values
from .._messages.source import Source

Axis: TypeAlias = Any  # what `vmap` maps over: its size and name

# Residuals, cotangents of the outputs, which operands are wanted -> for each of these its gradient,
# or None.
Run: TypeAlias = Callable[[Values, Cotangents, Indices], list[Leaf]]


def replaced(values: Values, at: Sequence[int], new: Values) -> list[Leaf]:
    """Return the values with others at some positions."""
    found = list(values)
    for i, v in zip(at, new, strict=True):
        found[i] = v
    return found


# Undeclared `variables` are exactly the values that JAX is differentiating (JAX calls them
# *perturbed*), and only JAX knows them: by symbolic zeros at the first order, by the tangents of
# `attach` at the next. So a rule notes the perturbed operands, and the list is the same with and
# without `jit`.
@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """Residuals, cotangents of the outputs -> a gradient, or None, for each perturbed operand."""

    residuals: Values
    run: Run
    source: Source
    perturbed: Indices  # those that are being differentiated, and may have one
    outputs: Sequence[LeafIndex] = ()  # those that have cotangents
    n_operands: int = 0
    own: Sequence[int] = ()  # which residuals are the only one of the outputs

    def __repr__(self) -> str:  # as jaxprs show it
        return f"the rule of {self.source}"

    def __call__(self, residuals: Values, cotangents: Cotangents) -> list[Leaf]:
        return self.run(residuals, cotangents, self.perturbed)

    def apart(self) -> tuple["Rule", list[Leaf]]:
        """Return the rule without its residuals, and these.

        A primitive takes no Refs, so the rule holds them; it reads and writes them there.
        """
        # Do not close over `self`: it holds tracers, and the rule may outlive them in a jaxpr.
        every, inner = list(self.residuals), self.run
        places = [k for k, r in enumerate(every) if not is_ref(r)]
        refs = [r if is_ref(r) else None for r in every]

        def run(residuals: Values, cotangents: Cotangents, wanted: Indices) -> list[Leaf]:
            filled = replaced(refs, places, residuals[: len(places)])  # `push` may add one
            return inner(filled, cotangents, wanted)

        own = [places.index(k) for k in self.own]
        rule = dataclasses.replace(self, residuals=(), run=run, own=own)
        return rule, [every[k] for k in places]

    def reading(self, residuals: Values, leaves: Values) -> list[Leaf]:
        """Return the residuals, with the only output where they have it."""
        return replaced(residuals, self.own, [leaves[i] for i in self.outputs] * len(self.own))

    def only(self, perturbed: Iterable[OperandIndex]) -> "Rule":
        """Return the rule for these operands; the others are not being differentiated."""
        return dataclasses.replace(self, perturbed=tuple(perturbed))

    def batched(
        self, axis: Axis, dims: Sequence[Dim], ys: Sequence[Dim], mapped: Sequence[bool]
    ) -> "Rule":
        """Return the rule under `vmap`. `dims` and `ys` are the axes of residuals and cotangents.

        All examples share an `x` that is not `mapped`, so its gradients are summed.
        """
        # Do not close over `self`, as in `apart`.
        inner, is_mapped = self.run, dict(zip(self.perturbed, mapped, strict=True))

        def run(residuals: Values, cotangents: Cotangents, wanted: Indices) -> list[Leaf]:
            each = jax.vmap(
                lambda residuals, cotangents: inner(residuals, cotangents, wanted),
                (list(dims), list(ys)),
                **mapped_over(axis),
            )
            gradients = each(list(residuals[: len(dims)]), list(cotangents))  # `push` may add one
            return [
                g if g is None or is_mapped[i] else g.sum(0)
                for i, g in zip(wanted, gradients, strict=True)
            ]

        return dataclasses.replace(self, run=run)


_STATIC = [field.name for field in dataclasses.fields(Rule) if field.name != "residuals"]
jax.tree_util.register_dataclass(Rule, ["residuals"], _STATIC)
