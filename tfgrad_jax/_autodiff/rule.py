"""The derivative of a function at a point, in two forms.

`Rule` is a pytree whose leaves are the residuals: JAX carries it from the forward to the backward
pass. `Pull` has no residuals: it is a parameter of our primitives, which take the residuals as
operands; `Pull.batched` is the rule under `vmap`. Both store which operands are being
differentiated (JAX calls them *perturbed*).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from .._jax.compat import is_ref, mapped_over
from .._jax.types import Cotangents, Dim, Leaf, LeafIndex, OperandIndex
from .._messages.source import Source

XIndex: TypeAlias = int  # into the differentiable operands of a rule, the `xs` of the primitives
Axis: TypeAlias = Any  # what `vmap` maps over: its size and name

# Residuals, cotangents of the outputs, which operands are wanted (of a `Rule`, `OperandIndex`; of a
# `Pull`, `XIndex`) -> for each of these operands its gradient, or None.
Run: TypeAlias = Callable[[Sequence[Leaf], Cotangents, Sequence[int]], list[Leaf]]

_STATIC = ["run", "outputs", "perturbed", "differentiable", "n_operands", "source", "pure", "own"]


def replaced(values: Sequence[Leaf], at: Sequence[int], new: Sequence[Leaf]) -> list[Leaf]:
    """Return the values with others at some positions."""
    found = list(values)
    for i, v in zip(at, new, strict=True):
        found[i] = v
    return found


# Undeclared `variables` are exactly the values that JAX is differentiating, and only JAX knows
# them: by symbolic zeros at the first order, by the tangents of `attach` at the next. So a rule
# notes the perturbed operands, and the list is the same with and without `jit`.
@functools.partial(jax.tree_util.register_dataclass, data_fields=["residuals"], meta_fields=_STATIC)
@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """Cotangents of the outputs -> a gradient, or None, for each perturbed operand."""

    residuals: Sequence[Leaf]
    run: Run
    outputs: tuple[LeafIndex, ...]  # those that have cotangents, the `ys` of `Pull`
    perturbed: tuple[OperandIndex, ...]  # those that are being differentiated, and may have one
    differentiable: tuple[OperandIndex, ...]  # those that can be, without Refs: the `xs`
    n_operands: int
    source: Source
    pure: bool  # whether no operand is a Ref
    own: tuple[int, ...] = ()  # which residuals are its only output

    def __call__(self, cotangents: Cotangents) -> list[Leaf]:
        return self.run(self.residuals, cotangents, self.perturbed)

    def pull(self) -> tuple["Pull", list[Leaf]]:
        """Return the rule as the primitives know it, and its residuals.

        A primitive takes no Refs, so the pull holds them; the rule reads and writes them there.
        """
        # Do not close over `self`: it holds tracers, and the pull may outlive them in a jaxpr.
        every, inner, positions = list(self.residuals), self.run, self.differentiable
        places = [i for i, r in enumerate(every) if not is_ref(r)]
        refs = [r if is_ref(r) else None for r in every]

        def run(
            residuals: Sequence[Leaf], cotangents: Cotangents, wanted: Sequence[XIndex]
        ) -> list[Leaf]:
            filled = replaced(refs, places, residuals[: len(places)])  # `push` may add one
            return inner(filled, cotangents, [positions[x] for x in wanted])

        xs = tuple(range(len(positions)))
        own = [places.index(k) for k in self.own]
        return Pull(run, xs, self.source, self.pure, own), [every[i] for i in places]


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False, frozen=True)
class Pull:
    """Cotangents of the `ys` -> gradients of those of the `xs` that are being differentiated."""

    at: Run
    perturbed: Sequence[XIndex]
    source: Source
    pure: bool = True  # whether the function reads no Ref
    own: Sequence[int] = ()  # which residuals are the only one of the `ys`
    forward: Run | None = None  # the linear map itself, if known; else the rule is transposed

    def __repr__(self) -> str:  # as jaxprs show it
        return f"the rule of {self.source}"

    def run(self, residuals: Sequence[Leaf], cotangents: Cotangents) -> list[Leaf]:
        return self.at(residuals, cotangents, self.perturbed)

    def reading(self, residuals: Sequence[Leaf], ys: Sequence[Leaf]) -> list[Leaf]:
        """Return the residuals, with the only output where they have it."""
        return replaced(residuals, self.own, [*ys] * len(self.own))

    def transposed(self) -> "Pull":
        """Return the rule of the transpose of a known linear map: the map."""
        assert self.forward is not None
        return dataclasses.replace(self, at=self.forward, forward=self.at)

    def only(self, some: Sequence[int]) -> "Pull":
        """Return the rule for some of these operands; the others are not being differentiated."""
        return dataclasses.replace(self, perturbed=[self.perturbed[i] for i in some])

    def batched(
        self, axis: Axis, dims: Sequence[Dim], ys: Sequence[Dim], mapped: Sequence[bool]
    ) -> "Pull":
        """Return the rule under `vmap`. `dims` and `ys` are the axes of residuals and cotangents.

        All examples share an `x` that is not `mapped`, so its gradients are summed.
        """

        def over_axis(
            at: Run, residuals: Sequence[Leaf], values: Sequence[Leaf], wanted: Any, of: Any
        ) -> list[Leaf]:
            each = jax.vmap(
                lambda residuals, values: at(residuals, values, wanted),
                (list(dims), of),
                **mapped_over(axis),
            )
            return each(list(residuals[: len(dims)]), list(values))  # `push` may add one more

        is_mapped = dict(zip(self.perturbed, mapped, strict=True))

        def run(
            residuals: Sequence[Leaf], cotangents: Cotangents, wanted: Sequence[XIndex]
        ) -> list[Leaf]:
            gradients = over_axis(self.at, residuals, cotangents, wanted, list(ys))
            return [
                g if g is None or is_mapped[i] else g.sum(0)
                for i, g in zip(wanted, gradients, strict=True)
            ]

        forward = self.forward and functools.partial(over_axis, self.forward, of=0)
        return dataclasses.replace(self, at=run, forward=forward)
