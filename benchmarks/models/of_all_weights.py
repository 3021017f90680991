"""Functions that close over the weights of all layers, and of which each uses one."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.models import pair
from tfgrad_jax import custom_gradient


def model(weights: Sequence[Any], layer: Any) -> Callable[[Any], Any]:
    def apply(x: Any, i: int) -> Any:
        if callable(layer):
            return layer(weights[i], x)
        variables = [weights[i]] if layer == "declared" else None
        return custom_gradient(lambda x: pair(weights[i], x), variables=variables)(x)

    return lambda x: functools.reduce(apply, range(len(weights)), x)
