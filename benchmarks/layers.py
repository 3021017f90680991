"""How the cost grows with the layers of a model: the models of `benchmarks/models/`.

A library that is not installed takes no part.
"""

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp

from benchmarks.models import backward, forward
from benchmarks.results import OURS
from benchmarks.ways import EVERY, PLAIN, Function, Rule, Way
from benchmarks.workload import Workload, normal

PREFIX = "layers of "
SIZES = [8, 64]
MEASURES = "trace grad", "eager grad"
WAYS = PLAIN, EVERY, OURS
ENDS = ", declared", ""  # of the name of a workload: how its weights are captured
LAYER = Rule(forward, backward, residuals=lambda y, w, x: (w, x, y))

# What is closed over: the module of the model, and the package that it needs.
KINDS = {
    "all weights": ("of_all_weights", "jax"),
    "equinox": ("with_equinox", "equinox"),
    "nnx": ("with_nnx", "flax"),
    "linen, self": ("with_linen", "flax"),
    "Haiku": ("with_haiku", "haiku"),
}


def _loss(kind: str, ours: str, way: Way, size: Any) -> Function:
    model = importlib.import_module(f"benchmarks.models.{KINDS[kind][0]}").model
    layer = ours if way.name == OURS else way(LAYER)
    return lambda weights, x: jnp.sum(model(weights, layer)(x))


def _arguments(count: int, dtype: Any) -> Any:
    return [normal(i, (8, 8), dtype, 8**-0.5) for i in range(count)], normal(99, (4, 8), dtype)


def _workload(kind: str, end: str) -> Workload:
    loss = functools.partial(_loss, kind, "declared" if end else "undeclared")
    sizes = [2, 4], SIZES, SIZES
    return Workload(PREFIX + kind + end, loss, _arguments, sizes, MEASURES, WAYS, section="growth")


LAYERS = tuple(
    _workload(kind, end)
    for kind, (_, package) in KINDS.items()
    if find_spec(package)
    for end in ENDS
)
