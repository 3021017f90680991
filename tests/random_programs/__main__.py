"""Check many random programs."""

import argparse

import jax
import tqdm

from . import DisagreementError, check, program


def main():
    parser = argparse.ArgumentParser(description="Check random programs against the oracle.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    options = parser.parse_args()
    failed = []
    for seed in tqdm.tqdm(range(options.seed, options.seed + options.count), unit="program"):
        p = program(seed)
        try:
            check(p)
        except Exception as error:
            failed.append((p, error))
            line, _, _ = str(error).partition("\n")
            tqdm.tqdm.write(f"seed {seed}: {type(error).__name__}: {line}")
        if seed % 50 == 49:
            jax.clear_caches()
    if failed:
        smallest, error = min(failed, key=lambda f: (len(f[0].source), f[0].seed))
        print(smallest.describe(), f"{type(error).__name__}: {error}", sep="\n")
    wrong = sum(isinstance(error, DisagreementError) for _, error in failed)
    print(f"{options.count} programs: {wrong} wrong, {len(failed) - wrong} raised")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
