"""Judge one argument of a function at one point, and name the mistake where it is wrong.

For upstreams, the rows of `us`, and directions, the columns of `vs`, `Study` compares `us @ J @ vs`
as the rule declares it with what finite differences (`true`) and plain autodiff say. `mistake` runs
when a row has failed: it names the first guess that explains it at all points where it is wrong.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .vectors import Flat, Matrix, Space, ratio

_POWERS = 0, 1, -1, 2, -2, 3, -3, 0.5, -0.5  # of an argument, by which its gradient may be wrong


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
    for guesses in zip(*(_guesses(i, names, studies) for studies in points), strict=True):
        note, *_ = guesses[0]
        d, e = (np.concatenate([np.ravel(g[k]) for g in guesses]) for k in (1, 2))
        proportional = note.startswith(" x ")
        factor = np.sum(d * e) / np.sum(e * e) if proportional else 1
        if ratio(d - factor * e, d) < 1e-3 and (note, round(factor, 3)) != (" x expected", 1):
            sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
            return f"{sign}declared = {factor:.4g}{note}" if proportional else note
    return points[0][i].difference()


def _guesses(i: int, names: Sequence[str], studies: Sequence[Study]) -> Iterator[Any]:
    """Yield notes, with two arrays that then are equal, or proportional if it starts with " x "."""
    s = studies[i]
    x, us, vs, space, nothing = s.x, s.us, s.vs, s.f.space, 0 * s.declared
    yield "expected no gradient", s.expected, nothing
    forgotten = ": forgotten among those of `variables`?" * names[i].startswith("variables")
    yield f"declared no gradient, expected one{forgotten}", s.declared, nothing
    for j, (t, a) in enumerate(zip(studies, space.arrays, strict=True)):
        if j != i and np.shape(a) == np.shape(space.arrays[i]):
            both = np.stack([s.declared, t.declared]), np.stack([t.expected, s.expected])
            yield f"swapped with `{names[j]}`?", *both
            yield f"declared that of `{names[j]}`", s.declared, t.expected
    if np.iscomplexobj(space.arrays[i]):
        to = Space(s.f.of_arrays(*space.fill(x)))
        for of in (us * to.signs, us):
            of_conjugate = s.rows * space.signs @ vs
            yield "declared = conjugate of expected", s.true(x, of, vs)[0], of_conjugate
    for j, (a, part) in enumerate(zip(space.arrays, space.parts, strict=True)):
        if np.ndim(a) == 2 and a.shape == a.shape[::-1]:
            order = np.arange(len(x))
            order[part] = np.swapaxes(order[part].reshape(*a.shape, -1), 0, 1).ravel()
            if j == i:
                yield "declared = transpose of expected", s.expected, s.rows[:, order] @ vs
            yield f"missing transpose of `{names[j]}`?", s.true(x[order], us, vs)[0], s.declared
    for power in _POWERS:
        note = f" x expected x `{names[i]}`**{power}" if power else " x expected"
        yield note, s.rows[:, s.part] * x[s.part] ** -power @ vs[s.part], s.expected
