"""Write the tables and the figures of all results: `python -m benchmarks.report`.

`main` has `figures.py` draw, and writes `results/README.md`: first the targets (`lines`,
`targets`), then a table for each section (`tables`), for each JSON file. It also writes the tables
of `docs/performance.md` (`page`), from the run that the figure at a glance shows.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import layers
from benchmarks import ways as w
from benchmarks.figures import draw
from benchmarks.results import OURS, Group, Results, amount
from benchmarks.workload import COUNTS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
PROGRAMS = list(itertools.product(("grad", "second order", "jvp"), COUNTS))
SLOPE = 1.25
# What explains a missed target.
_CLOSURE = (
    "each call inspects the closure and copies it around other values; a function of its inputs "
    "alone, measured beside it, has no closure"
)
_CALL = (
    "a decorated function takes 1 to 3 us more than the function alone, to ask whether JAX is "
    "transforming anything and to check what it returns"
)
_METHOD = (
    "each call copies the object that holds the weights; a closure that declares the same weights, "
    "measured beside it, is copied faster"
)
_NONE = "no experiment yet"
_NOT = "Not measured in this run."
_PUSHED = (
    "the tangent is staged as two operations, `push` and `attach`, and not as a formula; measured "
    f"beside it, a hand-written `{w.TRANSPOSED}` its own backward pass, which has no formula either"
)
_STAGED = (
    "JAX 0.8 linearizes both modes at each call; later ones only where they differentiate what is "
    "staged: made to do so everywhere, their ratios grow by 0.04 to 0.13"
)
_TRACED = (
    "only a trace of `f` shows which of them `y` depends on, and in which order; the same function "
    "with declared variables, measured beside it, needs no trace"
)
_LAYERS = (
    "the same layers by a rule written by hand, which is right at every order, are measured beside "
    "it and are the least that a rule costs"
)
# (measure, case, against, at most, what explains a miss)
TARGETS = (
    ("eager forward", "inputs only", w.PLAIN, 1.10, _CALL),
    ("eager forward", "inputs only", w.HAND, 0.20, _CALL),
    ("eager forward", "large closure", w.PLAIN, 1.10, _CALL),
    ("eager forward", "large closure", w.HAND, 0.20, _CALL),
    ("eager grad", "inputs only", w.EVERY, 1.05, _STAGED),
    ("eager grad", "declared variables", w.EVERY, 1.10, _CLOSURE),
    ("eager grad", "method, declared variables", w.EVERY, 1.10, _METHOD),
    ("eager grad", "undeclared variables", w.EVERY, 1.70, _TRACED),
    ("trace grad", "inputs only", w.EVERY, 1.08, _STAGED),
    ("trace grad", "declared variables", w.EVERY, 1.20, _CLOSURE),
    ("trace grad", "undeclared variables", w.EVERY, 1.50, _TRACED),
    ("trace second order", "inputs only", w.EVERY, 1.15, _STAGED),
    ("trace jvp", "inputs only", w.JVP, 1.05, _PUSHED),
    ("trace hessian", "inputs only", w.JVP, 1.00, _STAGED),
)
GROWTH = {
    "leaves": _STAGED,
    "chained calls": _STAGED,
    "nested calls": _NONE,
    "captured values": _TRACED,
    "declared variables": _CLOSURE,
    "layers that capture": _TRACED,
    "layers that declare": _CLOSURE,
}
# What a model of many layers may cost, relative to the undecorated one.
LAYERS = ((", declared", 2.0), ("", 4.0))


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
        # There is no slope to compare if the two sizes take the same time.
        ratio = ratio if ratio and ratio > 0 else None
        yield Line(f"growth with {case}, {kind}", w.EVERY, SLOPE, ratio, why)
    few, many = layers.SIZES[0], layers.SIZES[-1]
    for kind, (end, at_most), what in itertools.product(layers.KINDS, LAYERS, layers.MEASURES):
        case = f"{layers.PREFIX}{kind}{end}"
        at = [results.ratio("growth", case, f"{what} at {n}", w.PLAIN) for n in (few, many)]
        grows = at[1] / at[0] if all(at) else None
        yield Line(f"{what}, {many} {case}", w.PLAIN, at_most, at[1], _LAYERS)
        yield Line(f"growth of {what}, {many} / {few} {case}", w.PLAIN, SLOPE, grows, _NONE)


def programs(results: Results, mode: str, measure: str) -> dict[str, float]:
    """Return the compiler's count for each workload, ours / hand-written."""
    groups = results.find("workloads", None, f"{measure}, {mode}")
    return {g.case: g.ratios[w.REFERENCE[mode]] for g in groups}


def same_programs(results: Results) -> tuple[int, int]:
    """Return how many counts are no more than those of hand-written rules, and of how many."""
    ratios = itertools.chain(*(programs(results, *of).values() for of in PROGRAMS))
    same = [round(ratio, 2) <= 1 for ratio in ratios]
    return sum(same), len(same)


# --- tables ---------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """Write a table; all columns but the first ones, which are words, are flush right."""
    cells = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
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
        overhead = ", on functions that do almost nothing: tfgrad_jax / baseline"
        yield f"### {section.capitalize()}{overhead if section == 'overhead' else ''}"
        yield _table(["case", "measure", *names], rows)


def _cell(group: Group, name: str) -> str:
    if name in group.failures:
        return "cannot"
    if group.section == "overhead" and name in group.ratios:
        return f"{group.ratios[name]:.2f}x"
    return amount(group.values[name], group.unit) if name in group.values else ""


# --- the page of the site -------------------------------------------------------------------------

# (heading, case)
CASES = {
    "inputs only": "inputs only",
    "large closure": "large closure",
    "weights, declared": "declared variables",
    "method, declared": "method, declared variables",
    "weights, undeclared": "undeclared variables",
}
PEERS = {
    w.PLAIN: "the undecorated function",
    w.HAND: "a `jax.custom_vjp`",
    w.EVERY: "a `jax.custom_vjp`, right at every order",
    w.JVP: "a `jax.custom_jvp`",
}
# (what, measure, against)
COSTS = (
    ("eager call", "eager forward", (w.PLAIN, w.HAND)),
    ("eager gradient", "eager grad", (w.HAND, w.EVERY, w.JVP)),
    ("compiled gradient", "run grad", (w.HAND,)),
    ("trace of `jit(grad)`", "trace grad", (w.HAND, w.EVERY)),
    ("trace at second order", "trace second order", (w.EVERY,)),
    ("trace of a `jvp`", "trace jvp", (w.JVP,)),
    ("trace of a Hessian", "trace hessian", (w.JVP,)),
    ("eager `jvp`", "eager jvp", (w.JVP, w.TRANSPOSED)),
)


def ordered(found: list[Results]) -> list[Results]:
    """Return runs by their version of JAX."""
    return sorted(found, key=lambda r: [int(n) for n in r.meta["versions"]["jax"].split(".")[:3]])


def shown(found: list[Results]) -> Results:
    """Return the run that the page and the figure at a glance show: the last with workloads."""
    return ([results for results in found if results.find("workloads")] or found)[-1]


def page(results: Results, text: str) -> str:
    """Return a page with its tables rewritten, between their comments."""
    parts = {
        "run": results.where,
        "costs": _costs(results),
        "layers": _layers(results),
        "memory": _memory(results),
        "batch": _batch(results),
    }
    for name, part in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{part}\n{end}{rest.partition(end)[2]}" if rest else text
    return text


def _costs(results: Results) -> str:
    rows = []
    for what, measure, against in COSTS:
        for way in against:
            ratios = [results.ratio("overhead", case, measure, way) for case in CASES.values()]
            if any(ratios):
                name = PEERS.get(way, f"a `{way.replace(' that', '` that')}")
                rows.append([what, name, *map(_times, ratios)])
    return _table(["what", "against", *CASES], rows, words=2)


def _layers(results: Results) -> str:
    """Return the ratios to the undecorated model, with the fewest and with the most layers.

    For comparison, those of rules written by hand, which get the weights as arguments.
    """
    few, many = layers.SIZES[0], layers.SIZES[-1]
    rows = []
    for kind, what in itertools.product(layers.KINDS, reversed(layers.MEASURES)):
        ratios = [_of_layers(results, kind, what, n, end) for end, _ in LAYERS for n in (few, many)]
        if any(ratios):
            ratios += [_of_layers(results, kind, what, n, None) for n in (few, many)]
            rows.append([kind, what, *map(_times, ratios)])
    hows = "declared", "undeclared", "hand-written"
    head = [f"{how}, {n} layers" for how in hows for n in (few, many)]
    return _table(["what is closed over", "time of", *head], rows, words=2) if rows else _NOT


def _of_layers(results: Results, kind: str, what: str, n: int, end: str | None) -> float | None:
    """Return a time relative to the undecorated model: of ours, or of rules written by hand."""
    of = "growth", f"{layers.PREFIX}{kind}{LAYERS[0][0] if end is None else end}", f"{what} at {n}"
    plain, by_hand = results.ratio(*of, w.PLAIN), results.ratio(*of, w.EVERY)
    if end is not None or plain is None:
        return plain
    return plain / by_hand if by_hand else None


def _memory(results: Results) -> str:
    rows = []
    for group in results.find("workloads", None, "temp memory, grad"):
        if group.ratios.get(w.PLAIN, 1) < 0.95:
            ways = w.PLAIN, w.CHECKPOINT, w.HAND, OURS
            sizes = [amount(group.values[x], group.unit) if x in group.values else "" for x in ways]
            time = _times(results.ratio("workloads", group.case, "run grad", w.PLAIN))
            share = f"{1 / group.ratios[w.PLAIN]:.2g}"
            rows.append([group.case, group.note, *sizes, share, time])
    head = ["workload", "shapes", "plain JAX", "`jax.checkpoint`", "hand-written", "tfgrad_jax"]
    head += ["plain ÷ tfgrad_jax", "time, tfgrad_jax ÷ plain"]
    # What was not measured has no column: shapes by an older run, times where nothing ran.
    measured = [i for i, _ in enumerate(head) if any(row[i] for row in rows)]
    words = sum(head[i] in ("workload", "shapes") for i in measured)
    return _table([head[i] for i in measured], [[r[i] for i in measured] for r in rows], words)


def _batch(results: Results) -> str:
    groups = results.find("workloads", None, "largest batch")
    rows = [[name, f"{value:.0f}"] for name, value in groups[0].values.items()] if groups else []
    return _table([f"sequences {groups[0].note if groups else ''}", "largest batch"], rows)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def main() -> int:
    found = ordered([Results.load(path) for path in sorted(RESULTS.glob("*.json"))])
    if not found:
        print(f"no results in {RESULTS}: run `python -m benchmarks` first", file=sys.stderr)
        return 2
    draw(found, shown(found), same_programs(shown(found)), RESULTS)
    if RESULTS.parent.parent == PAGE.parent.parent:  # not where a test writes
        PAGE.write_text(page(shown(found), PAGE.read_text()))
    parts = [
        "# Results",
        "Written by `python -m benchmarks.report`. A missed target is bold.",
        *targets(found),
    ]
    for results in found:
        parts.append(f"## {results.label}\n\n{results.where}")
        figures = sorted(RESULTS.glob(f"{results.name}-*.svg"))
        parts += [*(f"![{path.stem}]({path.name})" for path in figures), *tables(results)]
    (RESULTS / "README.md").write_text("\n\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
