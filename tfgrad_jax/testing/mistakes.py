"""Name the mistake that explains a wrong gradient: `mistake` runs when a row has failed.

It names the first guess that explains what was declared at all points where that is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .study import Study
from .vectors import Matrix, Space, ratio

_ENTRIES = 100  # of an argument, to be looked at one by one


def mistake(i: int, names: Sequence[str], points: Sequence[Sequence[Study]]) -> str:
    studies, first = [p[i] for p in points], points[0][i]
    shapes = list(map(np.shape, first.f.space.arrays))

    def agree(difference: Callable[[Study, Any], Matrix], others: Sequence[Any] = studies) -> bool:
        pairs = zip(studies, others, strict=True)
        return all(ratio(difference(s, other), s.scale) < 1e-3 for s, other in pairs)

    d = np.concatenate([s.declared.ravel() for s in studies])
    e = np.concatenate([s.expected.ravel() for s in studies])
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
        return f"{sign}declared = {factor:.4g} x expected"
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
    if np.iscomplexobj(space.arrays[i]):
        to = Space(s.f.of_arrays(*space.fill(s.x)))
        for us in (s.us * to.signs, s.us):
            yield "declared = conjugate of expected", s.x, us, s.rows * space.signs
    for j, (a, part) in enumerate(zip(space.arrays, space.parts, strict=True)):
        if np.ndim(a) == 2 and a.shape == a.shape[::-1]:
            order = np.arange(len(s.x))
            order[part] = np.swapaxes(order[part].reshape(*a.shape, -1), 0, 1).ravel()
            if j == i:
                yield "declared = transpose of expected", s.x, s.us, s.rows[:, order]
            yield f"missing transpose of `{names[j]}`?", s.x[order], s.us, s.rows


def _varying_factor(i: int, name: str, studies: Sequence[Study]) -> str:
    """Say by which factor each entry differs, if it is the same for every upstream."""
    factors: Any = []
    part = studies[0].part
    for s in studies:
        d = s.rows[:, part]
        if d.shape[1] > _ENTRIES or np.iscomplexobj(s.f.space.arrays[i]):
            return ""
        e = s.true(s.x, s.us, np.eye(len(s.x))[:, part])[0]
        factors.append(np.sum(d * e, 0) / np.sum(e * e, 0))
        if not ratio(d - factors[-1] * e, d) < 1e-3:
            return ""
    x: Any = abs(np.concatenate([s.x[part] for s in studies]))
    factor: Any = np.concatenate(factors)
    for power in (-3, -2, -1, -0.5, 0.5, 1, 2, 3):
        c = abs(factor * x**-power)
        if np.ptp(x) > 1e-3 * np.max(x) and ratio(c - c[0], c[0]) < 1e-3:
            return f"wrong power: declared = {c[0]:.4g} x expected x `{name}`**{power}"
    between = f"{factor.min():.3g} to {factor.max():.3g}"
    return f"declared = expected x a factor that depends on the input, {between}"
