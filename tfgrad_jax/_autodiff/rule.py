"""The derivative of a function at a point, in two forms.

`Rule` is a pytree, which JAX carries from the forward to the backward pass: the residuals are its
leaves. `Pull` is a parameter of our primitives, which carry the residuals themselves; what `vmap`
makes of a rule is here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.tree_util import register_pytree_node

from tfgrad_jax._compat import is_ref
from tfgrad_jax._source import Source

# Residuals, cotangents of the outputs -> a gradient, or None, for each operand.
Run: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


@dataclasses.dataclass(eq=False, slots=True)
class Static:
    """What a rule is beside its residuals."""

    run: Run
    outputs: Sequence[int]  # positions of the outputs that have cotangents
    moved: Sequence[int]  # positions of the operands that have gradients
    source: Source
    pure: bool  # whether no operand is a Ref


@dataclasses.dataclass(eq=False, slots=True)
class Rule:
    """Cotangents of the outputs -> a gradient, or None, for each operand."""

    residuals: Sequence[Any]
    static: Static

    def __call__(self, cotangents: Sequence[Any]) -> list[Any]:
        return self.static.run(self.residuals, cotangents)

    def pull(self) -> tuple["Pull", list[Any]]:
        """Return the rule for the operands that have gradients, and its residuals, Refs apart.

        A primitive takes no Refs. The rule reads and writes them.
        """
        static, every = self.static, list(self.residuals)
        places = [i for i, r in enumerate(every) if not is_ref(r)]
        refs = [r if is_ref(r) else None for r in every]

        def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            filled = list(refs)
            for i, r in zip(places, residuals, strict=True):
                filled[i] = r
            found = static.run(filled, cotangents)
            return [found[i] for i in static.moved]

        return Pull(run, static.source, static.pure), [every[i] for i in places]


register_pytree_node(
    Rule,
    lambda rule: (rule.residuals, rule.static),
    lambda static, residuals: Rule(residuals, static),
)


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False, frozen=True)
class Pull:
    """A rule as the primitives know it: cotangents of the `ys` -> gradients of the `xs`."""

    run: Run
    source: Source
    pure: bool = True  # whether the function reads no Ref

    def __repr__(self) -> str:  # as jaxprs show it
        return f"the rule of {self.source}"

    def only(self, some: Sequence[int]) -> "Pull":
        """Return the rule for some of the `xs`."""

        def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            found = self.run(residuals, cotangents)
            return [found[i] for i in some]

        return dataclasses.replace(self, run=run)

    def batched(
        self, axis: Any, dims: Sequence[Any], ys: Sequence[int], mapped: Sequence[bool]
    ) -> "Pull":
        """Return the rule over an axis: `dims` and `ys` say where residuals and cotangents have it.

        The gradients of the `xs` that are not `mapped` are summed.
        """

        def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            found = jax.vmap(
                self.run, (list(dims), list(ys)), 0, axis_size=axis.size, axis_name=axis.name,
                spmd_axis_name=axis.spmd_name,
            )(list(residuals), list(cotangents))  # fmt: skip
            return [g if g is None or m else g.sum(0) for g, m in zip(found, mapped, strict=True)]

        return dataclasses.replace(self, run=run)
