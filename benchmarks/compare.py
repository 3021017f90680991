"""Say what moved between two results: `python -m benchmarks.compare OLD.json NEW.json`.

Timed comparisons are compared by their ratios to the baselines, which a slower machine leaves
as they are. A ratio has moved if it moved by more than the two medians are uncertain (1.57 times
their interquartile range over the root of the number of samples, the notch of a box plot), than
the control rows of both runs are off, and than `LEAST`. Exact numbers have moved if they differ.
The exit status is 1 if anything is worse.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import OURS, Group, Results
from benchmarks.timing import CONTROL

LEAST = 0.03

Move = tuple[float, str]  # by how much, as a logarithm, and what is said about it


def moves(old: Results, new: Results) -> Iterator[Move]:
    """Yield what moved; where ours is not compared, there is nothing to move."""
    before = {g.key: g for g in old.groups}
    for now in new.groups:
        then, what = before.get(now.key), " | ".join(now.key)
        if then is None:
            continue
        if now.samples and then.samples:
            for peer in (now.ratios.keys() & then.ratios.keys()) - {CONTROL}:
                noise = max(LEAST, _noise(then, peer) + _noise(now, peer))
                yield from _move(then.ratios[peer], now.ratios[peer], noise, f"{what} / {peer}")
        elif OURS in now.values and OURS in then.values and "slope" not in now.measure:
            yield from _move(then.values[OURS], now.values[OURS], 1e-3, what)


def _move(old: float, new: float, noise: float, what: str) -> Iterator[Move]:
    change = math.log(max(new, 1e-12) / max(old, 1e-12))  # 0 bytes is a number too
    if abs(change) > noise:
        percent, off = 100 * math.expm1(change), 100 * math.expm1(noise)
        yield change, f"{percent:+7.1f} %  (noise {off:.1f} %)  {old:.3g} -> {new:.3g}  {what}"


def _noise(group: Group, peer: str) -> float:
    low, high = group.ratio_quartiles[peer]
    notch = 1.57 * math.log(high / low) / math.sqrt(group.samples)
    return notch + abs(math.log(group.ratios.get(CONTROL, 1.0)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args(argv)
    old, new = Results.load(options.old), Results.load(options.new)
    found = sorted(moves(old, new), reverse=True)
    worse = [text for change, text in found if change > 0]
    better = [text for change, text in found if change < 0]
    missing = {" | ".join(g.key) for g in old.groups} - {" | ".join(g.key) for g in new.groups}
    for title, texts in (("worse", worse), ("better", better), ("only in OLD", sorted(missing))):
        print(f"{title}: {len(texts)}", *texts, sep="\n  ")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
