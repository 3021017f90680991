"""Say what moved between two results: `python -m benchmarks.compare OLD.json NEW.json`.

Of timed comparisons the ratios of ours to the others are compared, which a slower machine leaves
as they are. A ratio has moved if it moved by more than the two medians are uncertain (1.57 times
their interquartile range over the root of the number of samples, the notch of a box plot), than
the control rows of both runs are off, and than `LEAST`. Exact numbers have moved if they differ.
The exit status is 1 if anything is worse.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import OURS, Group, Results
from benchmarks.timing import CONTROL

LEAST = 0.03


class Move(NamedTuple):
    change: float  # of the logarithm
    noise: float
    what: str

    def __str__(self) -> str:
        change, noise = (100 * math.expm1(x) for x in (self.change, self.noise))
        return f"{change:+7.1f} %  (noise {noise:.1f} %)  {self.what}"

    @classmethod
    def between(cls, old: float, new: float, noise: float, what: str) -> "Move":
        change = math.log(max(new, 1e-12) / max(old, 1e-12))  # 0 bytes is a number too
        return cls(change, noise, f"{old:.3g} -> {new:.3g}  {what}")


def moves(old: Results, new: Results) -> list[Move]:
    """Return what moved, the worst first; where ours is not compared, there is nothing to move."""
    before = {g.key: g for g in old.groups}
    found = []
    for now in new.groups:
        then, what = before.get(now.key), " | ".join(now.key)
        if then is None or now.section in ("machine", "frameworks"):
            continue
        if now.samples and then.samples:
            for peer in (now.ratios.keys() & then.ratios.keys()) - {CONTROL}:
                noise = max(LEAST, _noise(then, peer) + _noise(now, peer))
                ratios = then.ratios[peer], now.ratios[peer]
                found.append(Move.between(*ratios, noise, f"{what} / {peer}"))
        elif OURS in now.values and OURS in then.values and "slope" not in now.measure:
            found.append(Move.between(then.values[OURS], now.values[OURS], 1e-3, what))
    return sorted((m for m in found if abs(m.change) > m.noise), reverse=True)


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
    found = moves(old, new)
    worse = [move for move in found if move.change > 0]
    for title, part in (("worse", worse), ("better", found[len(worse) :])):
        print(f"{title}: {len(part)}", *part, sep="\n  ")
    missing = {g.key for g in old.groups} - {g.key for g in new.groups}
    if missing:
        print("only in the old file:", *sorted(" | ".join(key) for key in missing), sep="\n  ")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
