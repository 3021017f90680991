"""Equinox: a decorated method of a module that has the weight."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx

from benchmarks.models import pair
from tfgrad_jax import custom_gradient


class Layer(eqx.Module):
    w: Any
    layer: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.layer(self.w, x)


class Declared(eqx.Module):
    w: Any

    @custom_gradient(variables=lambda self: [self.w])
    def __call__(self, x: Any) -> Any:
        return pair(self.w, x)


class Undeclared(eqx.Module):
    w: Any

    @custom_gradient
    def __call__(self, x: Any) -> Any:
        return pair(self.w, x)


class Model(eqx.Module):
    layers: list[Any]

    def __call__(self, x: Any) -> Any:
        return functools.reduce(lambda x, layer: layer(x), self.layers, x)


def model(weights: Sequence[Any], layer: Any) -> Callable[[Any], Any]:
    ours = {"declared": Declared, "undeclared": Undeclared}
    make: Any = ours[layer] if layer in ours else functools.partial(Layer, layer=layer)
    return Model([make(w) for w in weights])
