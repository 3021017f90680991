"""Name the mistake that explains a wrong gradient.

`mistake` runs when a row has failed. It makes one guess after the other of what was declared, and
names the first that is true at all points where the gradient is wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import basis, ratio
from .truth import Study, differences

_ENTRIES = 100  # of an argument, to be looked at one by one


def mistake(path: str, studies: Sequence[Study], others: Mapping[str, Sequence[Study]]) -> str:
    """Name the likely mistake in an argument; `others` are the studies of the other ones."""
    first = studies[0]
    d, e = (
        np.concatenate([np.ravel(v) for v in values])
        for values in ([s.declared for s in studies], [s.expected for s in studies])
    )
    shape, outputs = first.vs[0].shape, [u.shape for u in first.us[0]]
    if not (np.isfinite(d).all() and np.isfinite(e).all()):
        return "not finite"
    if not e.any():
        return "expected no gradient"
    if not d.any():
        forgotten = (
            ": forgotten among those of `variables`?" if path.startswith("variables") else ""
        )
        return f"declared no gradient, expected one{forgotten}"
    for other, theirs in others.items():
        if theirs[0].vs[0].shape == shape and _is(studies, [s.expected for s in theirs]):
            back = [ratio(t.declared - s.expected, s.scale) for s, t in zip(studies, theirs)]
            return f"swapped with `{other}`?" if max(back) < 1e-3 else f"declared that of `{other}`"
    for note, changed in _guesses(path, first, others):
        if _is(studies, [differences(*changed(s))[0] for s in studies]):
            return note
    factor = np.sum(d * e) / np.sum(e * e)
    if _is(studies, [factor * s.expected for s in studies]):
        sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
        summed = set(shape) ^ {n for y in outputs for n in y}
        n = next((n for n in summed if abs(max(factor, 1 / factor) / n - 1) < 1e-3), 0)
        wrong = "a mean in place of a sum" if factor < 1 else "a sum in place of a mean"
        mean = f": {wrong} over an axis of {n}?" if n > 1 else ""
        return f"{sign}declared = {factor:.4g} x expected{mean}"
    worst = np.unravel_index(np.argmax(abs(first.declared - first.expected)), first.declared.shape)
    direction = np.argwhere(first.vs[worst[1]])
    at = f" at {direction[0].tolist()}" if len(direction) == 1 and direction.size else ""
    found = f"declared {first.declared[worst]:.4g}, expected {first.expected[worst]:.4g}{at}"
    return found if at else _varying_factor(path, studies) or found


def _is(studies: Sequence[Study], guesses: Sequence[Any]) -> bool:
    return all(
        g.shape == s.declared.shape and ratio(g - s.declared, s.scale) < 1e-3
        for s, g in zip(studies, guesses, strict=True)
    )


def _guesses(path: str, first: Study, others: Mapping[str, Sequence[Study]]) -> Any:
    """Yield notes, and what a study would have to be about for its differences to be declared."""
    if np.iscomplexobj(first.vs[0]):
        note = "declared = conjugate of expected"
        bar = np.conj
        yield note, lambda s: (s.f, s.xs, s.i, [list(map(bar, u)) for u in s.us], map(bar, s.vs))
        yield note, lambda s: (s.f, s.xs, s.i, s.us, map(bar, s.vs))
    if first.vs[0].ndim == 2 and first.vs[0].shape == first.vs[0].T.shape:
        transposed = "declared = transpose of expected"
        yield transposed, lambda s: (s.f, s.xs, s.i, s.us, [v.T for v in s.vs])
    for name, i in [(path, first.i), *((p, o[0].i) for p, o in others.items())]:
        x = first.xs[i]
        if np.ndim(x) == 2 and np.shape(x)[0] == np.shape(x)[1]:

            def at_transpose(s: Study, i: int = i) -> Any:
                xs = [*s.xs[:i], s.xs[i].T, *s.xs[i + 1 :]]
                return s.f, xs, s.i, s.us, s.vs

            yield f"missing transpose of `{name}`?", at_transpose
    for k, y in enumerate(first.us[0]):
        for axis, n in enumerate(y.shape):

            def of_one(s: Study, k: int = k, axis: int = axis, n: int = n) -> Any:
                one = np.arange(n).reshape(-1, *[1] * (s.us[0][k].ndim - axis - 1)) == 0
                us = [[u * one if j == k else u for j, u in enumerate(row)] for row in s.us]
                return s.f, s.xs, s.i, us, s.vs

            if n > 1:
                yield f"missing sum over axis {axis} of the upstream?", of_one


def _varying_factor(path: str, studies: Sequence[Study]) -> str:
    """Say by which factor each entry differs, if it is the same for every upstream."""
    factors, xs = [], []
    for s in studies:
        if s.vs[0].size > _ENTRIES or np.iscomplexobj(s.vs[0]):
            return ""
        d = np.array([g.ravel() for g in s.gradients])
        e = differences(s.f, s.xs, s.i, s.us, [v for (v,) in basis([s.xs[s.i]])])[0]
        factor = np.sum(d * e, 0) / np.sum(e * e, 0)
        if not ratio(d - factor * e, d) < 1e-3:
            return ""
        factors.append(factor)
        xs.append(np.ravel(np.asarray(s.xs[s.i], float)))
    factor, x = np.concatenate(factors), np.concatenate(xs)
    logs = np.log(abs(x))
    for power in (-3, -2, -1, -0.5, 0.5, 1, 2, 3):
        c = np.exp(np.mean(np.log(abs(factor)) - power * logs))
        if np.ptp(logs) > 1e-3 and ratio(abs(factor) / abs(x) ** power - c, c) < 1e-3:
            return f"wrong power: declared = {c:.4g} x expected x `{path}`**{power}"
    between = f"{factor.min():.3g} to {factor.max():.3g}"
    return f"declared = expected x a factor that depends on the input, {between}"
