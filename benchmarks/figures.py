"""The figures: `draw` is called by `report`, and draws what has been measured.

`glance` tells the whole story: what costs how much, and what that saves. The others show one
section each.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import ways as w
from benchmarks.results import OURS, Group, Results, amount

# The color-blind safe palette of Okabe and Ito; ours is the one that stands out.
COLORS = {
    OURS: "#d55e00", w.PLAIN: "#999999", w.CHECKPOINT: "#444444", w.HAND: "#0072b2",
    w.EVERY: "#56b4e9", w.JVP: "#3a3a8c", w.TRANSPOSED: "#8888cc", w.JAX: "#009e73",
    w.EQUINOX: "#cc79a7", w.NNX: "#e69f00", w.BOTH: "#f0a070", w.OPTAX: "#c9b458",
}  # fmt: skip
MARKS = dict(zip(COLORS, "*Xxosp<D^vd+", strict=True))
KINDS = ("eager forward", "eager grad", "run grad", "trace grad")
# (what, case, measure, against) of the glance
COSTS = (
    ("compiled gradient", "inputs only", "run grad", w.HAND),
    ("eager call", "inputs only", "eager forward", w.PLAIN),
    ("eager call", "inputs only", "eager forward", w.HAND),
    ("eager gradient", "inputs only", "eager grad", w.HAND),
    ("eager gradient, weights", "declared variables", "eager grad", w.HAND),
    ("trace of a gradient", "inputs only", "trace grad", w.EVERY),
    ("trace, weights", "declared variables", "trace grad", w.EVERY),
    ("trace of a Hessian", "inputs only", "trace hessian", w.JVP),
    ("eager jvp", "inputs only", "eager jvp", w.JVP),
)
LETTER = 0.075  # inches that a letter of a label takes, more than in any font


def draw(found: Sequence[Results], folder: Path) -> None:
    """Draw `<name>-<figure>.svg` for each of the results, and `glance.svg` for the last."""
    # The same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "benchmarks", "font.size": 9, "svg.fonttype": "none"}):
        for results in found:
            for make in (costs, growth, memory, frameworks):
                _save(make(results), folder / f"{results.name}-{make.__name__}.svg")
        _save(glance(found[-1]), folder / "glance.svg")


def _save(figure: Figure | None, path: Path) -> None:
    if figure is not None:
        figure.savefig(path, metadata={"Date": None})


def _figure(title: str, results: Results, height: float, width: float = 12) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)
    where = f"{results.meta['processor']}, JAX {results.meta['versions']['jax']}"
    figure.suptitle(f"{title}  ({where})", fontsize=11, x=0.01, ha="left")
    return figure


def _clean(axes: Axes, names: Sequence[str] = (), places: Sequence[float] = ()) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="0.9")
    if names:
        axes.set_yticks(places or range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()


def _bars(axes: Axes, bars: list[tuple[float, float, str, str]], width: float) -> None:
    """Draw bars (place, value, text, color), so that the texts behind their ends fit in the axes.

    The axes are at least so many inches wide.
    """
    places, values, texts, colors = zip(*bars, strict=True) if bars else [()] * 4
    axes.bar_label(axes.barh(places, values, 0.8, color=colors), texts, padding=4, fontsize=8)
    room = [max(0.2, 1 - LETTER * (len(text) + 1) / width) for text in texts]
    axes.set_xlim(0, max([1e-12, *(value / r for value, r in zip(values, room, strict=True))]))


def _legend(figure: Figure, names: Any, handles: Any = None) -> None:
    names = list(names)
    handles = handles or [mpl.patches.Patch(color=COLORS[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=6, frameon=False)


def glance(results: Results) -> Figure | None:
    """What it costs, what it saves, and what that buys, as far as it has been measured."""
    rows = [
        (f"{what}\n/ {against}", ratio)
        for what, case, measure, against in COSTS
        if (ratio := results.ratio("overhead", case, measure, against))
    ]
    saved = [g for g in results.find("workloads", measure="temp memory, grad") if _saves(g)]
    batches = results.find("workloads", measure="largest batch")
    panels = [(rows, _glance_costs), (saved, _glance_memory), (batches, _glance_batch)]
    panels = [(what, show) for what, show in panels if what]
    if not panels:
        return None
    figure = _figure("tfgrad_jax at a glance", results, 4.6, 1 + 4 * len(panels))
    for (what, show), axes in zip(
        panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True
    ):
        show(axes, what)
        axes.tick_params(axis="y", labelsize=8)
        axes.title.set_fontsize(9)
    return figure


def _saves(group: Group) -> bool:
    return group.ratios.get(w.PLAIN, 1) < 0.95


def _glance_costs(axes: Axes, rows: list[tuple[str, float]]) -> None:
    """Draw ratios as bars that begin at 1: to the left ours is faster."""
    logs = [math.log2(ratio) for _, ratio in rows]
    colors = [COLORS[OURS] if log > 0 else COLORS[w.JAX] for log in logs]
    bars = axes.barh(range(len(rows)), logs, 0.7, color=colors)
    axes.bar_label(bars, [f"{ratio:.2f}x" for _, ratio in rows], padding=3, fontsize=8)
    axes.axvline(0, color="0.3", lw=1)
    axes.set_xlim(min(0, *logs) - 1.4, max(0, *logs) + 1.4)
    axes.set_xticks([])
    axes.set_title("what it costs: time of ours / of the other\n(green: ours is faster)")
    _clean(axes, [name for name, _ in rows])


def _glance_memory(axes: Axes, groups: list[Group]) -> None:
    bars = []
    for i, group in enumerate(groups):
        share = group.ratios[w.PLAIN]
        text = f"{amount(group.values[OURS], group.unit)}, {1 / share:.2g}x less"
        bars.append((i, 100 * share, text, COLORS[OURS]))
    _bars(axes, bars, 2.2)
    axes.set_title("what it saves: temporary memory of a gradient,\n% of that of plain JAX")
    _clean(axes, [g.case for g in groups])


def _glance_batch(axes: Axes, groups: list[Group]) -> None:
    (group,) = groups
    bars = [(i, v, f"{v:.0f}", COLORS[way]) for i, (way, v) in enumerate(group.values.items())]
    _bars(axes, bars, 2.2)
    axes.set_title(f"what that buys: largest batch of a GPT-2 step,\n{group.note}")
    _clean(axes, list(group.values))


def costs(results: Results) -> Figure | None:
    """Ours against each peer: left of 1 ours is faster."""
    cases = results.cases("overhead")
    if not cases:
        return None
    figure = _figure("Time of tfgrad_jax / time of the other (green: ours is faster)", results, 4.6)
    shown: dict[str, Any] = {}
    for axes, kind in zip(figure.subplots(1, len(KINDS), sharey=True), KINDS, strict=True):
        axes.axvspan(0.01, 1, color=COLORS[w.JAX], alpha=0.07, lw=0)
        axes.axvline(1, color="0.3", lw=1)
        for row, group in (
            (i, g) for i, c in enumerate(cases) for g in results.find("overhead", c, kind)
        ):
            peers = [p for p in group.ratios if p in COLORS]
            for i, peer in enumerate(peers):
                y, color = row + (i - (len(peers) - 1) / 2) * 0.12, COLORS[peer]
                axes.plot(group.ratio_quartiles[peer], [y, y], color=color, lw=1.5, alpha=0.6)
                mark = {"color": color, "marker": MARKS[peer], "ms": 5, "ls": ""}
                shown[peer] = axes.plot(group.ratios[peer], y, **mark)[0]
        axes.set(xscale="log", xlim=(0.04, 8), title=kind)
        axes.set_xticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "¼", "½", "1", "2", "4"])
        axes.minorticks_off()
        _clean(axes)
    _clean(axes, cases)
    _legend(figure, shown, shown.values())
    return figure


def growth(results: Results) -> Figure | None:
    """Time against size, ours and by hand."""
    cases = results.cases("growth")
    if not cases:
        return None
    figure = _figure("How the cost grows, and the slope of ours / by hand", results, 5)
    panels = figure.subplots(2, len(cases), sharex="col", sharey=True, squeeze=False)
    for row, kind in zip(panels, ("trace grad", "eager grad"), strict=True):
        row[0].set_ylabel(f"{kind}, ms")
        for axes, case in zip(row, cases, strict=True):
            points = {
                int(g.measure.rpartition(" ")[2]): g
                for g in results.find("growth", case)
                if g.measure.startswith(f"{kind} at")
            }
            for name, style in ((w.EVERY, "s--"), (OURS, "o-")):
                values = [1e3 * g.values[name] for g in points.values()]
                axes.plot(list(points), values, style, color=COLORS[name], ms=4)
            axes.set(xscale="log", yscale="log")
            ticks = [n for n in points if n == max(points) or 3 * n < max(points)]
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
            slope = results.ratio("growth", case, f"{kind}, slope", w.EVERY)
            if slope:
                place = {"transform": axes.transAxes, "va": "top", "fontsize": 8}
                axes.text(0.05, 0.97, f"slope {slope:.2f}x", **place)
            _clean(axes)
    for axes, case in zip(panels[0], cases, strict=True):
        axes.set_title(case, fontsize=9)
    _legend(figure, (w.EVERY, OURS))
    return figure


def memory(results: Results) -> Figure | None:
    """Temporaries and time of the workloads, against plain autodiff."""
    rows: dict[tuple[str, str], float] = {}
    groups = results.find("workloads", measure="temp memory, grad")
    for i, group in enumerate(groups):
        rows |= {(group.case, way): i + len(rows) + j for j, way in enumerate(group.values)}
    if not rows:
        return None
    title = "What custom gradients save: value and gradient, relative to plain JAX"
    figure = _figure(title, results, 1.2 + 0.17 * (max(rows.values()) + 1))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, ("temp memory, grad", "run grad"), strict=True):
        bars = [
            (
                rows[g.case, way],
                value / (g.values[w.PLAIN] or 1),
                amount(value, g.unit),
                COLORS[way],
            )
            for g in results.find("workloads", measure=measure)
            for way, value in g.values.items()
            if (g.case, way) in rows
        ]
        _bars(axes, bars, 4.5)
        axes.axvline(1, color="0.3", lw=0.8)
        axes.set_title(
            measure.replace("run grad", "time").replace("temp memory, grad", "temporary memory")
        )
        _clean(axes)
    middles = {g.case: [y for (case, _), y in rows.items() if case == g.case] for g in groups}
    _clean(axes, list(middles), [sum(ys) / len(ys) for ys in middles.values()])
    _legend(figure, dict.fromkeys(way for _, way in rows))
    return figure


def frameworks(results: Results) -> Figure | None:
    """The same rule in other frameworks."""
    groups = [g for g in results.find("frameworks") if len(g.values) > 4]
    if not groups:
        return None
    figure = _figure("The same rule in other frameworks: time", results, 3.2)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    families = {"tfg": COLORS[OURS], "tf.": COLORS[w.NNX], "tor": COLORS[w.EQUINOX]}
    for axes, group in zip(panels, groups, strict=True):
        times = {k: t for k, t in group.values.items() if "control" not in k}
        colors = [families.get(name[:3], COLORS[w.HAND]) for name in times]
        texts = [amount(t, "s") for t in times.values()]
        _bars(axes, list(zip(range(len(times)), times.values(), texts, colors, strict=True)), 3)
        axes.set(title=group.case, xticks=[])
        _clean(axes, list(times))
    return figure
