"""How everything here is timed: interleaved, blocked until ready, the median of many.

The contestants of a comparison run in turn, one sample each a round, and the first of a round
changes, so that a machine that slows down slows all of them. A ratio is the median over the
rounds of the ratio within a round. Ours takes part twice: its ratio to itself, the control, would
be 1 on a perfect machine. Calls shorter than `SHORTEST` are repeated within a sample, and what the
contestant before left in the caches of the processor is not timed. The garbage collector does not
run while a sample is taken.

Each round runs at another depth of the Python stack: CPython keeps frames in blocks of 16 KiB, and
a call that crosses into a new block again and again can take several times as long.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

CONTROL = "control: ours again"
DEPTHS = [i * 7 % 16 * 10 for i in range(16)]  # in Python frames, not in order
SIZES = ("toy", "cpu", "gpu")
SHORTEST = 2e-4  # seconds a sample takes at least, where a call can be repeated
SHORT = 5e-3  # seconds; before a sample of shorter calls goes an untimed one, to warm the caches

Call = Callable[[], Any]


class Settings(NamedTuple):
    """What the command line asks for."""

    size: str = "cpu"  # one of `SIZES`

    @property
    def toy(self) -> bool:
        return self.size == "toy"

    @property
    def scale(self) -> float:
        """How much of the usual time to spend on a comparison."""
        return 0.01 if self.toy else 1.0

    def rounds(self, least: int = 9, most: int = 300) -> tuple[int, int]:
        return (2, 2) if self.toy else (least, most)


class Stats(NamedTuple):
    """Quartiles of the samples, in seconds or as a ratio."""

    median: float
    q1: float
    q3: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> "Stats":
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, q1, q3, len(samples))


class Comparison(NamedTuple):
    times: dict[str, Stats]
    ratios: dict[str, Stats]  # of ours to each of the others
    failures: dict[str, str]  # of those that cannot run this case


def compare(
    contestants: Mapping[str, Call],
    ours: str | None = None,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (7, 200),
    settle: float = 0.0,
) -> Comparison:
    """Time the contestants against each other for about so many seconds.

    `settle` is for contestants that have threads of their own: so many seconds of rest and then
    an untimed call go before each sample.
    """
    entered = dict(contestants)
    if ours is not None:
        entered[CONTROL] = entered[ours]
    calls: dict[str, int] = {}
    short = set()
    failures = {}
    a_round = 0.0
    for name, call in entered.items():
        try:
            _sample(call, 1)  # compiles, and shows whether it can run at all
        except Exception as error:
            if name == ours:
                raise
            failures[name] = reason(error)
            continue
        once = _sample(call, 1)
        calls[name] = max(1, min(1000, int(SHORTEST / once)))
        if once < SHORT:
            short.add(name)
        a_round += once * calls[name]

    count = int(min(rounds[1], max(rounds[0], seconds / a_round))) if calls else 0
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
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
                    _sample(entered[name], 1)
                samples[name].append(_sample(entered[name], calls[name], DEPTHS[i % len(DEPTHS)]))
    finally:
        if enabled:
            gc.enable()
    ratios = {}
    for name in samples if ours else ():
        if name != ours:
            pairs = zip(samples[ours], samples[name], strict=True)
            ratios[name] = Stats.of([a / b for a, b in pairs])
    return Comparison({n: Stats.of(s) for n, s in samples.items()}, ratios, failures)


def _sample(call: Call, calls: int, depth: int = 0) -> float:
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
