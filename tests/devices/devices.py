"""Meshes of eight devices, and a comparison of what two programs do on them."""

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh
from support.helpers import assert_same

needs_eight_devices = pytest.mark.skipif(
    "jax.device_count() < 8", reason="needs eight devices; `conftest.py` makes them of a CPU"
)
_COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


def mesh(*axes: tuple[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(axes))


def collectives(compiled: jax.stages.Compiled) -> collections.Counter[str]:
    return collections.Counter(_COLLECTIVE.findall(compiled.as_text()))


def squared(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradients of a loss whose derivative has the value of `f` in it."""
    return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1))


def assert_as_by_hand(ours: Callable[..., Any], hand: Callable[..., Any], *args: Any) -> Any:
    """Compare values, placements and the number of collectives, and return both."""
    by_us, by_hand = (jax.jit(f).lower(*args).compile() for f in (ours, hand))
    actual, expected = by_us(*args), by_hand(*args)
    assert_same(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)
        assert jax.typeof(a) == jax.typeof(b)  # with explicit axes, the sharding is in the type
    assert collectives(by_us) == collectives(by_hand)
    return actual, collectives(by_us)
