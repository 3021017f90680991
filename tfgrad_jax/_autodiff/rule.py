"""The derivative of a function at a point, in two forms.

`Rule` is a pytree whose leaves are the residuals: JAX carries it from the forward to the backward
pass. `Pull` has no residuals: it is a parameter of our primitives, which take the residuals as
operands. `Pull.batched` is the rule under `vmap`. Both store which operands are being
differentiated (JAX calls them *perturbed*), because undeclared `variables` are exactly those.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._messages.source import Source

# Residuals, cotangents of the outputs, positions of the operands that are being differentiated
# -> for each of these operands its gradient, or None.
Run: TypeAlias = Callable[[Sequence[Any], Sequence[Any], Sequence[int]], list[Any]]

_STATIC = ["run", "outputs", "perturbed", "differentiable", "count", "source", "pure"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["residuals"], meta_fields=_STATIC)
@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """Cotangents of the outputs -> a gradient, or None, for each operand."""

    residuals: Sequence[Any]
    run: Run
    outputs: tuple[int, ...]  # positions of the outputs that have cotangents, the `ys` of `Pull`
    perturbed: tuple[int, ...]  # positions of the operands that are being differentiated
    differentiable: tuple[int, ...]  # positions of those that can be, without Refs: the `xs`
    count: int  # of all operands
    source: Source
    pure: bool  # whether no operand is a Ref

    def __call__(self, cotangents: Sequence[Any]) -> list[Any]:
        gradients: list[Any] = [None] * self.count
        for i, g in zip(
            self.perturbed, self.run(self.residuals, cotangents, self.perturbed), strict=True
        ):
            gradients[i] = g
        return gradients

    def pull(self) -> tuple["Pull", list[Any]]:
        """Return the rule as the primitives know it, and its residuals.

        A primitive takes no Refs, so the pull holds them; the rule reads and writes them there.
        """
        # Do not close over `self`: it holds tracers, and the pull may outlive them in a jaxpr.
        every, inner, positions = list(self.residuals), self.run, self.differentiable
        places = [i for i, r in enumerate(every) if not is_ref(r)]
        refs = [r if is_ref(r) else None for r in every]

        def run(
            residuals: Sequence[Any], cotangents: Sequence[Any], perturbed: Sequence[int]
        ) -> list[Any]:
            filled = list(refs)
            for i, r in zip(places, residuals, strict=True):
                filled[i] = r
            return inner(filled, cotangents, [positions[x] for x in perturbed])

        xs = tuple(range(len(positions)))
        return Pull(run, xs, self.source, self.pure), [every[i] for i in places]


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False, frozen=True)
class Pull:
    """Cotangents of the `ys` -> gradients of those of the `xs` that are being differentiated."""

    at: Run
    perturbed: Sequence[int]  # positions among the `xs`
    source: Source
    pure: bool = True  # whether the function reads no Ref

    def __repr__(self) -> str:  # as jaxprs show it
        return f"the rule of {self.source}"

    def run(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return self.at(residuals, cotangents, self.perturbed)

    def only(self, some: Sequence[int]) -> "Pull":
        """Return the rule for some of these operands; the others are not being differentiated."""
        return dataclasses.replace(self, perturbed=[self.perturbed[i] for i in some])

    def batched(
        self, axis: Any, dims: Sequence[Any], ys: Sequence[int], mapped: Sequence[bool]
    ) -> "Pull":
        """Return the rule under `vmap`. `dims` and `ys` are the axes of residuals and cotangents.

        All examples share an `x` that is not `mapped`, so its gradients are summed.
        """
        at, is_mapped = self.at, dict(zip(self.perturbed, mapped, strict=True))

        def run(
            residuals: Sequence[Any], cotangents: Sequence[Any], perturbed: Sequence[int]
        ) -> list[Any]:
            over_axis = jax.vmap(
                lambda residuals, cotangents: at(residuals, cotangents, perturbed),
                (list(dims), list(ys)),
                axis_size=axis.size,
                axis_name=axis.name,
                spmd_axis_name=axis.spmd_name,
            )
            gradients = over_axis(list(residuals), list(cotangents))
            return [
                g if g is None or is_mapped[i] else g.sum(0)
                for i, g in zip(perturbed, gradients, strict=True)
            ]

        return dataclasses.replace(self, at=run)

    def derivative(self, count: int, some: Sequence[int]) -> "Pull":
        """Return the rule whose transpose is the derivative of `push` in `some` of the residuals.

        For residuals r, tangents t and cotangents c, `<c, push(r, t)>` is `<rule(r, c), t>`. Seen
        as a function of r, its derivative is a `push`, too: its rule pulls `t` back through
        `r -> rule(r, c)`. It takes the `count` residuals of this rule, and t, as its residuals.
        """
        run_this = self.run

        def run(kept: Sequence[Any], cotangents: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
            residuals, tangents = kept[:count], kept[count:]
            at = [some[i] for i in wanted]

            def gradients(differentiated: Sequence[Any]) -> list[Any]:
                mixed = list(residuals)
                for i, r in zip(at, differentiated, strict=True):
                    mixed[i] = r
                return run_this(mixed, cotangents)

            every, pull_back = jax.vjp(gradients, [residuals[i] for i in at])
            given = [None if g is None else t for g, t in zip(every, tangents, strict=True)]
            return pull_back(given)[0]

        return dataclasses.replace(self, at=run, perturbed=range(len(some)))
