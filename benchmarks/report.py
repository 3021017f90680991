"""Write the tables and the figures of all results: `python -m benchmarks.report`.

`main` draws the figures (`figures.py`) and writes `results/README.md`: first what is aimed at
(`lines`, `targets`), then a table for each section (`tables`), for each JSON file.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import ways as w
from benchmarks.results import OURS, Group, Results, amount
from benchmarks.workload import COUNTS

RESULTS = Path(__file__).parent / "results"
PROGRAMS = list(itertools.product(("grad", "second order", "jvp"), COUNTS))
SLOPE = 1.25
# What explains a missed target.
_CLOSURE = (
    "what the function closes over is looked through and made anew at each call; measured beside "
    "it, a function of its inputs alone is not"
)
_CALL = (
    "a decorated function takes 2 to 3 us more than the function alone, to ask whether JAX is "
    "transforming anything and to check what it returns; the whole call takes about 30"
)
_METHOD = (
    "the weights are in an object that cannot be made anew around other values, so `f` is traced; "
    "measured beside it, a closure that declares the same weights is not"
)
_NONE = "no experiment yet"
_ORDERS = (
    "the second derivative of the rule by hand is that of `f`; measured beside it, one that is "
    f"right at every order ({w.EVERY}). JAX 0.8 also linearizes both modes at each call"
)
_PUSHED = (
    "the tangent is staged as two operations, `push` and `attach`, and not as a formula; measured "
    f"beside it, a hand-written `{w.TRANSPOSED}` its own backward pass, which has no formula either"
)
_STAGED = (
    "JAX 0.8 linearizes both modes at each call; later ones only where they differentiate what is "
    "staged: made to do so everywhere, their ratios grow by 0.04 to 0.13"
)
_TRACED = (
    "which of them `y` depends on, and in which order, only a trace of `f` tells; measured beside "
    "it, the same function with declared variables needs none"
)
_TRANSPOSED = (
    "the rule is traced, checked for linearity and transposed at every call; measured beside it, a "
    f"hand-written `{w.TRANSPOSED}` its own backward pass"
)
# (measure, case, against, at most, what explains a miss)
TARGETS = (
    ("eager forward", "inputs only", w.PLAIN, 1.10, _CALL),
    ("eager forward", "inputs only", w.HAND, 0.20, _CALL),
    ("eager forward", "large closure", w.PLAIN, 1.10, _CALL),
    ("eager forward", "large closure", w.HAND, 0.20, _CALL),
    ("eager grad", "inputs only", w.HAND, 1.05, _ORDERS),
    ("eager grad", "declared variables", w.HAND, 1.05, _CLOSURE),
    ("eager grad", "method, declared variables", w.HAND, 1.05, _METHOD),
    ("eager grad", "undeclared variables", w.EVERY, 1.40, _TRACED),
    ("trace grad", "inputs only", w.EVERY, 1.08, _STAGED),
    ("trace grad", "declared variables", w.EVERY, 1.20, _CLOSURE),
    ("trace grad", "undeclared variables", w.EVERY, 1.40, _TRACED),
    ("trace second order", "inputs only", w.EVERY, 1.15, _STAGED),
    ("trace jvp", "inputs only", w.JVP, 1.05, _PUSHED),
    ("trace hessian", "inputs only", w.JVP, 1.00, _STAGED),
    ("eager jvp", "inputs only", w.JVP, 3.00, _TRANSPOSED),
)
GROWTH = {
    "leaves": _STAGED,
    "chained calls": _STAGED,
    "nested calls": _NONE,
    "captured values": _TRACED,
    "declared variables": _CLOSURE,
    "layers that capture": _TRACED,
    "layers that declare": _STAGED,
}


class Line(NamedTuple):
    """A target, and what was measured."""

    what: str
    against: str
    at_most: float
    measured: float | None
    why: str

    @property
    def missed(self) -> bool:
        # Two digits are what the machine repeats.
        return self.measured is not None and round(self.measured, 2) > self.at_most

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.2f}x"
        return f"**{measured}**" if self.missed else measured


def lines(results: Results) -> Iterator[Line]:
    for measure, case, against, at_most, why in TARGETS:
        ratio = results.ratio("overhead", case, measure, against)
        yield Line(f"{measure}, {case}", against, at_most, ratio, why)
    for mode, measure in PROGRAMS:
        found = programs(results, mode, measure)
        worst = max(found, key=found.__getitem__, default="")
        why = f"worst of {len(found)}: {worst}; {_NONE}"
        yield Line(f"compiled {mode}: {measure}", w.REFERENCE[mode], 1.0, found.get(worst), why)
    for (case, why), kind in itertools.product(GROWTH.items(), ("trace grad", "eager grad")):
        ratio = results.ratio("growth", case, f"{kind}, slope", w.EVERY)
        # Where the two sizes take the same time, there is no slope to compare.
        ratio = ratio if ratio and ratio > 0 else None
        yield Line(f"growth with {case}, {kind}", w.EVERY, SLOPE, ratio, why)


def programs(results: Results, mode: str, measure: str) -> dict[str, float]:
    """Return for each workload what the compiler counts for ours / for the rule written by hand."""
    groups = results.find("workloads", None, f"{measure}, {mode}")
    return {g.case: g.ratios[w.REFERENCE[mode]] for g in groups}


def same_programs(results: Results) -> tuple[int, int]:
    """Return how many of the counts are no more than by hand, of how many."""
    ratios = itertools.chain(*(programs(results, *of).values() for of in PROGRAMS))
    same = [round(ratio, 2) <= 1 for ratio in ratios]
    return sum(same), len(same)


# --- tables ---------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def targets(found: list[Results], unmeasured: bool = True) -> Iterator[str]:
    rows, why = [], []
    for of in zip(*map(lines, found), strict=True):  # what is aimed at is the same for all
        line = of[0]
        if unmeasured or any(x.measured is not None for x in of):
            rows.append([line.what, line.against, f"{line.at_most:.2f}x", *map(str, of)])
        if missed := [x for x in of if x.missed]:
            why.append(f"- *{line.what}*: {missed[0].why}.")
    if rows:
        yield _table(["what", "against", "at most", *(r.label for r in found)], rows)
    if why:
        yield "\n".join(["Missed:", "", *why])


def tables(results: Results) -> Iterator[str]:
    """Yield a table for each section: ratios for the overhead, numbers for everything else."""
    for section in dict.fromkeys(g.section for g in results.groups):
        groups = [g for g in results.find(section) if g.measure != "error in float64"]
        cases = list(dict.fromkeys(g.case for g in groups))
        groups.sort(key=lambda g: cases.index(g.case))  # however many runs measured them
        names = list(dict.fromkeys(n for g in groups for n in (*g.values, *g.failures)))
        names.sort(key=lambda name: name != OURS)  # ours is the first
        rows = [[g.case, g.measure, *(_cell(g, name) for name in names)] for g in groups]
        overhead = ", on functions that do almost nothing: ours / the other"
        yield f"### {section.capitalize()}{overhead if section == 'overhead' else ''}"
        yield _table(["case", "measure", *names], rows)


def _cell(group: Group, name: str) -> str:
    if name in group.failures:
        return "cannot"
    if group.section == "overhead" and name in group.ratios:
        return f"{group.ratios[name]:.2f}x"
    return amount(group.values[name], group.unit) if name in group.values else ""


def main() -> int:
    from benchmarks.figures import draw

    found = [Results.load(path) for path in sorted(RESULTS.glob("*.json"))]
    if not found:
        print(f"no results in {RESULTS}: run `python -m benchmarks` first", file=sys.stderr)
        return 2
    found.sort(key=lambda r: [int(n) for n in r.meta["versions"]["jax"].split(".")[:3]])
    draw(found, RESULTS)
    parts = [
        "# Results",
        "Written by `python -m benchmarks.report`. Bold: a target that is missed.",
        *targets(found),
    ]
    for results in found:
        parts.append(f"## {results.label}\n\nProcessor: {results.meta['processor']}.")
        figures = sorted(RESULTS.glob(f"{results.name}-*.svg"))
        parts += [*(f"![{path.stem}]({path.name})" for path in figures), *tables(results)]
    (RESULTS / "README.md").write_text("\n\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
