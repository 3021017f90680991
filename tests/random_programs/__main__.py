"""Check many random programs."""

import argparse
import collections
import traceback

import jax
import tqdm

from . import DisagreementError, Program, check, program


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Check random programs against the oracle.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--without", action="append", default=[], help="a feature, or its kind")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    failed: list[tuple[Program, BaseException]] = []
    seen: collections.Counter[str] = collections.Counter()
    bad: collections.Counter[str] = collections.Counter()
    seeds = range(options.seed, options.seed + options.count)
    for seed in (bar := tqdm.tqdm(seeds, unit="program")):
        p = program(seed, options.without)
        if options.show:
            tqdm.tqdm.write(p.describe())
        seen.update(p.features)
        try:
            check(p)
        except Exception as error:
            failed.append((p, error))
            bad.update(p.features)
            tqdm.tqdm.write(f"seed {seed}: {type(error).__name__}: {first_line(error)}")
            if options.trace:
                tqdm.tqdm.write(traceback.format_exc())
            bar.set_postfix(failed=len(failed))
        if seed % 50 == 49:
            jax.clear_caches()
    wrong = [p for p, e in failed if isinstance(e, DisagreementError)]
    if failed:
        smallest, error = min(failed, key=lambda f: (len(f[0].source), f[0].seed))
        print(smallest.describe())
        print(f"{type(error).__name__}: {error}")
        print("features of those that failed:")
        for feature, count in sorted(bad.items(), key=lambda f: -f[1] / seen[f[0]])[:25]:
            print(f"  {count:4} of {seen[feature]:4}  {feature}")
    print(f"{options.count} programs: {len(wrong)} wrong, {len(failed) - len(wrong)} raised")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
