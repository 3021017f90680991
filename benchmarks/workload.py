"""One way to declare what is measured: a `Workload`, from which every measurement follows.

It is a loss written in several ways, with arguments for each size. `measure` checks that all ways
agree, then takes a measure, which is named by how and what:

- "eager grad", "eager jvp", ...: `jit` is never called;
- "trace grad", "trace hessian", ...: `jax.jit(...).trace`, of a function that JAX has not seen;
- "run grad": the compiled program is called;
- "program grad", "program jvp", ...: what the compiler says, and nothing runs.

Where a size is a list of sizes, each measure is taken at each of them: the growth.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import OURS, Group
from benchmarks.timing import SIZES, race
from benchmarks.ways import CHECKPOINT, HAND, JVP, PLAIN, REFERENCE, WAYS, Function, Rule, Way

COUNTS = ("flops", "bytes accessed", "temp memory")  # the last two in bytes
TOLERANCE = 1e-9  # in float64, relative to the largest entry


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    name: str
    loss: Callable[[Way, Any], Function]  # (way, size) -> loss(params, *data)
    arguments: Callable[[Any, Any], tuple[Any, ...]]  # (size, dtype) -> (params, *data)
    sizes: tuple[Any, Any, Any]  # one for each of `SIZES`
    measures: tuple[str, ...] = ("run grad", "program grad", "program second order", "program jvp")
    ways: tuple[str, ...] = (PLAIN, CHECKPOINT, HAND, OURS)  # of what is no other derivative
    section: str = "workloads"

    def contestants(self, mode: str) -> tuple[str, ...]:
        if mode in ("forward", "grad"):
            return self.ways
        both = (JVP,) if JVP in self.ways else ()
        return tuple(dict.fromkeys((PLAIN, REFERENCE[mode], *both, OURS)))

    def function(self, mode: str, way: str, size: Any) -> Function:
        """Return what is measured, as a function of the arguments."""
        return derivative(mode, self.loss(WAYS[way], size))


def derivative(mode: str, f: Function) -> Function:
    """Return a derivative of `f` for its first argument."""
    gradient = jax.value_and_grad(f)

    def total(*args: Any) -> Any:
        return sum(jnp.sum(g) for g in jax.tree.leaves(gradient(*args)[1]))

    return {
        "forward": f,
        "grad": gradient,
        "second order": jax.grad(total),
        "jvp": lambda params, *data: jax.jvp(lambda p: f(p, *data), (params,), (params,)),
        "hessian": jax.hessian(f),
    }[mode]


def of(rule: Rule, loss: Callable[[Function], Function] = lambda h: h, **changes: Any) -> Any:
    """Return the loss of a workload that is about one rule, with so many changes."""
    rule = dataclasses.replace(rule, **changes)
    return lambda way, size: loss(way(rule))


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype) * jnp.asarray(scale, dtype)


@functools.cache
def check(workload: Workload) -> dict[str, float]:
    """Return the largest relative error of each contestant in float64; raise where one is wrong."""
    errors = dict.fromkeys(workload.ways, 0.0)
    size = workload.sizes[0][-1] if isinstance(workload.sizes[0], list) else workload.sizes[0]
    with jax.enable_x64(True):
        args = workload.arguments(size, jnp.float64)
        for mode in dict.fromkeys(m.partition(" ")[2] for m in workload.measures):
            expected = None
            for way in workload.contestants(mode):
                found = jax.jit(workload.function(mode, way, size))(*args)
                got = [np.asarray(x) for x in jax.tree.leaves(found)]
                expected = expected or got
                error = max(map(_error, got, expected))
                if not error < TOLERANCE:
                    raise AssertionError(f"{workload.name}, {mode}, {way}: error {error:.1e}")
                errors[way] = max(error, errors.get(way, 0.0))
    return errors


def _error(got: Any, expected: Any) -> float:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise AssertionError(f"{got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}")
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


def measure(workload: Workload, what: str, size: str) -> list[Group]:
    """Check a workload, then take a measure at one of `SIZES`, or at each of its sizes."""
    check(workload)
    chosen = workload.sizes[SIZES.index(size)]
    if isinstance(chosen, list):
        points = [_race(workload, what, size, n, f" at {n}") for n in chosen]
        return [*points, _slope(points, what, chosen)]
    if what.startswith("program "):
        return _programs(workload, what.removeprefix("program "), chosen)
    return [_race(workload, what, size, chosen)]


def _race(workload: Workload, what: str, size: str, chosen: Any, at: str = "") -> Group:
    how, _, mode = what.partition(" ")
    args = workload.arguments(chosen, jnp.float32)

    def call(way: str) -> Callable[[], Any]:
        f = workload.function(mode, way, chosen)
        if how == "trace":
            return lambda: jax.jit(lambda *a: f(*a)).trace(*args)
        f = jax.jit(f) if how == "run" else f
        return lambda: f(*args)

    calls = {way: call(way) for way in workload.contestants(mode)}
    found = race(calls, OURS, size, seconds=3 if how == "run" else 1)
    return Group(workload.section, workload.name, what + at, **found)


def _slope(points: list[Group], what: str, sizes: list[int]) -> Group:
    """Return what one more leaf, call, ... costs, between the two largest sizes.

    A difference of two medians is mostly noise; of the others it is taken from their ratios to
    ours, which were measured side by side.
    """
    small, large = ({OURS: 1.0, **g.ratios} for g in points[-2:])
    a, b = (g.values[OURS] for g in points[-2:])
    steps = sizes[-1] - sizes[-2]
    slopes = {way: (b / large[way] - a / small[way]) / steps for way in large if way in small}
    return Group(*points[-1].key[:2], f"{what}, slope", slopes)


def _programs(workload: Workload, mode: str, chosen: Any) -> list[Group]:
    """Compile each contestant and return what the compiler says."""
    found = {way: counts(workload, way, chosen, mode) for way in workload.contestants(mode)}
    return [
        Group(workload.section, workload.name, f"{c}, {mode}", {w: n[c] for w, n in found.items()})
        for c in COUNTS
    ]


def counts(workload: Workload, way: str, size: Any, mode: str = "grad") -> dict[str, float]:
    """Compile without running and return what the compiler says: exact, the same at every run."""
    args = jax.eval_shape(lambda: workload.arguments(size, jnp.float32))
    compiled = jax.jit(workload.function(mode, way, size)).lower(*args).compile()
    cost, temp = compiled.cost_analysis(), compiled.memory_analysis().temp_size_in_bytes
    numbers = (cost.get("flops", 0.0), cost.get("bytes accessed", 0.0), temp)
    return dict(zip(COUNTS, numbers, strict=True))
