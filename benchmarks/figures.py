"""The figures: `draw` is called by `report`, and draws what has been measured.

`glance` tells the whole story: what costs how much, and what that saves. The others show one
section each.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report
from benchmarks import ways as w
from benchmarks.results import OURS, Group, Results, amount

# The color-blind safe palette of Okabe and Ito; ours is the one that stands out.
COLORS = {
    OURS: "#d55e00", w.PLAIN: "#999999", w.CHECKPOINT: "#8c6d4f", w.HAND: "#0072b2",
    w.EVERY: "#56b4e9", w.JVP: "#6a5acd", w.TRANSPOSED: "#a99ce0", w.JAX: "#009e73",
    w.EQUINOX: "#cc79a7", w.NNX: "#e69f00", w.BOTH: "#f0a070", w.OPTAX: "#c9b458",
}  # fmt: skip
FASTER = "#009e73"
INK = "#808080"  # can be read on a light and on a dark page; figures have no background
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

Bar = tuple[float, float, str, str]  # place, value, text behind its end, color


STYLE = {
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "svg.hashsalt": "benchmarks", "svg.fonttype": "none",  # the same numbers give the same file
    "font.size": 9, "axes.titlesize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "figure.constrained_layout.use": True, "legend.frameon": False,
}  # fmt: skip


def draw(found: Sequence[Results], folder: Path) -> None:
    """Draw `<name>-<figure>.svg` for each of the results, and `glance.svg` for one.

    That is the last, of those with workloads if there are any.
    """
    whole = [results for results in found if results.find("workloads")]
    with mpl.rc_context(STYLE):
        figures = {"glance": glance((whole or found)[-1])}
        for results in found:
            for make in (costs, growth, memory, frameworks):
                figures[f"{results.name}-{make.__name__}"] = make(results)
        for name, figure in figures.items():
            if figure is not None:
                path = folder / f"{name}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None})


def _panels(
    title: str, results: Results, size: tuple[float, float], rows: int, columns: int, **share: Any
) -> tuple[Figure, Any]:
    figure = _figure(title, results, size)
    return figure, figure.subplots(rows, columns, squeeze=False, **share)


def _figure(title: str, results: Results, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size)
    where = f"{results.meta['processor']}, JAX {results.meta['versions']['jax']}"
    figure.suptitle(f"{title}  ({where})", fontsize=11, x=0.01, ha="left")
    return figure


def _rows(axes: Axes, names: Iterable[str], places: Sequence[float] = ()) -> None:
    """Name the rows of axes, the first one on top."""
    names = list(names)
    axes.set_yticks(places or range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _bars(axes: Axes, bars: list[Bar], width: float) -> None:
    """Draw bars, with room for the texts behind their ends in axes of so many inches at least."""
    places, values, texts, colors = zip(*bars, strict=True) if bars else [()] * 4
    axes.bar_label(axes.barh(places, values, 0.8, color=colors), texts, padding=4, fontsize=8)
    room = [max(0.2, 1 - LETTER * (len(text) + 1) / width) for text in texts]
    axes.set_xlim(0, max([1e-12, *(value / r for value, r in zip(values, room, strict=True))]))


def _legend(figure: Figure, names: Iterable[str], handles: Any = None) -> None:
    handles = handles or [mpl.patches.Patch(color=COLORS[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=6)


def glance(results: Results) -> Figure | None:
    """What it costs, what it saves, and what that buys, as far as it has been measured."""
    ratios = {
        f"{what}\n/ {against}": results.ratio("overhead", case, measure, against)
        for what, case, measure, against in COSTS
    }
    paid = {name: ratio for name, ratio in ratios.items() if ratio}
    groups = results.find("workloads", measure="temp memory, grad")
    saved = [g for g in groups if g.ratios.get(w.PLAIN, 1) < 0.95]
    batches = results.find("workloads", measure="largest batch")
    shown = [(f, x) for f, x in ((_paid, paid), (_saved, saved), (_batch, batches)) if x]
    if not shown:
        return None
    figure = _figure("tfgrad_jax at a glance", results, (8.5, 6))
    rest = range(1, len(shown))  # beside the first, one above the other
    panels = figure.subplot_mosaic([[0, i] for i in rest] or [[0]])
    for i, (show, found) in enumerate(shown):
        show(panels[i], found)
    same, of = report.same_programs(results)
    if of:
        text = (
            f"Compiled, {same} of {of} programs take no more flops, bytes and memory than by hand."
        )
        figure.supxlabel(text, fontsize=9)
    return figure


def _paid(axes: Axes, ratios: dict[str, float]) -> None:
    """Draw ratios as bars that begin at 1, on a logarithmic scale."""
    logs = [math.log2(ratio) for ratio in ratios.values()]
    colors = [FASTER if log < 0 else COLORS[OURS] for log in logs]
    bars = axes.barh(range(len(logs)), logs, 0.7, color=colors)
    axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios.values()], padding=3, fontsize=8)
    axes.axvline(0, color=INK, lw=1)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set(xlim=(min(0, *logs) - 1.4, max(0, *logs) + 1.4), xticks=[])
    axes.set_title("What it costs: time / that of the other\n(green: ours is faster)")
    _rows(axes, ratios)


def _saved(axes: Axes, groups: list[Group]) -> None:
    bars = []
    for i, group in enumerate(groups):
        share = group.ratios[w.PLAIN]
        text = f"{amount(group.values[OURS], group.unit)}, {1 / share:.2g}x less"
        bars.append((i, 100 * share, text, COLORS[OURS]))
    _bars(axes, bars, 2.2)
    axes.set_title("What it saves: temporary memory,\n% of that of plain JAX")
    axes.set_xticks([0, 25, 50, 75, 100])
    _rows(axes, [g.case for g in groups])


def _batch(axes: Axes, groups: list[Group]) -> None:
    values = groups[0].values
    _bars(axes, [(i, v, f"{v:.0f}", COLORS[k]) for i, (k, v) in enumerate(values.items())], 2.2)
    axes.set_title("What that buys: largest batch\nof a GPT-2 training step")
    axes.set_xlabel(groups[0].note, fontsize=8)
    _rows(axes, values)


def costs(results: Results) -> Figure | None:
    """Ours against each peer: left of 1 ours is faster."""
    cases = results.cases("overhead")
    if not cases:
        return None
    title = "Time of tfgrad_jax / time of the other (green: ours is faster)"
    figure, panels = _panels(title, results, (12, 4.6), 1, len(KINDS), sharey=True)
    shown: dict[str, Any] = {}
    for axes, kind in zip(panels[0], KINDS, strict=True):
        axes.axvspan(0.01, 1, color=FASTER, alpha=0.07, lw=0)
        axes.axvline(1, color=INK, lw=1)
        for group in results.find("overhead", measure=kind):
            peers = [p for p in group.ratios if p in COLORS]
            for i, peer in enumerate(peers):
                y = cases.index(group.case) + (i - (len(peers) - 1) / 2) * 0.12
                style = {"color": COLORS[peer], "marker": MARKS[peer], "ms": 5, "ls": ""}
                axes.plot(group.ratio_quartiles[peer], [y, y], color=COLORS[peer], alpha=0.6)
                shown[peer] = axes.plot(group.ratios[peer], y, **style)[0]
        axes.set(xscale="log", xlim=(0.04, 8), title=kind)
        axes.set_xticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "¼", "½", "1", "2", "4"])
        axes.minorticks_off()
        axes.grid(axis="x", color=INK, alpha=0.25)
    _rows(axes, cases)
    _legend(figure, shown, shown.values())
    return figure


def growth(results: Results) -> Figure | None:
    """Time against size, ours and by hand."""
    cases = results.cases("growth")
    if not cases:
        return None
    title, kinds = (
        "How the cost grows, and the slope of ours / by hand",
        ("trace grad", "eager grad"),
    )
    share = {"sharex": "col", "sharey": True}
    figure, panels = _panels(title, results, (12, 5), 2, len(cases), **share)
    for (i, kind), (j, case) in ((k, c) for k in enumerate(kinds) for c in enumerate(cases)):
        axes, points = panels[i, j], {}
        for group in results.find("growth", case):
            what, _, count = group.measure.partition(" at ")
            if what == kind:
                points[int(count)] = group.values
        for name, style in ((w.EVERY, "s--"), (OURS, "o-")):
            values = [1e3 * found[name] for found in points.values()]
            axes.plot(list(points), values, style, color=COLORS[name], ms=4)
        axes.set(xscale="log", yscale="log")
        ticks = [n for n in points if n == max(points) or 3 * n < max(points)]
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        slope = results.ratio("growth", case, f"{kind}, slope", w.EVERY)
        text = f"slope {slope:.2f}x" if slope else ""
        axes.text(0.05, 0.97, text, transform=axes.transAxes, va="top", fontsize=8)
        panels[0, j].set_title(case)
        panels[i, 0].set_ylabel(f"{kind}, ms")
    _legend(figure, (w.EVERY, OURS))
    return figure


def memory(results: Results) -> Figure | None:
    """Temporaries and time of the workloads, against plain autodiff."""
    rows: dict[tuple[str, str], float] = {}
    groups = [  # an interpreted kernel says nothing
        g
        for g in results.find("workloads", measure="temp memory, grad")
        if not (results.name.startswith("cpu") and g.case.startswith("Pallas"))
    ]
    for i, group in enumerate(groups):
        rows |= {(group.case, way): i + len(rows) + j for j, way in enumerate(group.values)}
    if not rows:
        return None
    title = "What custom gradients save: value and gradient, relative to plain JAX"
    size = 12, 1.2 + 0.17 * (max(rows.values()) + 1)
    figure, panels = _panels(title, results, size, 1, 2, sharey=True)
    shown = {"temp memory, grad": "temporary memory", "run grad": "time"}
    for axes, (measure, name) in zip(panels[0], shown.items(), strict=True):
        bars = []
        for group in results.find("workloads", measure=measure):
            plain = group.values[w.PLAIN] or 1
            for way in [x for x in group.values if (group.case, x) in rows]:
                value = group.values[way]
                text = amount(value, group.unit)
                bars.append((rows[group.case, way], value / plain, text, COLORS[way]))
        _bars(axes, bars, 4.5)
        axes.set_title(name)
    middles = {g.case: [y for (case, _), y in rows.items() if case == g.case] for g in groups}
    _rows(axes, middles, [sum(ys) / len(ys) for ys in middles.values()])
    _legend(figure, dict.fromkeys(way for _, way in rows))
    return figure


def frameworks(results: Results) -> Figure | None:
    """The same rule in other frameworks."""
    groups = [g for g in results.find("frameworks") if len(g.values) > 4]
    if not groups:
        return None
    figure, panels = _panels("The same rule elsewhere: time", results, (12, 3.2), 1, len(groups))
    families = {"tfg": COLORS[OURS], "tf.": COLORS[w.NNX], "tor": COLORS[w.EQUINOX]}
    for axes, group in zip(panels[0], groups, strict=True):
        times = {k: t for k, t in group.values.items() if "control" not in k}
        bars = [
            (i, t, amount(t, "s"), families.get(name[:3], COLORS[w.HAND]))
            for i, (name, t) in enumerate(times.items())
        ]
        _bars(axes, bars, 3)
        axes.set(title=group.case, xticks=[])
        _rows(axes, times)
    return figure
