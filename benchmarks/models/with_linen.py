"""Flax linen: a decorated function in a compact method, around the weight, or `self` as well."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen

from benchmarks.models import pair
from tfgrad_jax import custom_gradient


class Layer(linen.Module):
    layer: Any
    of_self: bool

    def pair(self, w: Any, x: Any) -> Any:
        return pair(w, x)

    @linen.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", lambda key: jnp.zeros((x.shape[-1],) * 2))
        if callable(self.layer):
            return self.layer(w, x)
        variables = [w] if self.layer == "declared" else None
        if self.of_self:
            return custom_gradient(lambda x: self.pair(w, x), variables=variables)(x)
        return custom_gradient(lambda x: pair(w, x), variables=variables)(x)


class Model(linen.Module):
    depth: int
    layer: Any
    of_self: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for i in range(self.depth):
            x = Layer(self.layer, self.of_self, name=f"layer{i}")(x)
        return x


def model(weights: Sequence[Any], layer: Any, of_self: bool = False) -> Callable[[Any], Any]:
    params = {"params": {f"layer{i}": {"w": w} for i, w in enumerate(weights)}}
    return lambda x: Model(len(weights), layer, of_self).apply(params, x)
