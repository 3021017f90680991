"""Write the tables and the figures of all results: `python -m benchmarks.report`.

`main` draws the figures (`figures.py`) and writes `results/README.md`: first what is aimed at
(`lines`, `targets`), then a table for each section (`tables`), for each JSON file.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import ways as w
from benchmarks.results import OURS, Group, Results, amount
from benchmarks.timing import CONTROL
from benchmarks.workload import COUNTS

PEERS = (*w.PEERS[:-1], w.JVP, w.TRANSPOSED, CONTROL)
RESULTS = Path(__file__).parent / "results"
SLOPE = 1.25
# (what, case, measure, against, at most)
TARGETS = (
    ("eager forward", "inputs only", "eager forward", w.PLAIN, 1.10),
    ("eager forward", "inputs only", "eager forward", w.HAND, 0.20),
    ("eager forward", "large closure", "eager forward", w.PLAIN, 1.10),
    ("eager forward", "large closure", "eager forward", w.HAND, 0.20),
    ("eager grad", "inputs only", "eager grad", w.HAND, 1.05),
    ("eager grad", "declared variables", "eager grad", w.HAND, 1.05),
    ("eager grad", "method, declared variables", "eager grad", w.HAND, 1.05),
    ("eager grad", "undeclared variables", "eager grad", w.EVERY, 1.40),
    ("trace of jit(grad)", "inputs only", "trace grad", w.EVERY, 1.08),
    ("trace of jit(grad)", "declared variables", "trace grad", w.EVERY, 1.20),
    ("trace of jit(grad)", "undeclared variables", "trace grad", w.EVERY, 1.40),
    ("trace at second order", "inputs only", "trace second order", w.EVERY, 1.15),
    ("trace of jvp", "inputs only", "trace jvp", w.JVP, 1.05),
    ("trace of hessian", "inputs only", "trace hessian", w.JVP, 1.00),
    ("eager jvp", "inputs only", "eager jvp", w.JVP, 3.00),
)
# What explains a missed target that has these words.
_TRACED = (
    "which of them `y` depends on, and in which order, only a trace of `f` tells; measured beside "
    "it, the same function with declared variables needs none"
)
_BOTH_MODES = (
    "both modes take a `custom_jvp`, which JAX linearizes at each call, where it only records a "
    f"`custom_vjp`; of the function of inputs only, a {w.JVP}, with both modes, takes longer"
)
_CONTROL = "the control of this row, ours against ours, is off by most of it"
EXPERIMENTS = {
    "method": "the weights are in an object that cannot be made anew around other values, so `f` "
    "is traced; measured beside it, a closure that declares the same weights is not",
    "eager grad, inputs only": _BOTH_MODES,
    "eager grad, declared variables": _BOTH_MODES,
    "trace of jit(grad), inputs only": _BOTH_MODES,
    "trace of jit(grad), declared variables": _BOTH_MODES,
    "nested calls": "each function looks at all that the functions below it hold, since any of "
    "them may hold what is being traced; and each level is staged in both modes",
    "eager jvp": "the rule is traced, checked for linearity and transposed at every call; "
    f"measured beside it, a hand-written `{w.TRANSPOSED}` its own backward pass",
    "undeclared variables": _TRACED,
    "captured values": _TRACED,
    "layers that capture": _TRACED,
    "eager forward, inputs only": _CONTROL,
    "trace of jvp, inputs only": _CONTROL,
    "chained calls": _BOTH_MODES,
    "declared variables, trace grad": _BOTH_MODES,
    "layers that declare": _BOTH_MODES,
}


class Line(NamedTuple):
    """A target, and what was measured."""

    what: str
    against: str
    at_most: float
    measured: float | None
    note: str = ""

    @property
    def missed(self) -> bool:
        # Two digits are what the machine repeats.
        return self.measured is not None and round(self.measured, 2) > self.at_most

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.2f}x"
        return f"**{measured}**" if self.missed else measured


def lines(results: Results) -> Iterator[Line]:
    for what, case, measure, against, at_most in TARGETS:
        ratio = results.ratio("overhead", case, measure, against)
        yield Line(f"{what}, {case}", against, at_most, ratio)
    for mode in ("grad", "second order", "jvp"):
        for measure in COUNTS:
            found = programs(results, mode, measure)
            worst = max(found, key=found.__getitem__, default="")
            note = f"worst of {len(found)}: {worst}"
            what = f"compiled {mode}: {measure}"
            yield Line(what, w.REFERENCE[mode], 1.0, found.get(worst), note)
    for case in dict.fromkeys(["leaves", *results.cases("growth")]):
        for kind in ("trace grad", "eager grad"):
            ratio = results.ratio("growth", case, f"{kind}, slope", w.EVERY)
            # Where the two sizes take the same time, there is no slope to compare.
            ratio = ratio if ratio and ratio > 0 else None
            yield Line(f"growth with {case}, {kind}", w.EVERY, SLOPE, ratio)


def programs(results: Results, mode: str, measure: str) -> dict[str, float]:
    """Return for each workload what the compiler counts for ours / for the rule written by hand."""
    groups = results.find("workloads", measure=f"{measure}, {mode}")
    against = w.REFERENCE[mode]
    return {g.case: g.ratios[against] for g in groups if against in g.ratios}


def same_programs(results: Results) -> tuple[int, int]:
    """Return how many programs cost no more than by hand, of how many."""
    most: dict[tuple[str, str], float] = {}
    for mode in ("grad", "second order", "jvp"):
        for measure in COUNTS:
            for case, ratio in programs(results, mode, measure).items():
                most[mode, case] = max(ratio, most.get((mode, case), 0.0))
    return sum(round(ratio, 2) <= 1 for ratio in most.values()), len(most)


# --- tables ---------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def targets(found: list[Results], unmeasured: bool = True) -> Iterator[str]:
    named = [{(x.what, x.against): x for x in lines(results)} for results in found]
    rows, why = [], []
    for key in dict.fromkeys(key for of in named for key in of):
        known = [of[key] for of in named if key in of]
        if not unmeasured and all(line.measured is None for line in known):
            continue
        cells = [str(of[key]) if key in of else "not measured" for of in named]
        rows.append([*key, f"{known[0].at_most:.2f}x", *cells])
        if any(line.missed for line in known):
            notes = {line.note for line in known if line.missed} - {""}
            reasons = [text for words, text in EXPERIMENTS.items() if words in key[0]]
            told = [*sorted(notes), *(reasons or ["no experiment yet"])[:1]]
            why.append(f"- *{key[0]}*: {'; '.join(told)}.")
    if rows:
        yield _table(["what", "against", "at most", *(r.label for r in found)], rows)
    if why:
        yield "\n".join(["Missed:", "", *why])


def _cell(group: Group, name: str) -> str:
    if name in group.values:
        return amount(group.values[name], group.unit)
    return "cannot" if name in group.failures else ""


def tables(results: Results) -> Iterator[str]:
    rows = []
    for group in (g for g in results.find("overhead") if g.unit == "s"):
        ratios = [f"{group.ratios[p]:.2f}x" if p in group.ratios else "" for p in PEERS]
        rows.append([group.case, group.measure, _cell(group, OURS), *ratios])
    if rows:
        yield "### Overhead, on functions that do almost nothing: ours / the other"
        yield _table(["case", "measure", "ours", *PEERS], rows)
    for section in ("growth", "workloads", "checks", "distributed", "frameworks", "machine"):
        groups = [g for g in results.find(section) if g.measure != "error in float64"]
        names = list(dict.fromkeys(n for g in groups for n in (*g.values, *g.failures)))
        head = ["case", "measure", *names]
        rows = [[g.case, g.measure, *(_cell(g, name) for name in names)] for g in groups]
        if section == "frameworks":  # many contestants, few rows: turned
            head = ["", *(g.case for g in groups)]
            rows = [[name, *(_cell(g, name) for g in groups)] for name in names]
        if groups:
            yield f"### {section.capitalize()}"
            yield _table(head, rows)


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
