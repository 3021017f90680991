"""Measure the cost of a custom gradient, and the memory it saves: `python -m benchmarks --help`.

`main` runs the chosen `parts` in order, saves after each of them, and prints the targets. A run of
all parts also writes the tables.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax

from benchmarks import layers, report, rules, tiny, workload
from benchmarks.results import Group, Results

# On an accelerator: what runs there, and not what Python does; after so long no part is begun.
ON_GPU, MINUTES = ("overhead", "workloads"), 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="toy sizes: to see that it runs")
    parser.add_argument("--only", default="", help="parts named like overhead,growth/leaves,...")
    parser.add_argument("--gpu", action="store_true", help="the parts and sizes of a GPU")
    parser.add_argument("--out", type=Path, help="folder of the JSON; needed to keep a part")
    options = parser.parse_args(argv)
    wanted = options.only.split(",")
    known = parts("toy" if options.quick else "gpu" if options.gpu else "cpu", options.gpu)
    chosen = {name: run for name, run in known.items() if any(w in name for w in wanted)}
    if not chosen:
        parser.error("no part is named so; there are\n" + "\n".join(known))
    if options.gpu and jax.default_backend() == "cpu":
        parser.error("JAX finds no GPU here; on one, this is measured\n" + "\n".join(chosen))

    results = Results.here(options.quick)
    whole = not (options.quick or options.gpu) and len(chosen) == len(known)
    out = options.out or (report.RESULTS if whole or options.gpu else None)
    sys.setrecursionlimit(1 << 17)  # nested calls take several Python frames each
    failed, start = [], time.monotonic()
    for i, name in enumerate(chosen):
        if options.gpu and time.monotonic() - start > 60 * MINUTES:
            failed.append(f"{name} was not begun: {MINUTES} minutes are over")
            continue
        # Some parts take a second and some take minutes: an estimate of the rest would mislead.
        print(f"{i}/{len(chosen)} parts, now {name}", file=sys.stderr, flush=True)
        try:
            results.groups += chosen[name]()
        except Exception as error:  # the rest of a long run is worth having
            failed.append(f"{name} failed: {type(error).__name__}: {error}")
            continue
        if out:
            results.save(out / f"{results.name}.json")
    print(report.shown(results))
    print(*failed, sep="\n", file=sys.stderr)
    if whole and out == report.RESULTS and not failed:
        report.write()
    return 1 if failed else 0


def parts(size: str, on_gpu: bool = False) -> dict[str, Callable[[], list[Group]]]:
    """Return what can be measured, in order."""
    found = {
        f"{each.section}/{each.name}/{what}": partial(workload.measure, each, what, size)
        for each in (*tiny.OVERHEAD, *tiny.GROWTH, *tiny.NESTS, *layers.LAYERS, *rules.WORKLOADS)
        for what in each.measures
    }
    return {n: f for n, f in found.items() if not on_gpu or n.partition("/")[0] in ON_GPU}


if __name__ == "__main__":
    sys.exit(main())
