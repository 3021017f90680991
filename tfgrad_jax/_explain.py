"""Show what a custom gradient is at some arguments: what it keeps, for whom, and what it costs.

`_study.py` collects what `explain` reports, and `Explanation.__str__` makes the table.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ._study import Captured, Cost, Input, Residual, Study, type_name


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
        costs = [(c.of, _count(c.flops), *map(_size, c[2:])) for c in self.costs]
        for head, rows in (
            (("inputs",), self.inputs),
            (("closed over", "", "held by", "its gradient"), self.captured),
            (("kept by the rule",), kept),
            (("compiled", "flops", "bytes accessed", "temporary"), costs),
        ):
            if rows:
                table = [head + ("",) * (len(rows[0]) - len(head)), *rows]
                widths = [max(map(len, column)) for column in zip(*table, strict=True)]
                for i, row in enumerate(table):
                    cells = [c.ljust(w) for c, w in zip(row, widths, strict=True)]
                    lines.append(("    " if i else "  ") + "  ".join(cells).rstrip())
        lines.append(f"  forward mode: {forward}{self.obstacle}")
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])

    __repr__ = __str__


def explain(h: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Report what a custom gradient does: its inputs, what it closes over and keeps, and its cost.

    Every array among the arguments counts as traced, as under `jax.jit`, and so does every array
    that the function closes over. `h` is run, traced and compiled, and not executed unless it
    branches on values.

    Args:
        h: a function that `custom_gradient`, `grad_pass_through` or `recompute_grad` returned.
        *args: its arguments, or `jax.ShapeDtypeStruct` in the place of arrays.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`, which prints as a table, with the fields `inputs`, `captured` (and the
        gradient that each gets), `residuals`, `autodiff` (what JAX would keep for the undecorated
        function; by version), `forward_mode` and the `obstacle` to it, `costs` by the compiler, and
        `notes` on what is not known. `kept_bytes`, `new_bytes` and `autodiff_bytes` are the sums.

    Raises:
        TypeError: if `h` is not such a function, or needs values and got none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient, explain
        >>> @custom_gradient
        ... def tanh(x):
        ...     y = jnp.tanh(x)
        ...     return y, lambda dy: dy * (1 - y**2)
        >>> found = explain(tanh, jax.ShapeDtypeStruct((512, 512), jnp.float32))
        >>> [(r.name, r.bytes, r.origin) for r in found.residuals]
        [('y', 1048576, 'output')]
        >>> found.new_bytes
        0
    """
    study = Study(h, args, kwargs)
    study.run()
    return Explanation(
        study.name, study.inputs(), study.captured_values(), study.residuals, study.autodiff,
        study.forward_mode, study.obstacle, study.costs, tuple(study.notes),
    )  # fmt: skip


def _size(count: float | None) -> str:
    """Write a number of bytes."""
    if count is None or count < 1024:
        return "unknown" if count is None else f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 3)
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB"


def _count(count: float | None) -> str:
    return "unknown" if count is None else f"{count:.4g}"
