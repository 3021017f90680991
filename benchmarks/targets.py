"""What the library promises of its speed, beside what was measured."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import growth, overhead, work
from benchmarks.results import (
    HAND,
    HAND_EVERY_ORDER,
    JAX_CUSTOM_GRADIENT,
    OURS_FORWARD,
    UNDECORATED,
    Results,
)

# (what, case, measure, against, at most)
RATIOS = (
    ("eager forward", "inputs only", "eager forward", HAND, 0.35),
    ("eager forward", "inputs only", "eager forward", UNDECORATED, 1.5),
    ("eager grad", "inputs only", "eager grad", HAND, 1.05),
    ("eager grad", "inputs only", "eager grad", JAX_CUSTOM_GRADIENT, 0.75),
    ("trace of jit(grad)", "inputs only", "trace", HAND_EVERY_ORDER, 1.10),
    ("trace of jit(grad)", "inputs only", "trace", JAX_CUSTOM_GRADIENT, 1.20),
    ("trace of jit(grad)", "closed-over weights", "trace", HAND_EVERY_ORDER, 1.5),
    ("trace of jit(grad)", "declared variables", "trace", HAND_EVERY_ORDER, 1.5),
)
SLOPE = 1.25


class Line(NamedTuple):
    what: str
    against: str
    at_most: float
    measured: float | None
    note: str = ""

    def __str__(self) -> str:
        if self.measured is None:
            verdict = "not measured"
        else:
            verdict = f"{self.measured:.2f}x " + ("" if self.met else "missed")
        text = f"{self.what:<48} {self.against:<36} {self.at_most:>5.2f}x  {verdict}"
        return f"{text}  {self.note}".rstrip()

    @property
    def met(self) -> bool:
        # Two digits are what the machine repeats.
        return self.measured is not None and round(self.measured, 2) <= self.at_most


def lines(results: Results) -> Iterator[Line]:
    for what, case, measure, against, at_most in RATIOS:
        group = results.first(overhead.SECTION, case, measure)
        ratio = group.ratios.get(against) if group else None
        yield Line(f"{what}, {case}", against, at_most, ratio)
    for mode in (HAND, OURS_FORWARD):
        for measure in ("flops", "bytes accessed", "temp memory"):
            yield _program(results, measure, mode)
    for case in growth.CASES:
        for kind in ("trace", "eager grad"):
            group = results.first(growth.SECTION, f"{case}, {kind}", "slope")
            ratio = group.ratios.get(HAND_EVERY_ORDER) if group else None
            yield Line(f"growth with {case}, {kind}", HAND_EVERY_ORDER, SLOPE, ratio)


def _program(results: Results, measure: str, mode: str) -> Line:
    """Return the worst of all workloads; `mode` is whose program is looked at."""
    ratios = {}
    for group in results.find(work.SECTION, measure=measure):
        if mode == HAND and HAND in group.ratios:
            ratios[group.case] = group.ratios[HAND]
        elif mode == OURS_FORWARD and mode in group.values and group.values[HAND]:
            ratios[group.case] = group.values[mode] / group.values[HAND]
    what = f"compiled grad: {measure}" + (", forward_mode=True" if mode == OURS_FORWARD else "")
    if not ratios:
        return Line(what, HAND, 1.0, None)
    worst = max(ratios, key=lambda case: ratios[case])
    off = [case for case in ratios if round(ratios[case], 2) != 1]
    note = f"worst of {len(ratios)}" + (f" ({worst}); {len(off)} differ" if off else "")
    return Line(what, HAND, 1.0, ratios[worst], note)
