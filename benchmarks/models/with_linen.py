"""Flax linen: a decorated function in a compact method, around the weight and `self`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen

from benchmarks.models import pair
from tfgrad_jax import custom_gradient


class Layer(linen.Module):
    layer: Any

    def pair(self, w: Any, x: Any) -> Any:
        return pair(w, x)

    @linen.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", lambda key: jnp.zeros((x.shape[-1],) * 2))
        if callable(self.layer):
            return self.layer(w, x)
        variables = [w] if self.layer == "declared" else None
        return custom_gradient(lambda x: self.pair(w, x), variables=variables)(x)


class Model(linen.Module):
    depth: int
    layer: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for i in range(self.depth):
            x = Layer(self.layer, name=f"layer{i}")(x)
        return x


def model(weights: Sequence[Any], layer: Any) -> Callable[[Any], Any]:
    params = {"params": {f"layer{i}": {"w": w} for i, w in enumerate(weights)}}
    return lambda x: Model(len(weights), layer).apply(params, x)
