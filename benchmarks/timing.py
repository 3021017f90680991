"""How everything here is timed: `race`, which every measurement of time calls.

The contestants run in turn, one sample each a round, and the first of a round changes, so that a
machine that slows down slows all of them. A ratio is the median over the rounds of the ratio
within a round. Ours takes part twice: its ratio to itself, the control, would be 1 on a perfect
machine. Calls shorter than `SHORTEST` are repeated within a sample, and what the contestant before
left in the caches of the processor is not timed. The garbage collector does not run while a sample
is taken.

Each round runs at another depth of the Python stack: CPython keeps frames in blocks of 16 KiB, and
a call that crosses into a new block again and again can take several times as long.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

CONTROL = "control: ours again"
DEPTHS = [i * 7 % 16 * 10 for i in range(16)]  # in Python frames, not in order
SIZES = ("toy", "cpu", "gpu")  # a workload has arguments for each
SHORTEST = 2e-4  # seconds a sample takes at least, where a call can be repeated
SHORT = 5e-3  # seconds; before a sample of shorter calls goes an untimed one, to warm the caches


def race(
    contestants: Mapping[str, Callable[[], Any]],
    ours: str | None = None,
    size: str = "cpu",
    seconds: float = 1.0,
    rounds: tuple[int, int] = (9, 300),
    settle: float = 0.0,
) -> dict[str, Any]:
    """Time the contestants against each other for about so many seconds, or a moment at toy size.

    Return the fields of a `Group`: times, ratios of ours to each of the others, and who cannot run.
    `settle` is for contestants that have threads of their own: so many seconds of rest and then
    an untimed call go before each sample.
    """
    entered = dict(contestants)
    if ours is not None:
        entered[CONTROL] = entered[ours]
    calls, failures, short, a_round = {}, {}, set(), 0.0
    for name, call in entered.items():
        try:
            _sample(call)  # compiles, and shows whether it can run at all
        except Exception as error:
            if name == ours:
                raise
            failures[name] = reason(error)
            continue
        once = _sample(call)
        calls[name] = max(1, min(1000, int(SHORTEST / once)))
        if once < SHORT:
            short.add(name)
        a_round += once * calls[name]

    least, most = (2, 2) if size == "toy" else rounds
    count = int(min(most, max(least, seconds / a_round))) if calls else 0
    names, samples = list(calls), {name: [] for name in calls}
    enabled = gc.isenabled()
    try:
        for i in range(count):
            gc.enable()
            gc.collect(0)
            gc.disable()
            first = i % len(names)
            for name in names[first:] + names[:first]:
                if settle:
                    time.sleep(settle)
                if settle or name in short:
                    _sample(entered[name])
                samples[name].append(_sample(entered[name], calls[name], DEPTHS[i % len(DEPTHS)]))
    finally:
        if enabled:
            gc.enable()
    ratios = {
        name: [a / b for a, b in zip(samples[ours], samples[name], strict=True)]
        for name in names
        if ours not in (None, name)
    }
    return {
        **dict(zip(("values", "quartiles"), _summary(samples), strict=True)),
        **dict(zip(("ratios", "ratio_quartiles"), _summary(ratios), strict=True)),
        "samples": count,
        "failures": failures,
    }


def _summary(samples: Mapping[str, list[float]]) -> tuple[dict[str, float], dict[str, Any]]:
    cuts = {n: statistics.quantiles(s, n=4, method="inclusive") for n, s in samples.items()}
    return {n: c[1] for n, c in cuts.items()}, {n: (c[0], c[2]) for n, c in cuts.items()}


def _sample(call: Callable[[], Any], calls: int = 1, depth: int = 0) -> float:
    """Return the seconds that a call takes, so many frames further down."""
    if depth:
        return _sample(call, calls, depth - 1)
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / calls


def reason(error: Exception) -> str:
    """Say in a line why a contestant cannot run."""
    here = f"{Path(__file__).parents[1]}/"
    text = (str(error).replace(here, "").strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:120]}".rstrip(": ")
