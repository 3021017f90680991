"""How the cost grows with the layers of a model, as users of each library write it.

Each function of `KINDS` gets a `layer`, and returns what makes a model of some weights. `layer` is
a function of a weight and the input; or "declared" or "undeclared": then each layer of the model
has a custom gradient that closes over its weight. A library that is not installed takes no part.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp

from benchmarks.results import OURS
from benchmarks.ways import EVERY, PLAIN, WAYS, Function, Rule, Way
from benchmarks.workload import Workload, normal
from tfgrad_jax import custom_gradient

PREFIX = "layers of "
SIZES = [8, 64]
MEASURES = "trace grad", "eager grad"
ENDS = ", declared", ""  # of the name of a workload: how its weights are closed over

Build = Callable[[Sequence[Any]], Function]


def forward(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w)
    return y, (w, x, y)


def backward(residuals: Any, dy: Any) -> Any:
    w, x, y = residuals
    d = dy * (1 - y * y)
    return x.T @ d, d @ w.T


LAYER = Rule(forward, backward, residuals=lambda y, w, x: (w, x, y))


def pair(w: Any, x: Any) -> Any:
    """Return the value of a layer and its rule, with the weight as a variable."""
    y, residuals = forward(w, x)

    def rule(dy: Any, variables: Any) -> Any:
        dw, dx = backward(residuals, dy)
        return dx, [dw]

    return y, rule


def _around(layer: Any, weight: Function, pair: Function = pair) -> Function:
    """Return a layer as a function that closes over what has its weight."""

    def apply(x: Any) -> Any:
        if callable(layer):
            return layer(weight(), x)
        variables = [weight()] if layer == "declared" else None
        return custom_gradient(lambda x: pair(weight(), x), variables=variables)(x)

    return apply


def _method(layer: Any, weight: Function) -> Any:
    """Return a layer as a method of an object that has the weight."""
    if callable(layer):
        return lambda self, x: layer(weight(self), x)
    variables = (lambda self: [weight(self)]) if layer == "declared" else None
    return custom_gradient(lambda self, x: pair(weight(self), x), variables=variables)


def _chain(layers: Sequence[Function]) -> Function:
    return lambda x: functools.reduce(lambda x, layer: layer(x), layers, x)


def all_weights(layer: Any) -> Build:
    """Functions that close over the weights of all layers, and of which each uses one."""
    return lambda weights: _chain(
        [_around(layer, lambda i=i: weights[i]) for i in range(len(weights))]
    )


def equinox(layer: Any) -> Build:
    import equinox as eqx

    class Layer(eqx.Module):
        w: Any
        __call__ = _method(layer, lambda self: self.w)

    return lambda weights: _chain([Layer(w) for w in weights])


def nnx(layer: Any) -> Build:
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, w: Any) -> None:
            self.w = nnx.Param(w)

        __call__ = _method(layer, lambda self: self.w[...])

    return lambda weights: _chain([Layer(w) for w in weights])


def linen_self(layer: Any) -> Build:
    """A decorated function in a compact method, around the weight and `self`."""
    from flax import linen

    class Layer(linen.Module):
        def pair(self, w: Any, x: Any) -> Any:
            return pair(w, x)

        @linen.compact
        def __call__(self, x: Any) -> Any:
            w = self.param("w", lambda key: jnp.zeros((x.shape[-1],) * 2))
            return _around(layer, lambda: w, self.pair)(x)

    class Model(linen.Module):
        depth: int

        @linen.compact
        def __call__(self, x: Any) -> Any:
            return _chain([Layer(name=f"layer{i}") for i in range(self.depth)])(x)

    def build(weights: Sequence[Any]) -> Function:
        params = {"params": {f"layer{i}": {"w": w} for i, w in enumerate(weights)}}
        return lambda x: Model(len(weights)).apply(params, x)

    return build


# What is closed over: the models, and the package that they need.
KINDS: dict[str, tuple[Callable[[Any], Build], str]] = {
    "all weights": (all_weights, "jax"),
    "equinox": (equinox, "equinox"),
    "nnx": (nnx, "flax"),
    "linen, self": (linen_self, "flax"),
}


def _loss(kind: str, ours: str, way: Way, size: Any) -> Function:
    build = KINDS[kind][0](ours if way is WAYS[OURS] else way(LAYER))
    return lambda weights, x: jnp.sum(build(weights)(x))


def _arguments(count: int, dtype: Any) -> Any:
    return [normal(i, (8, 8), dtype, 8**-0.5) for i in range(count)], normal(99, (4, 8), dtype)


def _workload(kind: str, end: str) -> Workload:
    loss = functools.partial(_loss, kind, "declared" if end else "undeclared")
    sizes = [2, 4], SIZES, SIZES
    ways = PLAIN, EVERY, OURS
    return Workload(PREFIX + kind + end, loss, _arguments, sizes, MEASURES, ways, section="growth")


LAYERS = tuple(
    _workload(kind, end)
    for kind, (_, package) in KINDS.items()
    if find_spec(package)
    for end in ENDS
)
