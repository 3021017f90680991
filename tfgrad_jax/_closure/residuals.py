"""The derivative of one call, as a pytree: what the forward pass hands to the backward pass.

`grad_fn` is a closure over values of the forward pass, and JAX must carry these from one to the
other itself. `rule_of` finds them in the closure (`cells.dissect`), so that the backward pass
calls the same `grad_fn` around other values; where they cannot be seen there, it traces
`grad_fn` to a jaxpr and finds them among its constants.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.core import Tracer
from jax.tree_util import register_pytree_node

from tfgrad_jax._compat import cotangent_type
from tfgrad_jax._frontend.grad_fn import Gradients, NeedsValuesError, run_traced
from tfgrad_jax._source import Source

from .cells import dissect, snapshot
from .traced import traced

Run = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


@dataclasses.dataclass(eq=False)
class Static:
    """What a `Rule` is beside its residuals."""

    run: Run  # residuals, cotangents -> a gradient, or None, for each operand
    outputs: Sequence[int]  # positions of those that have cotangents
    moved: Sequence[int]  # positions of the operands that have gradients
    source: Source
    refuse: Callable[[Mapping[int, bool]], None] | None  # what has none, by what is perturbed


@dataclasses.dataclass(eq=False, slots=True)
class Rule:
    """The derivative of a program at a point: cotangents of the outputs -> of the operands.

    A pytree, so that JAX can carry it from the forward to the backward pass: its leaves are
    the residuals, and all else is static.
    """

    static: Static
    residuals: Sequence[Any]

    def __call__(self, cotangents: Sequence[Any]) -> list[Any]:
        """Return the cotangent of each operand, or None where it is zero."""
        return self.static.run(self.residuals, cotangents)


register_pytree_node(
    Rule,
    lambda rule: (rule.residuals, rule.static),
    lambda static, residuals: Rule(static, residuals),
)


def is_traced(values: Sequence[Any]) -> bool:
    """Return whether JAX is tracing any of the values."""
    return any(isinstance(v, Tracer) for v in values)


def rule_of(
    gradients: Gradients, parts: Sequence[Any], ys: Sequence[Any], moving: bool
) -> tuple[Run, list[Any]]:
    """Return how to run a rule, which consists of `parts`, and its residuals.

    What holds tracers where they cannot be replaced is traced first. Where nothing is `moving`, the
    rule runs as it is, and so does one that branches on values: these are concrete one level down,
    where it will run.
    """
    found = dissect(parts) if moving else None
    if moving and found is None:
        with contextlib.suppress(*NeedsValuesError):
            found = dissect([traced_rule(gradients, parts, ys)])
            gradients = run_traced
    if found is None:
        now = [snapshot(parts[0]), *parts[1:]]
        return lambda residuals, cotangents: gradients(now, cotangents), []
    skeleton, residuals = found
    return lambda residuals, cotangents: gradients(skeleton(residuals), cotangents), residuals


def traced_rule(gradients: Gradients, parts: Sequence[Any], ys: Sequence[Any]) -> Callable[..., Any]:
    """Return a rule as a function of cotangents, which holds its residuals in a list."""
    return traced(lambda *cotangents: gradients(parts, cotangents), *map(cotangent_type, ys))
