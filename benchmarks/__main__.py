"""The command: `python -m benchmarks --help`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # nothing that imports JAX is imported before its platform is chosen
    from benchmarks.settings import Settings, Task

HERE = Path(__file__).parent


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, few rounds: to see that it runs"
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help="parts whose name contains this, such as 'overhead' or 'growth/leaves'; repeatable",
    )
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument("--device", help="'cpu' or 'gpu' (default: what JAX finds first)")
    parser.add_argument(
        "--out",
        type=Path,
        help="directory for the JSON and the figures (benchmarks/results; with --quick, none)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    import jax

    if options.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.device, options.device))
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX has no single way to say so
        print(f"no device {options.device!r} here: {error}".rstrip(": "), file=sys.stderr)
        return 2

    from benchmarks import machine, targets
    from benchmarks.results import Results, table
    from benchmarks.settings import Settings

    settings = Settings(options.quick)
    chosen = [
        task
        for task in all_tasks(settings)
        if not options.only or any(part in task.name for part in options.only)
    ]
    if options.list:
        print(*(task.name for task in chosen), sep="\n")
        return 0
    if not chosen:
        print(f"no part is named like {options.only}; see --list", file=sys.stderr)
        return 2
    if not options.only:
        chosen.append(machine.after(settings))

    results = Results.here(options.quick)
    out = options.out or (None if options.quick else HERE / "results")
    path = out and out / f"{results.name}.json"
    if path and path.exists() and options.only:
        results.keep(Results.load(path))
    measured = []
    for task in progress(chosen):
        measured += task.run()
        results.add(measured)
        if path:
            results.save(path)  # after every part: a long run that is stopped keeps what it has

    section = None
    for group in measured:
        if group.section != section:
            section = group.section
            print(f"\n== {section} ==")
        print(*table(group), sep="\n")
    known = [line for line in targets.lines(results) if line.measured is not None]
    if known:
        print(f"\n{'what':<48} {'against':<36} at most measured")
        print(*known, sep="\n")
    if path:
        from benchmarks.figures import draw

        print("\nwrote", path, *draw(results, path.with_suffix("")))
    return 0


def all_tasks(settings: "Settings") -> Iterator["Task"]:
    from benchmarks import frameworks, growth, machine, overhead, work

    for section in (machine, overhead, growth, work, frameworks):
        yield from section.tasks(settings)


def progress(tasks: Sequence["Task"]) -> Iterator["Task"]:
    """Go through the tasks, with a progress bar where there is one."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield from tasks
        return
    bar = tqdm(tasks, unit="part", dynamic_ncols=True)
    for task in bar:
        bar.set_postfix_str(task.name)
        yield task


if __name__ == "__main__":
    sys.exit(main())
