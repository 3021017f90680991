"""Measure the cost of a custom gradient, and the memory it saves: `python -m benchmarks --help`.

`main` runs the chosen `parts` in order, saves after each of them, and prints the tables.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 4))  # devices, processes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="toy sizes: to see that it runs")
    parser.add_argument("--only", default="", help="parts named like overhead,growth/leaves,...")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument("--device", help="'cpu' or 'gpu' (default: what JAX finds first)")
    parser.add_argument("--out", type=Path, help="folder of the JSON (with --quick: none)")
    options = parser.parse_args(argv)
    import jax  # nothing that imports JAX is imported before its platform is chosen

    if options.device:
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

    from tqdm import tqdm

    from benchmarks import report
    from benchmarks.results import Results

    results, shown = Results.here(options.quick), Results.here(options.quick)
    out = options.out or (None if options.quick else report.RESULTS)
    path = out and out / f"{results.name}.json"
    if path and path.exists() and options.only:
        results = Results.load(path)  # its groups stay until they are measured again
        results.measured_again(options.only, shown)
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
            groups = chosen[name]()
        except Exception as error:  # the rest of a long run is worth having
            failed.append(f"{name} failed: {type(error).__name__}: {error}")
            continue
        results.add(groups)
        shown.add(groups)
        if path:
            results.save(path)
    print(*report.targets([shown], unmeasured=False), *report.tables(shown), sep="\n\n")
    if path:
        print("\nwrote", path, "; now `python -m benchmarks.report`")
    for text in failed:
        print(text, file=sys.stderr)
    return 1 if failed else 0


def parts(size: str) -> dict[str, Callable[[], list[Any]]]:
    """Return what can be measured, in order."""
    from benchmarks import child, frameworks, layers, networks, tiny, workload

    found = {
        f"{each.section}/{each.name}/{what}": partial(workload.measure, each, what, size)
        for each in (*tiny.OVERHEAD, *tiny.GROWTH, *layers.LAYERS, *networks.WORKLOADS)
        for what in each.measures_at(size)
    }
    found["workloads/largest batch"] = partial(networks.largest_batch, size)
    found["checks/RMSNorm"] = partial(child.checks, size)
    for devices, processes in MESHES if size != "toy" else MESHES[1:2]:
        name = f"distributed/{devices} devices, {processes} processes"
        found[name] = partial(child.distributed, devices, processes, size)
    found["frameworks/log1pexp"] = partial(frameworks.measure, size)
    return found


if __name__ == "__main__":
    sys.exit(main())
