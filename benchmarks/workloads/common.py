"""A workload: one loss, written with plain autodiff, `jax.checkpoint`, by hand, and with ours.

The hand-written rule and ours run the same `forward` and `backward`, so that their compiled
programs can be compared operation for operation.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.results import CHECKPOINT, HAND, OURS, OURS_FORWARD, PLAIN
from tfgrad_jax import custom_gradient

Function = Callable[..., Any]
SIZES = ("tiny", "full", "gpu")


class Workload(NamedTuple):
    name: str
    arguments: Callable[[str, Any], tuple[Any, ...]]  # (one of SIZES, dtype) -> arguments
    losses: Mapping[str, Function]
    argnums: tuple[int, ...]
    step: Callable[[Function], Function] | None = None  # loss -> what is timed, if not its gradient
    traffic: Callable[..., float] | None = None  # arguments -> least bytes to read and write
    work: Callable[..., float] | None = None  # arguments -> flops of the matrix products
    timed: bool = True
    note: str = ""

    def timed_function(self, name: str) -> Function:
        loss = self.losses[name]
        if self.step is not None:
            return self.step(loss)
        return jax.value_and_grad(loss, self.argnums)

    def gradient(self, name: str) -> Function:
        return jax.value_and_grad(self.losses[name], self.argnums)


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Draw on the host, so that all precisions get the same numbers."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return jax.numpy.asarray(values * np.float32(scale), dtype)


def by_hand(forward: Function, backward: Function) -> Function:
    """Return a `jax.custom_vjp`: `forward` returns the value and the residuals."""
    h = jax.custom_vjp(lambda *args: forward(*args)[0])
    h.defvjp(forward, backward)
    return h


def with_ours(forward: Function, backward: Function, forward_mode: bool = False) -> Function:
    @custom_gradient(forward_mode=forward_mode)
    def h(*args: Any) -> Any:
        y, residuals = forward(*args)
        return y, lambda dy: backward(residuals, dy)

    return h


def four_ways(
    plain: Function, forward: Function, backward: Function, loss: Callable[[Function], Function]
) -> dict[str, Function]:
    """Return the losses around a function of inputs alone."""
    return {
        PLAIN: loss(plain),
        CHECKPOINT: loss(jax.checkpoint(plain)),
        HAND: loss(by_hand(forward, backward)),
        OURS: loss(with_ours(forward, backward)),
        OURS_FORWARD: loss(with_ours(forward, backward, forward_mode=True)),
    }
