"""Time and memory of the workloads, checked in float64 before anything is timed."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.programs import analyze
from benchmarks.results import CHECKPOINT, HAND, OURS, OURS_FORWARD, PLAIN, Group
from benchmarks.settings import Settings, Task
from benchmarks.timing import compare
from benchmarks.workloads import WORKLOADS, Workload

SECTION = "workloads"
WAYS = (PLAIN, CHECKPOINT, HAND, OURS)
TOLERANCE = 1e-9  # of gradients in float64, relative to the largest entry


def tasks(settings: Settings) -> Iterator[Task]:
    for name, workload in WORKLOADS.items():
        yield Task(SECTION, name, functools.partial(measure, workload, settings))


def measure(workload: Workload, settings: Settings) -> list[Group]:
    error, failures = check(workload)
    groups = [
        Group(SECTION, workload.name, "error in float64", "relative", error, failures=failures)
    ]
    size = "tiny" if settings.quick else "gpu" if jax.default_backend() == "gpu" else "full"
    args = workload.arguments(size, jnp.float32)
    groups += count(workload, args, [way for way in (*WAYS, OURS_FORWARD) if way not in failures])

    contestants = {}
    for way in WAYS:
        compiled = jax.jit(workload.timed_function(way)).lower(*args).compile()
        contestants[way] = functools.partial(compiled, *args)
    least, most = settings.rounds
    measured = compare(contestants, OURS, 3 * settings.scale, (min(5, least), min(50, most)))
    what = "training step" if workload.step else "value and gradient"
    shapes = ", ".join(str(a.shape) for a in args if isinstance(a, jax.Array))
    note = "; ".join(part for part in (what, shapes, workload.note) if part)
    groups.append(Group.timed(SECTION, workload.name, "time", measured, note))
    groups += rates(workload, args, groups[-1].values, settings)
    return groups


def check(workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
    """Return the largest relative error of each way against plain autodiff, in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        args = workload.arguments("tiny", jnp.float64)
        expected = jax.tree.leaves(jax.jit(workload.gradient(PLAIN))(*args))
        errors: dict[str, float] = {}
        failures: dict[str, str] = {}
        for way in (CHECKPOINT, HAND, OURS, OURS_FORWARD):
            try:
                got = jax.tree.leaves(jax.jit(workload.gradient(way))(*args))
            except TypeError as error:
                if way != OURS_FORWARD:
                    raise
                reason = str(error).replace(f"{Path.cwd()}/", "")
                failures[way] = f"{type(error).__name__}: {reason[:120]}"
                continue
            errors[way] = max(_error(a, b) for a, b in zip(got, expected, strict=True))
            if not errors[way] < TOLERANCE:
                raise AssertionError(f"{workload.name}, {way}: error {errors[way]:.1e}")
        return errors, failures
    finally:
        jax.config.update("jax_enable_x64", before)


def _error(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got), np.asarray(expected)
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise AssertionError(f"{got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}")
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


def count(workload: Workload, args: tuple[Any, ...], ways: list[str]) -> list[Group]:
    """Return what the compiler says of the gradient of the workload, written in these ways."""
    programs = {way: analyze(workload.gradient(way), args) for way in ways}
    groups = []
    for measure in ("flops", "bytes accessed", "temp memory"):
        values = {way: program.counts[measure] for way, program in programs.items()}
        unit = "flops" if measure == "flops" else "bytes"
        groups.append(Group.counted(SECTION, workload.name, measure, unit, values))
    peaks = {w: p.peak_bytes for w, p in programs.items() if p.peak_bytes is not None}
    if peaks:
        groups.append(Group.counted(SECTION, workload.name, "peak memory", "bytes", peaks))
    return groups


def rates(
    workload: Workload, args: tuple[Any, ...], times: dict[str, float], settings: Settings
) -> list[Group]:
    """Return how near a workload comes to what the machine can do."""
    groups = []
    if workload.traffic is not None:
        least, best = workload.traffic(*args), machine.bandwidth(args[0].nbytes, settings)
        share = {way: 100 * least / t / best for way, t in times.items()}
        note = f"least traffic {least / 1e6:.0f} MB; the machine copies at {best / 1e9:.3g} GB/s"
        groups.append(
            Group.counted(SECTION, workload.name, "share of copy bandwidth", "%", share, note)
        )
    if workload.work is not None:
        flops, best = workload.work(*args), machine.product_rate(args[0].dtype, settings)
        share = {way: 100 * flops / t / best for way, t in times.items()}
        note = f"{flops / 1e9:.3g} GFLOP of products; the machine does {best / 1e9:.3g} GFLOP/s"
        groups.append(
            Group.counted(SECTION, workload.name, "share of matmul rate", "%", share, note)
        )
    for group in groups:
        group.ratios = {}
    return groups
