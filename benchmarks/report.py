"""Write what the results show: `python -m benchmarks.report`, and every whole run.

`write` makes `results/README.md` and the tables of `docs/performance.md` from the JSON of the
newest JAX in `results/`. Given JSON files, the command prints their targets side by side: those of
a commit and of the one before, say.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import layers, tiny
from benchmarks import ways as w
from benchmarks.results import OURS, Results
from benchmarks.workload import COUNTS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

# --- targets: what a change of the engine must not exceed -----------------------------------------

# (measure, case, against, at most)
OVERHEAD = (
    ("eager forward", "inputs only", w.PLAIN, 1.10),
    ("eager forward", "inputs only", w.HAND, 0.20),
    ("eager grad", "inputs only", w.EVERY, 1.10),
    ("eager grad", "declared variables", w.EVERY, 1.22),
    ("eager grad", "undeclared variables", w.EVERY, 1.35),
    ("trace grad", "inputs only", w.EVERY, 1.12),
    ("trace grad", "declared variables", w.EVERY, 1.20),
    ("trace grad", "undeclared variables", w.EVERY, 1.20),
    ("trace second order", "inputs only", w.EVERY, 1.22),
    ("trace jvp", "inputs only", w.JVP, 1.12),
    ("trace hessian", "inputs only", w.JVP, 1.00),
    ("eager jvp", "inputs only", w.JVP, 8.00),
)
GROWTH = ("leaves", "chained calls", "nested calls", "declared variables")
SLOPE = 1.25
# (what is closed over, times of what, at most) with the most layers, relative to the plain model
LAYERS = (
    ("nnx, declared", layers.MEASURES, 2.0),
    ("equinox, declared", layers.MEASURES, 2.0),
    ("linen, self, declared", layers.MEASURES, 3.5),
    ("all weights, declared", ("trace grad",), 4.5),
    ("all weights", ("trace grad",), 4.5),
)
# (case, times of what, at most): the time of many levels, relative to the few
NESTS = (
    ("nest with weights", "eager grad", 4.5),
    ("nest with weights", "trace grad", 6.5),
    ("nest with weights under jit", "trace grad", 6.5),
)
FEW, MANY = layers.SIZES[0], layers.SIZES[-1]
GROWING = 2.5  # the ratio with the most layers to the one with the fewest


class Line(NamedTuple):
    """A target, and what was measured."""

    what: str
    against: str
    at_most: float
    measured: float | None

    @property
    def missed(self) -> bool:
        # Two digits are what the machine repeats.
        return self.measured is not None and round(self.measured, 2) > self.at_most

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.2f}x"
        return f"**{measured}**" if self.missed else measured


def lines(results: Results) -> Iterator[Line]:
    for measure, case, against, at_most in OVERHEAD:
        ratio = results.ratio("overhead", case, measure, against)
        yield Line(f"{measure}, {case}", against, at_most, ratio)
    for mode, count in itertools.product(("grad", "second order", "jvp"), COUNTS):
        against = w.REFERENCE[mode]
        groups = results.find("workloads", None, f"{count}, {mode}")
        worst = max((g.ratios[against] for g in groups), default=None)
        yield Line(f"compiled {mode}: {count}, worst workload", against, 1.0, worst)
    for case, what in itertools.product(GROWTH, layers.MEASURES):
        ratio = results.ratio("growth", case, f"{what}, slope", w.EVERY)
        # There is no slope to compare if the two sizes take the same time.
        ratio = ratio if ratio and ratio > 0 else None
        yield Line(f"slope of {what} with {case}", w.EVERY, SLOPE, ratio)
    few, many = tiny.LEVELS
    for case, what, at_most in NESTS:
        groups = [g for n in (few, many) for g in results.find("growth", case, f"{what} at {n}")]
        a, b = [g.values[OURS] for g in groups] or (1, None)
        name = f"{what}, {case}, {many} to {few} levels"
        yield Line(name, "itself", at_most, b and b / a)
    for case, measures, at_most in LAYERS:
        for what in measures:
            ratio = of_layers(results, case, what, MANY)
            yield Line(f"{what}, {MANY} layers of {case}", w.PLAIN, at_most, ratio)
    for what, end in itertools.product(layers.MEASURES, layers.ENDS):
        at = [[of_layers(results, k + end, what, n) for n in (FEW, MANY)] for k in layers.KINDS]
        worst = max((b / a for a, b in at if a and b), default=None)
        name = f"{what}, {MANY} to {FEW} layers{end or ', undeclared'}, worst library"
        yield Line(name, w.PLAIN, GROWING, worst)


def of_layers(results: Results, case: str, what: str, n: int) -> float | None:
    """Return the time of a model relative to the undecorated one."""
    return results.ratio("growth", layers.PREFIX + case, f"{what} at {n}", w.PLAIN)


def targets(found: Sequence[Results], unmeasured: bool = True) -> str:
    """Return a table of the targets, with a column for each run; a missed target is bold."""
    rows = []
    for of in zip(*map(lines, found), strict=True):  # what is aimed at is the same for all
        if unmeasured or any(line.measured is not None for line in of):
            rows.append([of[0].what, of[0].against, f"{of[0].at_most:.2f}x", *map(str, of)])
    return _table(["what", "against", "at most", *(r.label for r in found)], rows, words=2)


# --- tables ---------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """Write a table; all columns but the first ones, which are words, are flush right."""
    cells = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


# --- the page of the site -------------------------------------------------------------------------

CASES = {
    "inputs only": "inputs only",
    "weights, declared": "declared variables",
    "weights, undeclared": "undeclared variables",
}
PEERS = {
    w.PLAIN: "the undecorated function",
    w.HAND: "a `jax.custom_vjp`",
    w.EVERY: "a `jax.custom_vjp`, right at every order",
    w.JVP: "a `jax.custom_jvp`",
}
COSTS = (
    ("eager call", "eager forward", w.PLAIN),
    ("eager call", "eager forward", w.HAND),
    ("eager gradient", "eager grad", w.HAND),
    ("eager gradient", "eager grad", w.EVERY),
    ("compiled gradient", "run grad", w.HAND),
    ("trace of `jit(grad)`", "trace grad", w.HAND),
    ("trace of `jit(grad)`", "trace grad", w.EVERY),
    ("trace at second order", "trace second order", w.EVERY),
    ("trace of a `jvp`", "trace jvp", w.JVP),
    ("trace of a Hessian", "trace hessian", w.JVP),
    ("eager `jvp`", "eager jvp", w.JVP),
)


def page(results: Results, text: str) -> str:
    """Return a page with its tables rewritten, between their comments."""
    parts = {"run": results.where, "costs": _costs(results), "memory": _memory(results)}
    for name, part in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{part}\n{end}{rest.partition(end)[2]}" if rest else text
    return text


def _costs(results: Results) -> str:
    rows = []
    for what, measure, against in COSTS:
        ratios = [results.ratio("overhead", case, measure, against) for case in CASES.values()]
        rows.append([what, PEERS[against], *map(_times, ratios)])
    return _table(["what", "against", *CASES], rows, words=2)


def _memory(results: Results) -> str:
    """Return the temporary memory of each workload, relative to the plain one, and the time."""
    rows = []
    for group in results.find("workloads", None, "temp memory, grad"):
        ways = w.PLAIN, w.CHECKPOINT, w.HAND, OURS
        sizes = [f"{group.values[way] / 1e6:.3g} MB" for way in ways]
        time = _times(results.ratio("workloads", group.case, "run grad", w.PLAIN))
        rows.append([group.case, *sizes, time])
    head = ["workload", "plain JAX", "`jax.checkpoint`", "hand-written", OURS]
    return _table([*head, "time ÷ plain JAX"], rows)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def newest(folder: Path) -> Results:
    """Return the results of the newest JAX, which the site shows."""
    found = [Results.load(path) for path in folder.glob("cpu-*.json")]
    return max(found, key=lambda r: [int(n) for n in r.meta["jax"].split(".")[:3]])


def write() -> None:
    """Write all that is made of the results of the newest JAX."""
    results = newest(RESULTS)
    PAGE.write_text(page(results, PAGE.read_text()))
    parts = (
        f"# {results.label}",
        results.where,
        "Written by `python -m benchmarks`.",
        shown(results),
    )
    (RESULTS / "README.md").write_text("\n\n".join(parts) + "\n")


def shown(results: Results) -> str:
    """Return what a run prints: the targets, where a missed one is bold, and the memory."""
    return f"{targets([results], unmeasured=False)}\n\n{_memory(results)}"


if __name__ == "__main__":
    if files := sys.argv[1:]:
        print(targets([Results.load(Path(file)) for file in files]))
    else:
        write()
