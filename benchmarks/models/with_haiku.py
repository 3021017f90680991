"""Haiku: a decorated function in a method, around the weight, or `self` as well."""

from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax.numpy as jnp

from benchmarks.models import pair
from tfgrad_jax import custom_gradient


class Layer(hk.Module):
    def __init__(self, layer: Any, of_self: bool, name: str) -> None:
        super().__init__(name)
        self.layer, self.of_self = layer, of_self

    def pair(self, w: Any, x: Any) -> Any:
        return pair(w, x)

    def __call__(self, x: Any) -> Any:
        w = hk.get_parameter("w", (x.shape[-1],) * 2, init=jnp.zeros)
        if callable(self.layer):
            return self.layer(w, x)
        variables = [w] if self.layer == "declared" else None
        if self.of_self:
            return custom_gradient(lambda x: self.pair(w, x), variables=variables)(x)
        return custom_gradient(lambda x: pair(w, x), variables=variables)(x)


def model(weights: Sequence[Any], layer: Any, of_self: bool = False) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
        for i in range(len(weights)):
            x = Layer(layer, of_self, name=f"layer{i}")(x)
        return x

    params = {f"layer{i}": {"w": w} for i, w in enumerate(weights)}
    return lambda x: hk.without_apply_rng(hk.transform(apply)).apply(params, x)
