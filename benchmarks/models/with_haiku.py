"""Haiku: a decorated function in a method, around the weight."""

from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax.numpy as jnp

from benchmarks.models import pair
from tfgrad_jax import custom_gradient


class Layer(hk.Module):
    def __init__(self, layer: Any, name: str) -> None:
        super().__init__(name)
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        w = hk.get_parameter("w", (x.shape[-1],) * 2, init=jnp.zeros)
        if callable(self.layer):
            return self.layer(w, x)
        variables = [w] if self.layer == "declared" else None
        return custom_gradient(lambda x: pair(w, x), variables=variables)(x)


def model(weights: Sequence[Any], layer: Any) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
        for i in range(len(weights)):
            x = Layer(layer, name=f"layer{i}")(x)
        return x

    params = {f"layer{i}": {"w": w} for i, w in enumerate(weights)}
    return lambda x: hk.without_apply_rng(hk.transform(apply)).apply(params, x)
