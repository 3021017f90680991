"""What this machine can do: `measure`, called before and after everything else.

Where these rows move between two runs, or between before and after, the machine was busy.
"""

import jax
import jax.numpy as jnp

from benchmarks.results import Group
from benchmarks.timing import race


def measure(case: str, size: str) -> list[Group]:
    numbers = jnp.ones(1 << {"toy": 18, "cpu": 26, "gpu": 28}[size])
    n = {"toy": 256, "cpu": 2048, "gpu": 8192}[size]
    matrix, scalar, empty = jnp.ones((n, n)), jnp.float32(1), jax.jit(lambda x: x)
    groups = []
    for measure, unit, f, args, amount in (
        ("bandwidth", "GB/s", jnp.negative, (numbers,), 2 * numbers.nbytes),
        ("matrix product", "GFLOP/s", jnp.matmul, (matrix, matrix), 2 * n**3),
    ):
        run = jax.jit(f)
        seconds = race({"it": lambda: run(*args)}, size=size, rounds=(5, 50))["values"]["it"]  # noqa: B023
        rate = {f"jnp.{f.__name__}": amount / seconds / 1e9}
        groups.append(Group.counted("machine", case, measure, unit, rate))
    calls = {"empty jitted call": lambda: empty(scalar), "Python call": lambda: None}
    return [*groups, Group("machine", case, "call", "s", **race(calls, size=size))]
