"""What this machine can do: `measure`, called before and after everything else.

Where these rows move between two runs, or between before and after, the machine was busy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results import Group
from benchmarks.timing import race


@functools.cache
def bandwidth(size: str, dtype: Any = jnp.float32) -> float:
    """Return the bytes read and written a second, by copying with the sign changed."""
    numbers = jnp.ones(1 << {"toy": 18, "cpu": 26, "gpu": 28}[size], dtype)
    return 2 * numbers.nbytes / _seconds(jnp.negative, (numbers,), size)


@functools.cache
def product_rate(size: str, dtype: Any = jnp.float32) -> float:
    """Return the floating-point operations a second of a large matrix product."""
    n = {"toy": 256, "cpu": 2048, "gpu": 8192}[size]
    return 2 * n**3 / _seconds(jnp.matmul, (jnp.ones((n, n), dtype),) * 2, size)


def _seconds(f: Any, args: tuple[Any, ...], size: str) -> float:
    run = jax.jit(f)
    return race({"it": lambda: run(*args)}, size=size, rounds=(5, 50))["values"]["it"]


def measure(case: str, size: str) -> list[Group]:
    bandwidth.cache_clear()
    product_rate.cache_clear()
    scalar, empty = jnp.float32(1), jax.jit(lambda x: x)
    calls = {"empty jitted call": lambda: empty(scalar), "Python call": lambda: None}
    copy, product = bandwidth(size) / 1e9, product_rate(size) / 1e9
    return [
        Group.counted("machine", case, "bandwidth", "GB/s", {"jnp.negative": copy}),
        Group.counted("machine", case, "matrix product", "GFLOP/s", {"jnp.matmul": product}),
        Group("machine", case, "call", "s", **race(calls, size=size)),
    ]
