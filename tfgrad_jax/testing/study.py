"""The declared derivative against the true one, in one argument of a function, at one point.

For upstreams, the rows of `us`, and directions, the columns of `vs`, `Study` compares `us @ J @ vs`
as the rule declares it with what finite differences (`true`) and plain autodiff say.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .vectors import Flat, Matrix, ratio


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
