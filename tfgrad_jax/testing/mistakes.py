"""Name the mistake that explains a wrong gradient: `mistake` runs when a row has failed.

It names the first guess of what was declared that is true at all points where the gradient is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .study import Study
from .vectors import Matrix, Space, ratio

_ENTRIES = 100  # of an argument, to be looked at one by one


def mistake(i: int, names: Sequence[str], points: Sequence[Sequence[Study]]) -> str:
    """Name the likely mistake in the i-th argument, from the studies at each point."""
    studies, first = [p[i] for p in points], points[0][i]
    space = first.f.space
    shapes = list(map(np.shape, space.arrays))

    def agree(difference: Callable[[Study, Any], Matrix], others: Sequence[Any] = studies) -> bool:
        pairs = zip(studies, others, strict=True)
        return all(ratio(difference(s, other), s.scale) < 1e-3 for s, other in pairs)

    d = np.concatenate([s.declared.ravel() for s in studies])
    e = np.concatenate([s.expected.ravel() for s in studies])
    if not (np.isfinite(d).all() and np.isfinite(e).all()):
        return "not finite"
    if not e.any():
        return "expected no gradient"
    if not d.any():
        forgotten = ": forgotten among those of `variables`?"
        return f"declared no gradient, expected one{forgotten * names[i].startswith('variables')}"
    for j, name in enumerate(names):
        theirs = [p[j] for p in points]
        same = j != i and shapes[i] == shapes[j] and first.vs.shape == theirs[0].vs.shape
        if same and agree(lambda s, t: s.declared - t.expected, theirs):
            swapped = agree(lambda s, t: s.expected - t.declared, theirs)
            return f"swapped with `{name}`?" if swapped else f"declared that of `{name}`"
    for guesses in zip(*(_guesses(s, i, names) for s in studies), strict=True):
        if agree(lambda s, g: s.true(g[1], g[2], s.vs)[0] - g[3] @ s.vs, guesses):
            return guesses[0][0]
    factor = np.sum(d * e) / np.sum(e * e)
    if agree(lambda s, _: s.declared - factor * s.expected):
        sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
        axes = {*shapes[i]} ^ {n for y in first.f.of_arrays(*space.fill(first.x)) for n in y.shape}
        n = next((n for n in axes - {1} if min(abs(factor / n - 1), abs(factor * n - 1)) < 1e-3), 0)
        wrong = ("sum", "mean") if factor > 1 else ("mean", "sum")
        summed = f": a {wrong[0]} in place of a {wrong[1]} over an axis of {n}?" if n else ""
        return f"{sign}declared = {factor:.4g} x expected{summed}"
    u, v = np.unravel_index(np.argmax(abs(first.declared - first.expected)), first.declared.shape)
    found = f"declared {first.declared[u, v]:.4g}, expected {first.expected[u, v]:.4g}"
    along = first.vs[first.part, v]
    if shapes[i] and np.count_nonzero(along) == 1:
        entry = int(np.argmax(along)) * int(np.prod(shapes[i])) // len(along)
        return f"{found} at {[int(n) for n in np.unravel_index(entry, shapes[i])]}"
    return _varying_factor(i, names[i], studies) or found


def _guesses(s: Study, i: int, names: Sequence[str]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield notes, with the point, upstreams and rows of gradients that would then agree."""
    space = s.f.space
    ys = s.f.of_arrays(*space.fill(s.x))
    to = Space(ys)
    if np.iscomplexobj(space.arrays[i]):
        for us in (s.us * to.signs, s.us):
            yield "declared = conjugate of expected", s.x, us, s.rows * space.signs
    for j, (a, part) in enumerate(zip(space.arrays, space.parts, strict=True)):
        if np.ndim(a) == 2 and len(a) == a.size // len(a):
            order = np.arange(len(s.x))
            order[part] = np.swapaxes(order[part].reshape(*a.shape, -1), 0, 1).ravel()
            if j == i:
                yield "declared = transpose of expected", s.x, s.us, s.rows[:, order]
            yield f"missing transpose of `{names[j]}`?", s.x[order], s.us, s.rows
    for y, part in zip(ys, to.parts, strict=True):
        for axis in range(y.ndim):
            first, us = np.indices(y.shape)[axis].ravel() == 0, s.us.copy()
            us[:, part] *= np.repeat(first, 1 + np.iscomplexobj(y))
            yield f"missing sum over axis {axis} of the upstream?", s.x, us, s.rows


def _varying_factor(i: int, name: str, studies: Sequence[Study]) -> str:
    """Say by which factor each entry differs, if it is the same for every upstream."""
    factors, part = [], studies[0].part
    for s in studies:
        d = s.rows[:, part]
        if d.shape[1] > _ENTRIES or np.iscomplexobj(s.f.space.arrays[i]):
            return ""
        e = s.true(s.x, s.us, np.eye(len(s.x))[:, part])[0]
        factors.append(np.sum(d * e, 0) / np.sum(e * e, 0))
        if not ratio(d - factors[-1] * e, d) < 1e-3:
            return ""
    factor, x = np.concatenate(factors), abs(np.concatenate([s.x[part] for s in studies]))
    for power in (-3, -2, -1, -0.5, 0.5, 1, 2, 3):
        c = abs(factor * x**-power)
        if np.ptp(x) > 1e-3 * np.max(x) and ratio(c - c[0], c[0]) < 1e-3:
            return f"wrong power: declared = {c[0]:.4g} x expected x `{name}`**{power}"
    between = f"{factor.min():.3g} to {factor.max():.3g}"
    return f"declared = expected x a factor that depends on the input, {between}"
