"""The figures: one glance says what costs nothing and what saves memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report
from benchmarks import workload as w
from benchmarks.results import OURS, Results, amount

# The color-blind safe palette of Okabe and Ito; ours is the one that stands out.
COLORS = {
    OURS: "#d55e00", w.PLAIN: "#999999", w.CHECKPOINT: "#444444", w.HAND: "#0072b2",
    w.EVERY: "#56b4e9", w.JVP: "#3a3a8c", w.TRANSPOSED: "#8888cc", w.JAX: "#009e73",
    w.EQUINOX: "#cc79a7", w.NNX: "#e69f00", w.BOTH: "#f0a070",
}  # fmt: skip
MARKS = dict(zip(COLORS, "*|xosP+D^v.", strict=True))
KINDS = ("eager forward", "eager grad", "run grad", "trace grad")


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw what there is, as `<name>-<figure>.svg`; return the paths."""
    drawn = []
    # The same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "benchmarks", "font.size": 9, "svg.fonttype": "none"}):
        for name, make in FIGURES.items():
            figure = make(results)
            if figure is not None:
                drawn.append(folder / f"{results.name}-{name}.svg")
                figure.savefig(drawn[-1], metadata={"Date": None})
    return drawn


def _figure(title: str, results: Results, height: float) -> Figure:
    figure = Figure(figsize=(12, height), layout="constrained")
    where = f"{results.meta['processor']}, JAX {results.meta['versions']['jax']}"
    figure.suptitle(f"{title}  ({where})", fontsize=11, x=0.01, ha="left")
    return figure


def _clean(axes: Axes, names: list[str] | None = None) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="0.9")
    if names is not None:
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()


def _bars(axes: Axes, names: list[str], values: list[float], texts: list[str], colors: Any) -> None:
    """Draw bars with a text behind each end, and leave room for the longest."""
    axes.bar_label(axes.barh(range(len(names)), values, color=colors), texts, padding=4, fontsize=8)
    axes.set_xlim(0, 1.35 * max(values))
    _clean(axes, names)


def _legend(figure: Figure, shown: dict[str, Any]) -> None:
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5, frameon=False)


def glance(results: Results) -> Figure | None:
    """The whole story: what it costs, what it saves, and what that buys."""
    skipped = ("compiled", "growth")
    costs = [
        line
        for line in report.lines(results)
        if line.measured and line.against != w.PLAIN and not line.what.startswith(skipped)
    ]
    saved = {
        g.case: g.ratios[w.PLAIN]
        for g in results.find("workloads", measure="temp memory, grad")
        if g.ratios.get(w.PLAIN, 1) < 0.95
    }
    batch = next(iter(results.find("workloads", measure="largest batch")), None)
    if not (costs and saved and batch):
        return None
    figure = _figure("tfgrad_jax at a glance", results, 4.4)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1, 0.9))
    ratios = [line.measured for line in costs]
    _bars(left, [c.what for c in costs], ratios, [f"{r:.2f}x" for r in ratios], COLORS[OURS])
    left.axvline(1, color="0.3", lw=1)
    left.set_title("what it costs:\ntime / time of the rule written by hand")
    texts = [f"{1 / v:.3g}x less" for v in saved.values()]
    _bars(middle, list(saved), list(saved.values()), texts, COLORS[OURS])
    middle.set_title("what it saves:\ntemporary memory / that of plain JAX")
    values = list(batch.values.values())
    colors = [COLORS.get(way, "#bbbbbb") for way in batch.values]
    _bars(right, list(batch.values), values, [f"{v:.0f}" for v in values], colors)
    right.set_title("what that buys:\nlargest batch of a GPT-2 step")
    right.set_xlabel(batch.note.partition(", not")[0], fontsize=8)
    for axes in (left, middle, right):
        axes.tick_params(axis="y", labelsize=8)
        axes.title.set_fontsize(9)
    same, of = report.same_programs(results)
    figure.supxlabel(
        f"Compiled, {same} of {of} programs take the flops, bytes and memory of the rule written "
        "by hand, or fewer.",
        fontsize=9,
    )
    return figure


def costs(results: Results) -> Figure | None:
    """Ours against each peer: left of 1 ours is faster."""
    cases = results.cases("overhead")
    if not cases:
        return None
    figure = _figure("Time of tfgrad_jax / time of the other (green: ours is faster)", results, 4.6)
    shown: dict[str, Any] = {}
    for axes, kind in zip(figure.subplots(1, len(KINDS), sharey=True), KINDS, strict=True):
        axes.axvspan(0.01, 1, color="#009e73", alpha=0.07, lw=0)
        axes.axvline(1, color="0.3", lw=1)
        for row, case in enumerate(cases):
            for group in results.find("overhead", case, kind):
                peers = [p for p in group.ratios if p in COLORS]
                for i, peer in enumerate(peers):
                    y, color = row + (i - len(peers) / 2) * 0.1, COLORS[peer]
                    axes.plot(group.ratio_quartiles[peer], [y, y], color=color, lw=1.5, alpha=0.6)
                    mark = {"color": color, "marker": MARKS[peer], "ms": 5, "ls": ""}
                    shown[peer] = axes.plot(group.ratios[peer], y, **mark)[0]
        axes.set(xscale="log", xlim=(0.05, 8), title=kind)
        axes.set_xticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "¼", "½", "1", "2", "4"])
        axes.minorticks_off()
        _clean(axes)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    _legend(figure, shown)
    return figure


def growth(results: Results) -> Figure | None:
    """Time against size, ours and by hand."""
    cases = results.cases("growth")
    if not cases:
        return None
    figure = _figure("How the cost grows", results, 5)
    panels = figure.subplots(2, len(cases), sharex="col", sharey=True, squeeze=False)
    shown: dict[str, Any] = {}
    for row, kind in zip(panels, ("trace grad", "eager grad"), strict=True):
        row[0].set_ylabel("ms")
        for axes, case in zip(row, cases, strict=True):
            points = [
                (int(g.measure.rpartition(" ")[2]), g)
                for g in results.find("growth", case)
                if g.measure.startswith(f"{kind} at")
            ]
            for name, style in ((w.EVERY, "s--"), (OURS, "o-")):
                values = [1e3 * g.values[name] for _, g in points]
                shown[name] = axes.plot(
                    [n for n, _ in points], values, style, color=COLORS[name], ms=4
                )[0]
            axes.set(xscale="log", yscale="log", title=f"{case}, {kind}")
            axes.title.set_fontsize(8)
            axes.set_xticks([n for n, _ in points], [str(n) for n, _ in points])
            axes.minorticks_off()
            slope = results.ratio("growth", case, f"{kind}, slope", w.EVERY)
            if slope:
                place = {"transform": axes.transAxes, "va": "top", "fontsize": 8}
                axes.text(0.05, 0.95, f"slope {slope:.2f}x", **place)
            _clean(axes)
    _legend(figure, shown)
    return figure


def memory(results: Results) -> Figure | None:
    """Temporaries and time of the workloads, against plain autodiff."""
    cases = [g.case for g in results.find("workloads", measure="temp memory, grad")]
    if results.meta["platform"] == "cpu":
        cases = [c for c in cases if "Pallas" not in c]  # interpreted: it says nothing
    if not cases:
        return None
    figure = _figure(
        "What custom gradients save: value and gradient", results, 0.6 * len(cases) + 1
    )
    shown: dict[str, Any] = {}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, ("temp memory, grad", "run grad"), strict=True):
        longest = 1.0
        for row, case in enumerate(cases):
            for group in results.find("workloads", case, measure):
                base = group.values[w.PLAIN] or 1
                for i, way in enumerate((w.PLAIN, w.CHECKPOINT, w.HAND, OURS)):
                    value = group.values.get(way, 0.0)
                    place = row + (i - 1.5) * 0.2, value / base, 0.18
                    shown[way] = axes.barh(*place, color=COLORS[way])
                    axes.bar_label(shown[way], [amount(value, group.unit)], padding=3, fontsize=6)
                    longest = max(longest, value / base)
        axes.set(title=f"{measure}, relative to plain JAX", xlim=(0, 1.2 * longest))
        axes.axvline(1, color="0.3", lw=0.8)
        _clean(axes)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    _legend(figure, shown)
    return figure


def others(results: Results) -> Figure | None:
    """The same rule in other frameworks."""
    groups = [g for g in results.find("frameworks") if len(g.values) > 4]
    if not groups:
        return None
    figure = _figure("The same rule in other frameworks", results, 3.2)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        times = {k: t for k, t in group.values.items() if "control" not in k}
        families = {"tfg": COLORS[OURS], "tf.": COLORS[w.NNX]}
        colors = [families.get(name[:3], COLORS[w.HAND]) for name in times]
        _bars(
            axes,
            list(times),
            list(times.values()),
            [amount(t, "s") for t in times.values()],
            colors,
        )
        axes.tick_params(axis="y", labelsize=7)
        axes.set(title=group.case, xlabel="s")
    return figure


FIGURES: dict[str, Callable[[Results], Figure | None]] = {
    "glance": glance, "costs": costs, "growth": growth, "memory": memory, "frameworks": others,
}  # fmt: skip
