"""Check a gradient that you wrote: `check_gradient` reports, `assert_gradient` raises.

Both only choose the checks and show what they found. The checks themselves are in `_check.py`,
and the comparison of a gradient with the truth is in `_study.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._check import Check, Fact, Problem, Row


class GradientReport(NamedTuple):
    """What `check_gradient` found. Prints as a table; true if nothing failed."""

    title: str
    rows: tuple[Row, ...]
    facts: tuple[Fact, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(r.ok for r in self.rows) and all(f.ok is not False for f in self.facts)

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_failed(self) -> None:
        """Raise `AssertionError` with the table unless every check passed."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.title}: {'ok' if self.ok else 'WRONG'}"]
        if self.rows:
            table = [("order", "argument", "type", "differences", "autodiff", "precision", "")]
            table += [
                (str(r.order), r.argument, r.type, *(_error(e) for e in r[3:6]),
                 ("ok" if r.ok else "WRONG") + (f": {r.note}" if r.note else ""))
                for r in self.rows
            ]  # fmt: skip
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += [
                "  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
                for line in table
            ]
        width = max((len(f.name) for f in self.facts), default=0)
        for name, ok, text in self.facts:
            lines.append(f"  {name.ljust(width)}  {'WRONG: ' if ok is False else ''}{text}")
        return "\n".join(lines)

    __repr__ = __str__


def check_gradient(
    h: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    order: int = 1,
    expect: str = "exact",
    linear: bool = False,
    forward: bool | None = None,
    full: bool = False,
    directions: int = 3,
    transforms: Sequence[str] = ("jit", "vmap"),
    tolerance: float | None = None,
    seed: int = 0,
) -> GradientReport:
    """Compare the gradient that a function declares with its true derivative.

    For every array among the arguments: agreement with finite differences and with plain
    autodiff of the undecorated function, dtype and shape. For the rule: whether it is linear in
    its upstream, finite, and the same eagerly, under `jit` and under `vmap`. A mistake is named
    where it can be: a factor, a sign, a swapped pair, a conjugate, a missing sum.

    Args:
        h: a decorated function, or any function that calls some. What `h` closes over is not
            checked: write a function of it, `lambda params, x: layer(params)(x)`.
        *args: the point at which to check: pytrees, static leaves too.
        kwargs: arguments by name. Keyword-only arrays are checked if the rule takes `variables`.
        reference: the function for plain autodiff; by default the undecorated `h`, if known.
        order: the highest order of derivative to check.
        expect: "exact", or "surrogate" for a gradient that is not meant to be the derivative
            (straight-through, clipping): the difference is then measured and is no failure.
        linear: whether a rule that is not linear in its upstream fails; forward mode needs it.
        forward: whether to check forward mode too; by default, if `h` has `forward_mode=True`.
        full: compare the whole Jacobian, entry by entry, instead of random directions.
        directions: how many random upstreams and directions to combine.
        transforms: those of "jit" and "vmap" to compare with eager evaluation.
        tolerance: the relative error allowed; by default, by dtype as in `jax.test_util`.
        seed: of the random upstreams and directions.

    Returns:
        A report with `.ok`, `.rows` (one for each argument), `.facts` and `.raise_if_failed()`.

    Example:
        >>> import jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient
        >>> from tfgrad_jax.testing import check_gradient
        >>> @custom_gradient
        ... def square(x):
        ...     return x**2, lambda dy: dy * x  # forgets the factor 2
        >>> report = check_gradient(square, jnp.array([1.0, 2.0]))
        >>> report.ok
        False
        >>> report.rows[0].note
        'declared = 0.5 x expected'
    """
    if expect not in ("exact", "surrogate"):
        raise ValueError(f"check_gradient got expect={expect!r}; expected 'exact' or 'surrogate'.")
    with np.errstate(all="ignore"):  # what is not finite is looked at, not warned of
        problem = Problem(h, args, kwargs or {}, reference)
        check = Check(problem, expect == "exact", full, directions, tolerance, seed)
        if check.differentiate():
            check.agreement(order)
            check.linearity(linear)
            if getattr(h, "_forward_mode", False) if forward is None else forward:
                check.forward_mode()
            for transform in transforms:
                check.transformed(transform)
    name = getattr(h, "__qualname__", type(h).__qualname__).replace("<locals>.", "")
    return GradientReport(f"Gradient of `{name}`", tuple(check.rows), tuple(check.facts))


def _error(e: float | None) -> str:
    return "-" if e is None else f"{e:.1e}"


def assert_gradient(h: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """Raise `AssertionError` with the table of `check_gradient` unless the gradient is right.

    Args:
        h: as in `check_gradient`.
        *args: as in `check_gradient`.
        **options: as in `check_gradient`.

    Raises:
        AssertionError: if a check failed.

    Example:
        >>> import jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient
        >>> from tfgrad_jax.testing import assert_gradient
        >>> @custom_gradient
        ... def square(x):
        ...     return x**2, lambda dy: dy * 2 * x
        >>> assert_gradient(square, jnp.array([1.0, 2.0]), order=2)
    """
    check_gradient(h, *args, **options).raise_if_failed()
