"""Evaluate jaxprs of the user's functions: `evaluate` runs wherever a traced one is needed."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

# Up to JAX 0.6, the batching rule of a custom_vjp inside a jaxpr fails if it is differentiated
# at the same time. Remove when JAX 0.7 is the oldest supported.
_BATCHES_TOO_LATE = hasattr(jax.custom_derivatives, "custom_vjp_call_jaxpr_p")


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluate a jaxpr, equation by equation."""
    if _BATCHES_TOO_LATE and any(e.primitive.name.startswith("custom_vjp") for e in jaxpr.eqns):

        def staged(consts: Sequence[Any], *args: Any) -> list[Any]:
            return jax.core.eval_jaxpr(jaxpr, consts, *args)

        keep_all = jax.checkpoint_policies.everything_saveable
        return jax.checkpoint(staged, policy=keep_all)(consts, *args)  # batched first
    return jax.core.eval_jaxpr(jaxpr, consts, *args)
