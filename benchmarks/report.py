"""Write the tables of benchmarks/README.md from the results: `python -m benchmarks.report`."""

from pathlib import Path

from benchmarks import frameworks, machine, overhead, targets, work
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

HERE = Path(__file__).parent
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
PEERS = (UNDECORATED, HAND, HAND_EVERY_ORDER, HAND_JVP, JAX_CUSTOM_GRADIENT, EQUINOX, NNX)


def main() -> None:
    found = [Results.load(path) for path in sorted((HERE / "results").glob("*.json"))]
    found.sort(key=lambda r: [int(n) for n in r.meta["versions"]["jax"].split(".")[:3]])
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    middle = "\n\n".join([_machines(found), _targets(found), *map(_one, found)])
    readme.write_text(f"{before}{BEGIN}\n\n{middle}\n\n{END}{after}")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _label(results: Results) -> str:
    return f"{results.meta['platform'].upper()}, JAX {results.meta['versions']['jax']}"


def _machines(found: list[Results]) -> str:
    """The control rows, before and after each run."""
    rows = []
    for measure in ("bandwidth", "matrix product", "call"):
        row = [{"call": "empty jitted call"}.get(measure, measure)]
        for results in found:
            groups = results.find(machine.SECTION, measure=measure)
            row.append(
                " / ".join(amount(next(iter(g.values.values())), g.unit) for g in groups) or "-"
            )
        rows.append([*row, "not measured"])
    title = "### The machine, before / after each run\n\n"
    processors = ", ".join(sorted({r.meta["processor"] for r in found}))
    heads = ["", *map(_label, found), "GPU"]
    return f"{title}{_table(heads, rows)}\n\nProcessor: {processors}."


def _targets(found: list[Results]) -> str:
    rows = []
    for lines in zip(*(targets.lines(r) for r in found), strict=True):
        first = lines[0]
        row = [first.what, first.against, f"{first.at_most:.2f}x"]
        for line in lines:
            if line.measured is None:
                row.append("not measured")
            else:
                row.append(f"{line.measured:.2f}x" if line.met else f"**{line.measured:.2f}x**")
        rows.append([*row, "not measured"])
    head = ["what", "against", "at most", *map(_label, found), "GPU"]
    return f"### The promises (bold: missed)\n\n{_table(head, rows)}"


def _one(results: Results) -> str:
    parts = [f"### {_label(results)}"]
    rows = []
    for case in overhead.CASES:
        for group in results.find(overhead.SECTION, case):
            ours = group.values.get(OURS)
            row = [case, group.measure, amount(ours, "s") if ours else "-"]
            for peer in PEERS:
                ratio = group.ratios.get(peer)
                row.append("cannot" if peer in group.failures else f"{ratio:.2f}x" if ratio else "")
            rows.append(row)
    if rows:
        head = ["case", "measure", "ours", *(f"ours / {p}" for p in PEERS)]
        parts.append(f"Overhead, on functions that do almost nothing:\n\n{_table(head, rows)}")
    rows = []
    ways = (PLAIN, CHECKPOINT, HAND, OURS)
    for group in results.find(work.SECTION, measure="time"):
        temp = results.first(work.SECTION, group.case, "temp memory")
        row = [group.case]
        row += [amount(group.values[w], "s") for w in ways]
        row += [amount(temp.values[w], "bytes") for w in ways] if temp else []
        for measure in ("share of copy bandwidth", "share of matmul rate"):
            share = results.first(work.SECTION, group.case, measure)
            row.append(f"{share.values[OURS]:.0f} %" if share else "")
        rows.append(row)
    if rows:
        head = ["workload", *(f"time: {w}" for w in ways), *(f"temp: {w}" for w in ways)]
        head += ["ours, of copy bandwidth", "ours, of matmul rate"]
        parts.append(f"Workloads:\n\n{_table(head, rows)}")
    rows = [
        [group.case, name, amount(value, "s")]
        for group in results.find(frameworks.SECTION)
        if len(group.values) > 3
        for name, value in group.values.items()
    ]
    if rows:
        parts.append(f"Other frameworks:\n\n{_table(['workload', 'program', 'time'], rows)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
