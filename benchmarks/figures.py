"""The figures: one glance says what costs nothing and what saves memory."""

from collections.abc import Callable
from pathlib import Path

from benchmarks import frameworks, growth, overhead, work
from benchmarks.results import (
    CHECKPOINT,
    EQUINOX,
    HAND,
    HAND_EVERY_ORDER,
    HAND_JVP,
    JAX_CUSTOM_GRADIENT,
    NNX,
    OURS,
    PLAIN,
    UNDECORATED,
    Results,
    amount,
)

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:  # without it there are only tables
    Figure = None

# The color-blind safe palette of Okabe and Ito; ours is the one that stands out.
COLORS = {
    OURS: "#d55e00",
    HAND: "#0072b2",
    HAND_EVERY_ORDER: "#56b4e9",
    HAND_JVP: "#3a3a8c",
    JAX_CUSTOM_GRADIENT: "#009e73",
    EQUINOX: "#cc79a7",
    NNX: "#e69f00",
    UNDECORATED: "#999999",
    PLAIN: "#999999",
    CHECKPOINT: "#444444",
}
MARKS = {
    HAND: "o", HAND_EVERY_ORDER: "s", HAND_JVP: "P", JAX_CUSTOM_GRADIENT: "D",
    EQUINOX: "^", NNX: "v", UNDECORATED: "|",
}  # fmt: skip


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw what there is, as `<stem>-<figure>.svg`; return the paths."""
    if Figure is None:
        return []
    drawn = []
    # The same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "benchmarks", "font.size": 9, "svg.fonttype": "none"}):
        for name, make in FIGURES.items():
            figure = make(results)
            if figure is not None:
                path = stem.with_name(f"{stem.name}-{name}.svg")
                figure.savefig(path, metadata={"Date": None})
                drawn.append(path)
    return drawn


def _title(figure: "Figure", text: str, results: Results) -> None:
    where = f"{results.meta['processor']}, JAX {results.meta['versions']['jax']}"
    figure.suptitle(f"{text}  ({where})", fontsize=11, x=0.01, ha="left")


def _clean(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def costs(results: Results) -> "Figure | None":
    """Ours against each peer: left of 1 ours is faster."""
    groups = results.find(overhead.SECTION)
    if not groups:
        return None
    cases = [case for case in overhead.CASES if results.find(overhead.SECTION, case)]
    measures = list(overhead.MEASURES)
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = figure.subplots(1, len(measures), sharey=True)
    seen = {}
    for axes, measure in zip(panels, measures, strict=True):
        axes.axvspan(0.01, 1, color="#009e73", alpha=0.07, lw=0)
        axes.axvline(1, color="0.3", lw=1)
        for row, case in enumerate(cases):
            group = results.first(overhead.SECTION, case, measure)
            for i, (peer, ratio) in enumerate(group.ratios.items() if group else ()):
                low, high = group.ratio_quartiles[peer]
                y = row + (i - 2.5) * 0.11
                axes.plot([low, high], [y, y], color=COLORS[peer], lw=1.5, alpha=0.6)
                mark = {"color": COLORS[peer], "marker": MARKS[peer], "ms": 5, "ls": ""}
                seen[peer] = axes.plot(ratio, y, **mark)[0]
        axes.set(xscale="log", xlim=(0.06, 8), title=measure)
        axes.set_xticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "¼", "½", "1", "2", "4"])
        axes.minorticks_off()
        axes.grid(axis="x", color="0.9")
        axes.tick_params(axis="y", length=0)
        _clean(axes)
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].invert_yaxis()
    panels[2].set_xlabel("time of tfgrad_jax / time of the other (green: ours is faster)")
    figure.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=4, frameon=False)
    _title(figure, "What the decorator costs, on functions that do almost nothing", results)
    return figure


def slopes(results: Results) -> "Figure | None":
    """Time against size, ours and by hand."""
    if not results.find(growth.SECTION):
        return None
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(2, len(growth.CASES), sharex="col", sharey=True)
    for row, kind in enumerate(("trace", "eager grad")):
        for axes, case in zip(panels[row], growth.CASES, strict=True):
            groups = results.find(growth.SECTION, f"{case}, {kind}")
            points = [g for g in groups if g.measure.isdigit()]
            for name, style in ((HAND_EVERY_ORDER, "s--"), (OURS, "o-")):
                known = [(int(g.measure), 1e3 * g.values[name]) for g in points if name in g.values]
                if known:
                    axes.plot(
                        *zip(*known, strict=True), style, color=COLORS[name], ms=4, label=name
                    )
            axes.set(xscale="log", yscale="log")
            sizes = growth.CASES[case][1]
            axes.set_xticks(sizes, [str(n) for n in sizes])
            axes.minorticks_off()
            slope = results.first(growth.SECTION, f"{case}, {kind}", "slope")
            if slope and HAND_EVERY_ORDER in slope.ratios:
                text = f"slope {slope.ratios[HAND_EVERY_ORDER]:.2f}x"
                axes.text(0.05, 0.92, text, transform=axes.transAxes, va="top", fontsize=8)
            if row == 0:
                axes.set_title(case)
            else:
                axes.set_xlabel("how many")
            axes.grid(color="0.93")
            _clean(axes)
        panels[row][0].set_ylabel(f"{kind} (ms)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    _title(figure, "How the cost grows", results)
    return figure


def memory(results: Results) -> "Figure | None":
    """Temporaries and time of the workloads, against plain autodiff."""
    cases = [g.case for g in results.find(work.SECTION, measure="temp memory")]
    cases = [c for c in cases if results.first(work.SECTION, c, "time")]
    if results.meta["platform"] == "cpu":
        cases = [c for c in cases if "Pallas" not in c]  # interpreted: it says nothing
    if not cases:
        return None
    figure = Figure(figsize=(12, 0.55 * len(cases) + 1.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    ways = (PLAIN, CHECKPOINT, HAND, OURS)
    for axes, measure in zip(panels, ("temp memory", "time"), strict=True):
        for row, case in enumerate(cases):
            group = results.first(work.SECTION, case, measure)
            base = group.values[PLAIN] or 1
            for i, way in enumerate(ways):
                y, value = row + (i - 1.5) * 0.2, group.values[way]
                axes.barh(y, value / base, 0.18, color=COLORS[way], label=way if not row else None)
                if way in (PLAIN, OURS):
                    text = " " + amount(value, group.unit)
                    axes.text(value / base, y, text, va="center", fontsize=6.5, color=COLORS[way])
        axes.axvline(1, color="0.3", lw=0.8)
        axes.set(title=f"{measure}, relative to plain autodiff", xlim=(0, 1.6))
        axes.grid(axis="x", color="0.9")
        axes.tick_params(axis="y", length=0)
        _clean(axes)
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    _title(figure, "What custom gradients save: value and gradient of each workload", results)
    return figure


def others(results: Results) -> "Figure | None":
    """The same rule in other frameworks."""
    groups = [g for g in results.find(frameworks.SECTION) if len(g.values) > 3]
    if not groups:
        return None
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, group in zip(figure.subplots(1, len(groups)), groups, strict=True):
        names = list(group.values)
        times = [1e3 * group.values[n] for n in names]
        colors = [
            COLORS[OURS] if "tfgrad" in n else COLORS[NNX] if n.startswith("tf.") else COLORS[HAND]
            for n in names
        ]
        axes.barh(range(len(names)), times, color=colors)
        for i, t in enumerate(times):
            axes.text(t, i, " " + amount(t / 1e3, "s"), va="center", fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set(title=group.case, xlabel="ms", xlim=(0, 1.25 * max(times)))
        axes.invert_yaxis()
        _clean(axes)
    _title(figure, "The same rule in other frameworks", results)
    return figure


FIGURES: dict[str, Callable[[Results], "Figure | None"]] = {
    "costs": costs,
    "growth": slopes,
    "memory": memory,
    "frameworks": others,
}
