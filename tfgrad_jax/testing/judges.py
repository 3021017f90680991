"""Judge one argument of a function at one point, and name the mistake where it is wrong.

For upstreams, the rows of `us`, and directions, the columns of `vs`, `Study` compares `us @ J @ vs`
as the rule declares it with what finite differences (`true`) and plain autodiff say. `mistake` runs
when a row has failed: it names the first guess that explains it at all points where it is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .vectors import Flat, Matrix, Space, ratio

_ENTRIES = 100  # of an argument, to be looked at one by one


class Study:
    """The declared derivative in the i-th argument, whose part of the Jacobian it is.

    Near the given point a rule is wrong only where nothing speaks for it: no kink, no noise, and
    both judges against it.
    """

    def __init__(
        self, f: Flat, x: Matrix, i: int, vs: Matrix, us: Matrix,
        rows: Matrix, plain_rows: Matrix | None, small: float, near: bool,
    ) -> None:  # fmt: skip
        self.f, self.x, self.us, self.vs, self.rows = f, x, us, vs, rows
        self.part, self._dtype = f.space.parts[i], jnp.result_type(f.space.arrays[i])
        self.declared = d = rows @ vs
        size = np.linalg.norm(rows[:, self.part], axis=1, keepdims=True)
        value, blur, low, high, noise = self.true(x, us, vs)
        sharp = blur <= 0.01 * np.maximum(size, abs(value))
        self.scale = scale = np.maximum(np.maximum(size, abs(d)), np.where(sharp, abs(value), 0))
        slack, off = small * scale + 2 * blur, np.maximum(np.maximum(low - d, d - high), 0)
        # Differences that are nothing but rounding say that there is no gradient.
        nothing = ((off <= slack) & (scale <= blur) & (blur <= 2 * noise)).all()
        self.differences = ratio(off[sharp], scale) if sharp.any() else 0.0 if nothing else None
        self.autodiff: float | None = None
        self.expected, wrong = value, sharp & (off > slack) & ((low == high) | (not near))
        plain = None if plain_rows is None else plain_rows @ vs
        if plain is not None and np.isfinite(plain).all():
            self.autodiff, self.expected = ratio(plain - d, scale), np.where(sharp, value, plain)
            if near:
                wrong &= abs(plain - value) <= slack
            else:
                wrong |= ~sharp & (abs(plain - d) > small * np.maximum(scale, abs(plain)))
        finite = np.isfinite(d).all()
        self.ok = bool((finite or near) and not (finite and wrong.any()))

    def true(self, x: Matrix, us: Matrix, vs: Matrix) -> Matrix:
        """Return `us @ J @ vs`, its error, the least and greatest it may be, its rounding error.

        Central differences at two steps tell their own error. One-sided ones tell a kink: there,
        every number between the two is a derivative.
        """
        y, eps = self.f(x), float(jnp.finfo(self._dtype).eps)
        finite = np.isfinite(y)
        size = (abs(us) @ np.where(finite, abs(y), 0))[:, None]
        typical = np.linalg.norm(x[self.part]) / max(x[self.part].size, 1) ** 0.5 or 1.0

        def change(t: float) -> Matrix:
            moved = np.array([self.f(x + t * v) for v in vs.T]).reshape(vs.shape[1], len(y))
            return us @ np.where(finite, moved - y, 0).T

        best: Any = None
        for power in (0.25, 0.4):
            t = float(eps**power * typical)
            a, b, c, d = (change(s) for s in (t, -t, t / 2, -t / 2))
            noise = 8 * eps * size / t + 0 * a
            blur = np.nan_to_num(abs((a - b) / (2 * t) - (c - d) / t) + noise, nan=np.inf)
            jump, half = abs(a + b) / t, abs(c + d) / t * 2
            value = (4 * (c - d) / t - (a - b) / (2 * t)) / 3
            kink = (half > 0.7 * jump) & (half > 10 * noise)
            low, high = np.where(kink, np.sort([c / t * 2, -d / t * 2], axis=0), value)
            new = np.stack([value, blur, low, high, noise])
            best = new if best is None else np.where(new[1] < best[1], new, best)
            if (best[1] <= 1e-6 * abs(best[0])).all():
                break
        if vs.size:  # two steps may agree by accident
            best[1] = np.maximum(best[1], np.median(best[1], axis=1, keepdims=True))
        return best

    def difference(self) -> str:
        d, e = self.declared, self.expected
        sizes = np.linalg.norm(d) * np.linalg.norm(e)
        if not sizes:
            return "expected is zero" if d.any() else "declared is zero"
        distance = np.linalg.norm(d - e) / np.linalg.norm(e)
        return f"differs by {distance:.2g} x expected, cosine {np.sum(d * e) / sizes:.3f}"


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
