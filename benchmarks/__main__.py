"""Measure the cost of a custom gradient, and the memory it saves: `python -m benchmarks --help`.

`main` runs the chosen `parts` in order, saves after each of them, and prints the targets. A run of
all parts also writes the tables and the chart.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks import layers, report, rules, tiny, workload
from benchmarks.results import Group, Results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="toy sizes: to see that it runs")
    parser.add_argument("--only", default="", help="parts named like overhead,growth/leaves,...")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument("--device", help="'cpu' or 'gpu' (default: what JAX finds first)")
    parser.add_argument(
        "--out", type=Path, help="folder of the JSON; needed to keep a part of a run"
    )
    options = parser.parse_args(argv)
    if options.device:  # before anything runs
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.device, options.device))
    size = "gpu" if jax.default_backend() != "cpu" else "cpu"
    wanted = options.only.split(",")
    known = parts("toy" if options.quick else size)
    chosen = {name: run for name, run in known.items() if any(w in name for w in wanted)}
    if not chosen:
        parser.error(f"no part is named like {options.only!r}; see --list")
    if options.list:
        print(*chosen, sep="\n")
        return 0

    results = Results.here(options.quick)
    whole = not options.quick and len(chosen) == len(known)
    out = options.out or (report.RESULTS if whole else None)
    sys.setrecursionlimit(1 << 17)  # nested calls take several Python frames each
    failed = []
    # Some parts take a second and some take minutes: an estimate of the rest would mislead.
    bar = "{n_fmt}/{total_fmt} parts |{bar}| [{elapsed}]{postfix}"
    progress = tqdm(chosen, disable=None, dynamic_ncols=True, bar_format=bar)
    for i, name in enumerate(progress):
        progress.set_postfix_str(name)
        if progress.disable:  # no terminal, such as a log file
            print(f"{i}/{len(chosen)} parts, now {name}", file=sys.stderr, flush=True)
        try:
            results.groups += chosen[name]()
        except Exception as error:  # the rest of a long run is worth having
            failed.append(f"{name} failed: {type(error).__name__}: {error}")
            continue
        if out:
            results.save(out / f"{results.name}.json")
    print(report.targets([results], unmeasured=False), *report.tables(results), sep="\n\n")
    print(*failed, sep="\n", file=sys.stderr)
    if out == report.RESULTS and not failed:
        report.write()
    return 1 if failed else 0


def parts(size: str) -> dict[str, Callable[[], list[Group]]]:
    """Return what can be measured, in order."""
    return {
        f"{each.section}/{each.name}/{what}": partial(workload.measure, each, what, size)
        for each in (*tiny.OVERHEAD, *tiny.GROWTH, *layers.LAYERS, *rules.WORKLOADS)
        for what in each.measures
    }


if __name__ == "__main__":
    sys.exit(main())
