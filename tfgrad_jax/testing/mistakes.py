"""Name the mistake that explains a wrong gradient, or one that is not finite.

`mistake` runs when a row has failed. It names the first guess of what was declared that is true at
all points where the gradient is wrong; `_guesses` are those that differences can tell.
`first_place` runs when a number is not finite: it runs the function again, where JAX raises at the
first such number.
"""

import contextlib
import io
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .arrays import basis, numbers, pull_back, ratio
from .truth import Study, differences

_ENTRIES = 100  # of an argument, to be looked at one by one
_OWN = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))


def mistake(i: int, paths: Sequence[str], points: Sequence[Sequence[Study]]) -> str:
    """Name the likely mistake in the i-th argument, from the studies at each point."""
    studies, first = [p[i] for p in points], points[0][i]

    def are_declared(guesses: Any) -> bool:
        return all(
            np.shape(g) == s.declared.shape and ratio(g - s.declared, s.scale) < 1e-3
            for s, g in zip(studies, guesses, strict=True)
        )

    d = np.concatenate([s.declared.ravel() for s in studies])
    e = np.concatenate([s.expected.ravel() for s in studies])
    if not (np.isfinite(d).all() and np.isfinite(e).all()):
        return "not finite"
    if not e.any():
        return "expected no gradient"
    if not d.any():
        forgotten = ": forgotten among those of `variables`?"
        is_variable = paths[i].startswith("variables")
        return "declared no gradient, expected one" + forgotten * is_variable
    for j, path in enumerate(paths):
        theirs = [p[j] for p in points]
        same = j != i and first.vs[0].shape == theirs[0].vs[0].shape
        if same and are_declared([s.expected for s in theirs]):
            back = [s.expected - t.declared for s, t in zip(studies, theirs, strict=True)]
            swapped = ratio(back, first.scale) < 1e-3
            return f"swapped with `{path}`?" if swapped else f"declared that of `{path}`"
    for guesses in zip(*(_guesses(s, paths) for s in studies), strict=True):
        if are_declared([differences(*guess)[0] for _, guess in guesses]):
            return guesses[0][0]
    factor = np.sum(d * e) / np.sum(e * e)
    if are_declared([factor * s.expected for s in studies]):
        sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
        axes = set(first.vs[0].shape) ^ {n for u in first.us[0] for n in u.shape}
        n = next((n for n in axes - {1} if min(abs(factor / n - 1), abs(factor * n - 1)) < 1e-3), 0)
        wrong = ("sum", "mean") if factor > 1 else ("mean", "sum")
        summed = f": a {wrong[0]} in place of a {wrong[1]} over an axis of {n}?" if n else ""
        return f"{sign}declared = {factor:.4g} x expected{summed}"
    worst = np.unravel_index(np.argmax(abs(first.declared - first.expected)), first.declared.shape)
    found = f"declared {first.declared[worst]:.4g}, expected {first.expected[worst]:.4g}"
    direction = np.argwhere(first.vs[worst[1]])
    if len(direction) == 1 and direction.size:
        return f"{found} at {direction[0].tolist()}"
    return _varying_factor(paths[i], studies) or found


def _guesses(s: Study, paths: Sequence[str]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return notes, and what was differentiated by mistake."""
    f, xs, i, us, vs = s.at
    found: list[Any] = []
    if np.iscomplexobj(vs[0]):
        bars = [np.conj(v) for v in vs]
        for rows in ([[np.conj(u) for u in row] for row in us], us):
            found.append(("declared = conjugate of expected", (f, xs, i, rows, bars)))
    if vs[0].ndim == 2 and vs[0].shape == vs[0].T.shape:
        found.append(("declared = transpose of expected", (f, xs, i, us, [v.T for v in vs])))
    for j, x in enumerate(xs):
        if np.ndim(x) == 2 and x.shape == x.T.shape:
            at = [*xs[:j], x.T, *xs[j + 1 :]]
            found.append((f"missing transpose of `{paths[j]}`?", (f, at, i, us, vs)))
    for k, u in enumerate(us[0]):
        for axis in range(u.ndim):
            one = np.indices(u.shape)[axis] == 0
            rows = [[*row[:k], row[k] * one, *row[k + 1 :]] for row in us]
            note = f"missing sum over axis {axis} of the upstream?"
            found.append((note, (f, xs, i, rows, vs)))
    return found


def _varying_factor(path: str, studies: Sequence[Study]) -> str:
    """Say by which factor each entry differs, if it is the same for every upstream."""
    factors, entries = [], []
    for s in studies:
        f, xs, i, us, vs = s.at
        if vs[0].size > _ENTRIES or np.iscomplexobj(vs[0]):
            return ""
        d = np.array([g.ravel() for g in s.gradients])
        e = differences(f, xs, i, us, [v for (v,) in basis([xs[i]])])[0]
        factors.append(np.sum(d * e, 0) / np.sum(e * e, 0))
        entries.append(np.ravel(np.asarray(xs[i], float)))
        if not ratio(d - factors[-1] * e, d) < 1e-3:
            return ""
    factor, x = np.concatenate(factors), np.concatenate(entries)
    for power in (-3, -2, -1, -0.5, 0.5, 1, 2, 3):
        c = factor * abs(x) ** -power
        if np.ptp(abs(x)) > 1e-3 * np.max(abs(x)) and ratio(abs(c) - abs(c[0]), c[0]) < 1e-3:
            return f"wrong power: declared = {abs(c[0]):.4g} x expected x `{path}`**{power}"
    between = f"{factor.min():.3g} to {factor.max():.3g}"
    return f"declared = expected x a factor that depends on the input, {between}"


def first_place(f: Any, xs: Sequence[Any], us: Sequence[Any] = ()) -> str:
    """Name the operation, and its line, in the value or in the gradient for some upstreams."""
    if not all(np.isfinite(numbers(x)).all() for x in xs):
        return ": neither is the argument"
    results = jax.tree.leaves([f(*xs), pull_back(f, xs, us)])
    nan = any(np.isnan(numbers(y)).any() for y in results)
    raises = jax.debug_nans if nan else jax.debug_infs  # -inf may be a mask
    try:
        with raises(True), contextlib.redirect_stdout(io.StringIO()):
            jax.block_until_ready(pull_back(f, xs, us) if us else f(*xs))
    except FloatingPointError as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if not f.filename.startswith((*_OWN, "<"))]
        place = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
        name = str(error).split()[5]  # invalid value (nan) encountered in log
        return f", first in `{name}`{place}"
    return ""
