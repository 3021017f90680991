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
    what: str
    old: float
    new: float
    noise: float  # of the logarithm of new / old

    @property
    def change(self) -> float:
        return math.log(max(self.new, 1e-12) / max(self.old, 1e-12))  # 0 bytes is a number too

    def __str__(self) -> str:
        change, noise = (100 * math.expm1(x) for x in (self.change, self.noise))
        values = f"{self.old:.3g} -> {self.new:.3g}"
        return f"{change:+7.1f} %  (noise {noise:.1f} %)  {values}  {self.what}"


def moves(old: Results, new: Results) -> list[Move]:
    """Return what moved, the worst first; where ours is not compared, there is nothing to move."""
    before = {g.key: g for g in old.groups}
    found = []
    for after in new.groups:
        group = before.get(after.key)
        if group is None or after.section in ("machine", "frameworks"):
            continue
        what = " | ".join(after.key)
        if after.samples and group.samples:
            for peer, ratio in after.ratios.items():
                if peer in group.ratios and peer != CONTROL:
                    noise = max(LEAST, _noise(group, peer) + _noise(after, peer))
                    found.append(Move(f"{what} / {peer}", group.ratios[peer], ratio, noise))
        elif OURS in after.values and OURS in group.values and "slope" not in after.measure:
            found.append(Move(what, group.values[OURS], after.values[OURS], 1e-3))
    return sorted((m for m in found if abs(m.change) > m.noise), key=lambda m: -m.change)


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
