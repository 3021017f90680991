"""What this machine can do, measured before and after everything else.

Where these rows move between two runs, or between before and after, the machine was busy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results import Group
from benchmarks.timing import Settings, compare

SECTION = "machine"


def measure(case: str, settings: Settings) -> list[Group]:
    bandwidth.cache_clear()
    product_rate.cache_clear()
    scalar, empty = jnp.float32(1), jax.jit(lambda x: x)
    contestants = {"empty jitted call": lambda: empty(scalar), "Python call": lambda: None}
    calls = compare(contestants, seconds=settings.scale)
    copy = {"jnp.negative": bandwidth(settings) / 1e9}
    product = {"jnp.matmul": product_rate(settings) / 1e9}
    return [
        Group.counted(SECTION, case, "bandwidth", "GB/s", copy),
        Group.counted(SECTION, case, "matrix product", "GFLOP/s", product),
        Group.timed(SECTION, case, "call", calls),
    ]


@functools.cache
def bandwidth(settings: Settings, dtype: Any = jnp.float32) -> float:
    """Return the bytes read and written a second, by copying with the sign changed."""
    numbers = jnp.ones(1 << {"toy": 18, "cpu": 26, "gpu": 28}[settings.size], dtype)
    return 2 * numbers.nbytes / _seconds(jnp.negative, (numbers,), settings)


@functools.cache
def product_rate(settings: Settings, dtype: Any = jnp.float32) -> float:
    """Return the floating-point operations a second of a large matrix product."""
    size = {"toy": 256, "cpu": 2048, "gpu": 8192}[settings.size]
    matrix = jnp.ones((size, size), dtype)
    return 2 * size**3 / _seconds(jnp.matmul, (matrix, matrix), settings)


def _seconds(f: Any, args: tuple[Any, ...], settings: Settings) -> float:
    compiled = jax.jit(f)
    measured = compare({"it": lambda: compiled(*args)}, None, settings.scale, (5, 50))
    return measured.times["it"].median
