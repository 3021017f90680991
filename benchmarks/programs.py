"""What the compiler made of a function: exact numbers, the same at every run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Program(NamedTuple):
    flops: float
    bytes_accessed: float
    temp_bytes: float
    peak_bytes: float | None  # where the installed JAX tells it

    @property
    def counts(self) -> dict[str, float]:
        return {
            "flops": self.flops,
            "bytes accessed": self.bytes_accessed,
            "temp memory": self.temp_bytes,
        }


def analyze(f: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Compile a function for these arguments and return what the compiler says of it."""
    return analysis(jax.jit(f).lower(*args).compile())


def analysis(compiled: Any) -> Program:
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    memory = compiled.memory_analysis()
    return Program(
        cost.get("flops", 0.0),
        cost.get("bytes accessed", 0.0),
        memory.temp_size_in_bytes,
        getattr(memory, "peak_memory_in_bytes", None),
    )
