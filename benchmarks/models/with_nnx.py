"""Flax nnx: a decorated method of a module that has the weight."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from benchmarks.models import pair
from tfgrad_jax import custom_gradient


class Layer(nnx.Module):
    def __init__(self, w: Any, layer: Callable[..., Any] | None = None) -> None:
        self.w = nnx.Param(w)
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        assert self.layer is not None
        return self.layer(self.w[...], x)


class Declared(Layer):
    @custom_gradient(variables=lambda self: [self.w[...]])
    def __call__(self, x: Any) -> Any:
        return pair(self.w[...], x)


class Undeclared(Layer):
    @custom_gradient
    def __call__(self, x: Any) -> Any:
        return pair(self.w[...], x)


class Model(nnx.Module):
    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = nnx.List(layers)

    def __call__(self, x: Any) -> Any:
        return functools.reduce(lambda x, layer: layer(x), self.layers, x)


def model(weights: Sequence[Any], layer: Any) -> Callable[[Any], Any]:
    ours = {"declared": Declared, "undeclared": Undeclared}
    make: Any = ours[layer] if layer in ours else functools.partial(Layer, layer=layer)
    return Model([make(w) for w in weights])
