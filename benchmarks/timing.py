"""How everything here is timed: `race`, which every measurement of time calls.

The contestants run in turn, one sample each a round, in another order each round: a machine that
slows down slows all of them, and none always follows the same one. A ratio is the median over the
rounds of the ratio within a round. Ours takes part twice: its ratio to itself, the control, would
be 1 on a perfect machine. Calls shorter than `SHORTEST` are repeated within a sample, and what the
contestant before left in the caches of the processor is not timed. The garbage collector does not
run while a sample is taken.

Each round runs at another depth of the Python stack: CPython keeps frames in blocks of 16 KiB, and
a call that crosses into a new block again and again can take several times as long.
"""

import gc
import operator
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

CONTROL = "control: ours again"
DEPTHS = [i * 7 % 16 * 10 for i in range(16)]  # in Python frames, not in order
SIZES = ("toy", "cpu", "gpu")  # a workload has arguments for each
SHORTEST = 2e-4  # seconds a sample takes at least, where a call can be repeated
SHORT = 5e-3  # seconds; before a sample of shorter calls goes an untimed one, to warm the caches


def race(
    contestants: Mapping[str, Callable[[], Any]], ours: str, size: str, seconds: float = 1.0
) -> dict[str, Any]:
    """Time the contestants against each other for about so many seconds.

    Return the fields of a `Group`: times, and ratios of ours to each of the others.
    """
    entered = {**contestants, CONTROL: contestants[ours]}
    once = {}
    for name, call in entered.items():
        _sample(call)  # compiles
        once[name] = _sample(call)
        if once[name] < SHORT:  # how often it is repeated is not left to chance
            once[name] = min(_sample(call) for _ in range(5))
    repeats = {name: max(1, min(1000, int(SHORTEST / t))) for name, t in once.items()}
    a_round = sum(t * repeats[name] for name, t in once.items())
    rounds = 2 if size == "toy" else int(min(300, max(9, seconds / a_round)))

    names, samples = list(once), {name: [] for name in once}
    order = random.Random(0)
    gc.disable()
    try:
        for i in range(rounds):
            gc.collect(0)
            order.shuffle(names)
            for name in names:
                if once[name] < SHORT:
                    _sample(entered[name])
                samples[name].append(_sample(entered[name], repeats[name], DEPTHS[i % 16]))
    finally:
        gc.enable()
    return {
        "values": {name: statistics.median(samples[name]) for name in once},
        "ratios": {
            name: statistics.median(map(operator.truediv, samples[ours], of_one))
            for name, of_one in samples.items()
            if name != ours
        },
    }


def _sample(call: Callable[[], Any], calls: int = 1, depth: int = 0) -> float:
    """Return the seconds that a call takes, so many frames further down."""
    if depth:
        return _sample(call, calls, depth - 1)
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / calls
