"""What `explain` returns: rows of each kind, and the table that `Explanation.__str__` makes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Input(NamedTuple):
    """A leaf of the arguments."""

    name: str
    type: str
    role: str  # "differentiable", "no derivative" or "setting"


class Captured(NamedTuple):
    """An array that the function closes over, and its gradient if JAX differentiates it."""

    name: str
    type: str
    place: str  # "closure", "default", "self", "keyword", "argument", "variables" or "unknown"
    gradient: str


class Residual(NamedTuple):
    """An array that is kept for the backward pass."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    # "input", "captured" or "output" (the same array, unless the forward pass is compiled alone and
    # returns both), or "new"
    origin: str


class Cost(NamedTuple):
    """What the compiler says of a program, loops counted once; None where it does not."""

    of: str  # "value", "gradient" (with the value) or "gradient by autodiff"
    flops: float | None  # without transcendental functions
    bytes_accessed: float | None
    temp_bytes: int | None


class Explanation(NamedTuple):
    """What a custom gradient is. Prints as a table."""

    name: str
    inputs: tuple[Input, ...]
    captured: tuple[Captured, ...]
    residuals: tuple[Residual, ...]
    autodiff: tuple[Residual, ...] | None  # what plain autodiff keeps; None if it does not work
    forward_mode: bool | None  # None: unknown
    obstacle: str  # why forward mode does not work, or why that is unknown
    costs: tuple[Cost, ...]
    notes: tuple[str, ...]  # what is not known, and why

    @property
    def kept_bytes(self) -> int:
        """The bytes of all residuals."""
        return sum(r.bytes for r in self.residuals)

    @property
    def new_bytes(self) -> int:
        """The bytes of those that are no input, output or captured value."""
        return sum(r.bytes for r in self.residuals if r.origin == "new")

    @property
    def autodiff_bytes(self) -> int | None:
        """The bytes of what plain autodiff keeps."""
        return None if self.autodiff is None else sum(r.bytes for r in self.autodiff)

    def __str__(self) -> str:
        lines = [f"Custom gradient of `{self.name}`"]
        forward = {True: "works", False: "no: ", None: "unknown: "}[self.forward_mode]
        kept = [(r.name, type_name(r), _size(r.bytes), r.origin) for r in self.residuals]
        new, by_autodiff = f"of it {_size(self.new_bytes)} new", _size(self.autodiff_bytes)
        kept += [("in all", "", _size(self.kept_bytes), new), ("by autodiff", "", by_autodiff, "")]
        flops = ["unknown" if c.flops is None else f"{c.flops:.4g}" for c in self.costs]
        costs = [(c.of, n, *map(_size, c[2:])) for c, n in zip(self.costs, flops, strict=True)]
        for head, rows in (
            (("inputs", "", ""), self.inputs),
            (("closed over", "", "held by", "its gradient"), self.captured),
            (("kept by the rule", "", "", ""), kept),
            (("compiled", "flops", "bytes accessed", "temporary"), costs),
        ):
            if rows:
                first, *others = aligned([head, *rows])
                lines += [f"  {first}", *(f"    {line}" for line in others)]
        lines.append(f"  forward mode: {forward}{self.obstacle}")
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])

    __repr__ = __str__


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def type_name(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _size(count: float | None) -> str:
    if count is None:
        return "unknown"
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 3)
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB"
