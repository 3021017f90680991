"""The derivative of one call, as a pytree: what the forward pass hands to the backward pass.

`grad_fn` is a closure over values of the forward pass, and JAX must carry these from one to the
other itself. `rule_of` finds them in the closure (`cells.dissect`), so that the backward pass
calls the same `grad_fn` around other values; where they cannot be seen there, it traces
`grad_fn` to a jaxpr and finds them among its constants.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.tree_util import register_pytree_node

from tfgrad_jax._compat import cotangent_type
from tfgrad_jax._frontend.grad_fn import Contract, NeedsValuesError, Variables
from tfgrad_jax._frontend.structure import Outputs
from tfgrad_jax._jaxpr import evaluate, without_consts
from tfgrad_jax._source import Source

from .cells import dissect, snapshot

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


class Given(NamedTuple):
    """The variables of a rule, and their values now."""

    variables: Variables
    traced: Sequence[Any]

    def value(self) -> Any:
        return self.variables.value(self.traced)


def rule_of(
    contract: Contract,
    grad_fn: Callable[..., Any],
    leaves: Sequence[Any],
    outputs: Outputs,
    given: Given | None,
    traced: bool,
) -> tuple[Run, list[Any]]:
    """Return how to run `grad_fn`, and its residuals.

    Its results are the gradients of the traced inputs, then of the traced variables. Where nothing
    is `traced`, there are no residuals. A variable that `grad_fn` also closes over is the same
    residual: `v is w` holds in it.
    """
    variables = None if given is None else given.variables

    def as_it_is() -> tuple[Run, list[Any]]:
        own, values = snapshot(grad_fn), None if given is None else given.value()

        def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            return contract.gradients(own, outputs, cotangents, variables, values)

        return run, []

    if not traced:
        return as_it_is()
    found = dissect([grad_fn, *([] if given is None else given.traced)])
    if found is not None:
        skeleton, residuals = found

        def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            own, *moving = skeleton(residuals)
            values = None if variables is None else variables.value(moving)
            return contract.gradients(own, outputs, cotangents, variables, values)

        return run, residuals
    try:
        return _traced_rule(contract, grad_fn, leaves, outputs, given)
    except NeedsValuesError:
        # It branches on values, so these are concrete one level down, where it will run.
        return as_it_is()


def _traced_rule(
    contract: Contract,
    grad_fn: Callable[..., Any],
    leaves: Sequence[Any],
    outputs: Outputs,
    given: Given | None,
) -> tuple[Run, list[Any]]:
    """Trace `grad_fn` on upstreams like the outputs `leaves`; residuals are what it captured."""
    variables, values = (None, None) if given is None else (given.variables, given.value())
    present: list[bool] = []  # a jaxpr has no None among its results: keep the pattern beside it

    def gradients(cotangents: Sequence[Any]) -> list[Any]:
        results = contract.gradients(grad_fn, outputs, cotangents, variables, values)
        present[:] = [g is not None for g in results]
        return [g for g in results if g is not None]

    closed = jax.make_jaxpr(gradients)([cotangent_type(leaves[i]) for i in outputs.differentiable])
    jaxpr = without_consts(closed)
    traced = [i for i, c in enumerate(closed.consts) if isinstance(c, Tracer)]
    residuals = [closed.consts[i] for i in traced]
    consts = [None if isinstance(c, Tracer) else c for c in closed.consts]

    def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        filled = list(consts)
        for i, residual in zip(traced, residuals, strict=True):
            filled[i] = residual
        results = iter(evaluate(jaxpr, *filled, *cotangents))
        return [next(results) if p else None for p in present]

    return run, residuals
