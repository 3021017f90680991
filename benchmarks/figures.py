"""The figures: `draw` is called by `report`, and draws what has been measured.

`glance` shows the whole picture: what costs how much, and what that saves; `glance-narrow` is the
same for a phone. `costs`, `growth`, `layers` and `memory` show one section each.
"""

import itertools
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import layers as many
from benchmarks import ways as w
from benchmarks.results import OURS, Group, Results, amount

# The color-blind safe palette of Okabe and Ito; tfgrad_jax stands out.
COLORS = {
    OURS: "#d55e00", w.PLAIN: "#999999", w.CHECKPOINT: "#8c6d4f", w.HAND: "#0072b2",
    w.EVERY: "#56b4e9", w.JVP: "#6a5acd", w.TRANSPOSED: "#a99ce0", w.JAX: "#009e73",
    w.BOTH: "#f0a070", w.HAND_BOTH: "#7fb2d9", w.OPTAX: "#c9b458",
}  # fmt: skip
FASTER = "#009e73"
INK = "#767676"  # can be read on a light and on a dark page; figures have no background
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
STYLE = {
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "svg.hashsalt": "benchmarks", "svg.fonttype": "none",  # the same numbers give the same file
    "font.size": 9, "axes.titlesize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "figure.constrained_layout.use": True, "legend.frameon": False,
}  # fmt: skip


def draw(found: Sequence[Results], newest: Results, same: tuple[int, int], folder: Path) -> None:
    """Draw `<name>-<figure>.svg` for each of the results, and `glance.svg` for the newest.

    `same` says how many counts of compiled programs are no more than hand-written ones, and of how
    many.
    """
    with mpl.rc_context(STYLE):
        figures = {"glance": glance(newest, same), "glance-narrow": glance(newest, same, True)}
        for results, make in itertools.product(found, (costs, growth, layers, memory)):
            figures[f"{results.name}-{make.__name__}"] = make(results)
        for name, figure in figures.items():
            if figure is not None:
                path = folder / f"{name}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None})


def _figure(title: str, results: Results, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size)
    where = f"JAX {results.meta['versions']['jax']}"
    if not results.meta.get("later"):  # all in one run
        where = f"{results.meta['processor']}, {where}"
    between = "  " if size[0] > 5 else "\n"
    figure.suptitle(f"{title}{between}({where})", fontsize=11, x=0.01, ha="left")
    return figure


def _rows(axes: Axes, names: Iterable[str], places: Sequence[float] | None = None) -> None:
    """Name the rows of axes, the first one on top."""
    names = list(names)
    axes.set_yticks(places or range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _bars(axes: Axes, bars: Iterable[tuple[float, float, str, str]], room: float) -> None:
    """Draw bars: place, value, text and color; the room behind them is relative to the longest."""
    places, values, texts, colors = zip(*bars, strict=True)
    axes.bar_label(axes.barh(places, values, 0.8, color=colors), texts, padding=4, fontsize=8)
    axes.margins(x=room)


def _legend(figure: Figure, names: Iterable[str]) -> None:
    handles = [mpl.patches.Patch(color=COLORS[name], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=6)


def glance(results: Results, same: tuple[int, int], narrow: bool = False) -> Figure | None:
    """What it costs, what it saves, and what that buys, as far as it has been measured."""
    ratios = {(what, key[-1]): results.ratio("overhead", *key) for what, *key in COSTS}
    memory = results.find("workloads", None, "temp memory, grad")
    panels = {
        _paid: {f"{what}\n/ {other}": ratio for (what, other), ratio in ratios.items() if ratio},
        _saved: [g for g in memory if g.ratios.get(w.PLAIN, 1) < 0.95],
        _batch: results.find("workloads", None, "largest batch"),
    }
    first, *rest = [show for show, found in panels.items() if found] or [None]
    if first is None:
        return None
    figure = _figure("tfgrad_jax at a glance", results, (3.7, 12) if narrow else (7.8, 6.6))
    if narrow:  # one below the other
        heights = {_paid: 1.8, _saved: 1, _batch: 0.9}
        shown = figure.subplot_mosaic(
            [[show] for show in (first, *rest)], height_ratios=[heights[s] for s in (first, *rest)]
        )
    else:  # beside the first panel are the others, one above the other
        shown = figure.subplot_mosaic([[first, x] for x in rest] or [[first]])
    for show, axes in shown.items():
        show(axes, panels[show])
        if narrow:
            labels = [_wrapped(text.get_text()) for text in axes.get_yticklabels()]
            axes.set_yticks(axes.get_yticks(), labels)
    count, of = same
    breaks = "\n" if narrow else " "
    lines = [f"Orange: tfgrad_jax.{breaks}Green: tfgrad_jax, where it is faster than the baseline."]
    if of:
        lines.append(
            f"Compiled programs: {count} of {of} counts of flops, bytes{breaks}and memory "
        )
        lines[-1] += f"are no more than{breaks}those of hand-written rules."
    figure.supxlabel("\n".join(lines), fontsize=8)
    return figure


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 20) for line in text.splitlines())


def _paid(axes: Axes, ratios: dict[str, float]) -> None:
    """Draw ratios as bars that begin at 1, on a logarithmic scale."""
    colors = [FASTER if ratio < 1 else COLORS[OURS] for ratio in ratios.values()]
    lengths = [ratio - 1 for ratio in ratios.values()]
    bars = axes.barh(range(len(ratios)), lengths, 0.7, left=1, color=colors)
    axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios.values()], padding=3, fontsize=8)
    axes.axvline(1, color=INK, lw=1)
    axes.spines["left"].set_visible(False)
    low, high = min(1, *ratios.values()) / 2.6, max(1, *ratios.values()) * 2.6
    axes.set(xscale="log", xlim=(low, high))
    ticks = {0.1: "0.1", 0.25: "¼", 0.5: "½", 1: "1", 2: "2", 4: "4", 8: "8", 16: "16"}
    axes.set_xticks(*zip(*((x, name) for x, name in ticks.items() if low < x < high), strict=True))
    axes.minorticks_off()
    axes.grid(axis="x", color=INK, alpha=0.25)
    axes.set_title("What it costs:\ntime relative to the baseline")
    _rows(axes, ratios)


def _saved(axes: Axes, groups: list[Group]) -> None:
    bars = []
    for i, group in enumerate(groups):
        share = group.ratios[w.PLAIN]
        text = f"{amount(group.values[OURS], group.unit)}, {1 / share:.2g}x less"
        bars.append((i, 100 * share, text, COLORS[OURS]))
    _bars(axes, bars, 1.2)
    axes.set_title("What it saves: temporary memory,\n% of plain JAX")
    axes.set_xticks([0, 25, 50, 75, 100])
    _rows(axes, [g.title for g in groups])


def _batch(axes: Axes, groups: list[Group]) -> None:
    values = groups[0].values
    _bars(axes, [(i, v, f"{v:.0f}", COLORS[k]) for i, (k, v) in enumerate(values.items())], 0.2)
    axes.set_title("What that buys: largest batch\nof a GPT-2 training step")
    axes.set_xlabel(groups[0].note, fontsize=8, loc="right")
    _rows(axes, values)


def costs(results: Results) -> Figure | None:
    """tfgrad_jax against each baseline, with quartiles: left of 1 tfgrad_jax is faster."""
    cases = list(dict.fromkeys(g.case for g in results.find("overhead")))
    if not cases:
        return None
    title = "Time of tfgrad_jax relative to each baseline (green: tfgrad_jax is faster)"
    figure, shown = _figure(title, results, (12, 4.6)), {}
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        axes.axvspan(0.01, 1, color=FASTER, alpha=0.07, lw=0)
        axes.axvline(1, color=INK, lw=1)
        for group in results.find("overhead", None, kind):
            peers = [p for p in group.ratios if p in COLORS]
            shown |= dict.fromkeys(peers)
            for i, peer in enumerate(peers):
                y = cases.index(group.case) + (i - (len(peers) - 1) / 2) * 0.12
                axes.plot(group.ratio_quartiles[peer], [y, y], color=COLORS[peer], alpha=0.6)
                axes.plot(group.ratios[peer], y, "o", color=COLORS[peer], ms=5)
        axes.set(xscale="log", xlim=(0.04, 8), title=kind)
        axes.set_xticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "¼", "½", "1", "2", "4"])
        axes.minorticks_off()
        axes.grid(axis="x", color=INK, alpha=0.25)
    _rows(panels[0], cases)
    _legend(figure, shown)
    return figure


def growth(results: Results) -> Figure | None:
    """Time against size, of tfgrad_jax and of hand-written rules."""
    cases = list(dict.fromkeys(g.case for g in results.find("growth")))
    cases = [case for case in cases if not case.startswith(many.PREFIX)]
    if not cases:
        return None
    title = "How the cost grows, and the slope relative to hand-written rules"
    figure = _figure(title, results, (12, 5))
    kinds = ("trace grad", "eager grad")
    panels = figure.subplots(2, len(cases), squeeze=False, sharex="col", sharey=True)
    for (kind, case), axes in zip(itertools.product(kinds, cases), panels.flat, strict=True):
        parts = [(g.measure.partition(" at "), g.values) for g in results.find("growth", case)]
        points = {int(count): values for (what, _, count), values in parts if what == kind}
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
    for axes, case in zip(panels[0], cases, strict=True):
        axes.set_title(case)
    for axes, kind in zip(panels[:, 0], kinds, strict=True):
        axes.set_ylabel(f"{kind}, ms")
    _legend(figure, (w.EVERY, OURS))
    return figure


def layers(results: Results) -> Figure | None:
    """Time of models of many layers, relative to the undecorated one: flat lines are linear."""
    measured = {g.case for g in results.find("growth")}
    kinds = [kind for kind in many.KINDS if f"{many.PREFIX}{kind}" in measured]
    if not kinds:
        return None
    title = "Models of many layers: time relative to the undecorated model"
    figure = _figure(title, results, (12, 5))
    panels = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    names = "tfgrad_jax, undeclared", f"{OURS}, declared", w.EVERY
    colors = dict(zip(names, (COLORS[w.BOTH], COLORS[OURS], COLORS[w.EVERY]), strict=True))
    for (what, kind), axes in zip(
        itertools.product(many.MEASURES, kinds), panels.flat, strict=True
    ):
        for name, end in zip(names, ("", ", declared", ", declared"), strict=True):
            case = f"{many.PREFIX}{kind}{end}"
            groups = [g for g in results.find("growth", case) if g.measure.startswith(f"{what} at")]
            sizes = [int(g.measure.rpartition(" ")[2]) for g in groups]
            ratios = [
                g.ratios[w.PLAIN] / (g.ratios[name] if name == w.EVERY else 1) for g in groups
            ]
            axes.plot(sizes, ratios, "o-", color=colors[name], ms=4)
        axes.axhline(1, color=INK, lw=1)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(many.SIZES, map(str, many.SIZES))
        top = axes.get_ylim()[1]
        axes.set_yticks([y for y in (1, 2, 4, 8, 16, 32, 64) if y <= max(2, top)])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(axis="y", color=INK, alpha=0.25)
    for axes, kind in zip(panels[0], kinds, strict=True):
        axes.set_title(kind)
    for axes in panels[-1]:
        axes.set_xlabel("layers")
    for axes, what in zip(panels[:, 0], many.MEASURES, strict=True):
        axes.set_ylabel(f"{what} / plain JAX")
    handles = [mpl.patches.Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def memory(results: Results) -> Figure | None:
    """Temporaries and time of the workloads, against plain autodiff."""
    cases = {
        g.case: list(g.values)
        for g in results.find("workloads", None, "temp memory, grad")
        if not (results.meta["platform"] == "cpu" and "Pallas" in g.case)  # interpreted
    }
    if not cases:
        return None
    both = [(case, way) for case, ways in cases.items() for way in ways]
    # One place for each bar, and one between two cases.
    places = {(case, way): i + list(cases).index(case) for i, (case, way) in enumerate(both)}
    title = "What custom gradients save: value and gradient, relative to plain JAX"
    figure = _figure(title, results, (12, 1.2 + 0.17 * (max(places.values()) + 1)))
    shown = {"temp memory, grad": "temporary memory", "run grad": "time"}
    shown = {m: title for m, title in shown.items() if results.find("workloads", None, m)}
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (measure, title) in zip(panels, shown.items(), strict=True):
        bars = []
        for group in results.find("workloads", None, measure):
            plain = group.values[w.PLAIN] or 1
            for way in cases.get(group.case, ()):
                value = group.values[way]
                text = amount(value, group.unit)
                bars.append((places[group.case, way], value / plain, text, COLORS[way]))
        _bars(axes, bars, 0.2)
        axes.set_title(title)
    middles = [statistics.mean(places[case, way] for way in ways) for case, ways in cases.items()]
    _rows(panels[0], cases, middles)
    _legend(figure, dict.fromkeys(way for _, way in places))
    return figure
