"""The control rows: what this machine can do, measured beside everything else.

A comparison says little where these rows move between two runs: then the machine was busy.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results import Group
from benchmarks.settings import Settings, Task
from benchmarks.timing import compare

SECTION = "machine"


def tasks(settings: Settings) -> Iterator[Task]:
    yield Task(SECTION, "before", lambda: control("before", settings))


def after(settings: Settings) -> Task:
    """The same again when all else is done."""
    return Task(SECTION, "after", lambda: control("after", settings))


def control(case: str, settings: Settings) -> list[Group]:
    """Measure the bandwidth of a copy, the rate of a matrix product, and an empty call."""
    nbytes = 1 << (20 if settings.quick else 28)
    size = 256 if settings.quick else 2048
    scalar = jnp.float32(1)
    empty = jax.jit(lambda x: x)
    contestants = {"empty jitted call": lambda: empty(scalar), "Python call": lambda: None}
    calls = compare(contestants, seconds=settings.scale)
    copy = {"jnp.negative": bandwidth(nbytes, settings) / 1e9}
    product = {"jnp.matmul": product_rate(jnp.float32, settings, size) / 1e9}
    return [
        Group.counted(SECTION, case, "bandwidth", "GB/s", copy, f"of {nbytes >> 20} MiB"),
        Group.counted(SECTION, case, "matrix product", "GFLOP/s", product, f"{size} x {size}"),
        Group.timed(SECTION, case, "call", calls),
    ]


@functools.cache
def _negate() -> Any:
    return jax.jit(jnp.negative)


def bandwidth(nbytes: int, settings: Settings) -> float:
    """Return the bytes read and written a second, by copying so many with the sign changed."""
    numbers = jnp.ones(nbytes // 4, jnp.float32)
    negate = _negate()
    run = {"copy": lambda: negate(numbers)}
    times = compare(run, seconds=settings.scale, rounds=(5, 50)).times
    return 2 * numbers.nbytes / times["copy"].median


def product_rate(dtype: Any, settings: Settings, size: int = 2048) -> float:
    """Return the floating-point operations a second of a large matrix product."""
    if size == 2048 and jax.default_backend() == "gpu":
        size = 8192
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    run = {"matmul": lambda: product(matrix, matrix)}
    times = compare(run, seconds=settings.scale, rounds=(5, 50)).times
    return 2 * size**3 / times["matmul"].median
