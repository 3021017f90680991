"""The contestants: every way to write a function with its gradient.

A `Rule` is a function with its gradient, written once. Each of `WAYS` turns it into a function that
JAX can differentiate: plainly, by hand, with ours, with the others. `Workload.loss` calls it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results import OURS
from tfgrad_jax import custom_gradient

PLAIN = "plain JAX"
CHECKPOINT = "jax.checkpoint"
HAND = "hand-written"
EVERY = "hand-written, every order"
JVP = "hand-written custom_jvp"
PEERS = (PLAIN, HAND, EVERY, OURS)
REFERENCE = {"forward": HAND, "grad": HAND, "second order": EVERY, "jvp": JVP, "hessian": JVP}

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A function with its gradient."""

    forward: Function  # (*args) -> (y, residuals)
    backward: Function  # (residuals, dy) -> a gradient for each argument
    residuals: Function | None = None  # (y, *args) -> residuals, for who knows `y` already
    push: Function | None = None  # (primals, tangents) -> (y, its tangent)
    captured: int = 0  # ours closes over so many arguments, the first ones,
    how: str = "declared"  # which are "declared" or "undeclared"
    written: Function | None = None  # ours, where it is written out

    def value(self, *args: Any) -> Any:
        return self.forward(*args)[0]

    def pair(self, *args: Any) -> Any:
        """Return the value and the rule, as `tf.custom_gradient` takes them."""
        y, residuals = self.forward(*args)
        backward, many = self.backward, isinstance(y, list)
        return y, lambda *dys: backward(residuals, dys if many else dys[0])


def by_hand(rule: Rule, every_order: bool = False) -> Function:
    """Return a `custom_vjp`; its second derivative is JAX's derivative of its forward rule.

    That is right at every order where the forward rule calls the function itself.
    """
    h = jax.custom_vjp(rule.value)
    residuals = rule.residuals or (lambda y, *args: rule.forward(*args)[1])

    def forward(*args: Any) -> Any:
        y = h(*args)
        return y, residuals(y, *args)

    h.defvjp(forward if every_order else rule.forward, rule.backward)
    return h


def by_jvp(rule: Rule, push: Function | None = None) -> Function:
    """Return a `custom_jvp` with this tangent, or else with the transpose of the backward pass."""

    def transposed(primals: Any, tangents: Any) -> Any:
        y, residuals = rule.forward(*primals)
        moved = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]

        def pull(dy: Any) -> Any:
            gradients = rule.backward(residuals, dy)
            return [gradients[i] for i in moved]

        # Linearized first, because JAX transposes a loop only without what does not depend on dy.
        linear = jax.linearize(pull, jax.tree.map(jnp.zeros_like, y))[1]
        return y, jax.linear_transpose(linear, y)([tangents[i] for i in moved])[0]

    h = jax.custom_jvp(rule.value)
    h.defjvp(push or transposed)
    return h


def ours(rule: Rule) -> Function:
    """Return the rule under `custom_gradient`, which closes over what the rule captures."""
    n, forward, backward = rule.captured, rule.forward, rule.backward
    flat = jax.tree.leaves if rule.how == "undeclared" else lambda gradients: gradients

    def gradients(residuals: Any, dy: Any) -> Any:
        found = backward(residuals, dy)
        return found[n:], flat(found[:n])

    def closing(*args: Any) -> Any:
        weights = args[:n]

        @custom_gradient(variables=weights if rule.how == "declared" else None)
        def h(*inputs: Any) -> Any:
            y, residuals = forward(*weights, *inputs)
            return y, lambda dy, variables: gradients(residuals, dy)

        return h(*args[n:])

    if not n:
        return rule.written or custom_gradient(rule.pair)
    return closing


Way = Callable[[Rule], Function]
WAYS: dict[str, Way] = {
    PLAIN: lambda rule: rule.value,
    CHECKPOINT: lambda rule: jax.checkpoint(rule.value),
    HAND: by_hand,
    EVERY: lambda rule: by_hand(rule, every_order=True),
    JVP: lambda rule: by_jvp(rule, rule.push),
    OURS: ours,
}
