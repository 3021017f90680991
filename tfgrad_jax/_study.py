"""The declared derivative against the true one, in one argument of a function.

`Study` compares three values of the same number `<u, f'(x) v>`, for upstreams `u` and directions
`v`: what the rule declares, finite differences, and plain autodiff. Where they differ, it looks for
the mistake that would explain it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._structure import spec


class Study:
    """The declared derivative in one argument against the true one, for all pairs of `us`, `vs`."""

    def __init__(
        self, f: Any, xs: Any, i: int, us: Any, vs: Any, declared: Any, ordinary: Any, small: float
    ) -> None:
        self._at, self.vs = (f, xs, i, us), vs
        self.declared = d = pair(declared, i, vs)
        size = np.array([[np.linalg.norm(g[i])] for g in declared])
        value, blur, low, high = _differences(*self._at, vs)
        sharp = blur <= 0.01 * np.maximum(size, abs(value))
        self.scale = np.maximum(size, np.where(sharp, abs(value), 0))
        slack = small * self.scale + 2 * blur
        inside = (d >= low - slack) & (d <= high + slack)
        off = np.maximum(low - d, 0) + np.maximum(d - high, 0)
        # One row of differences that are all lost in rounding says that there is no gradient.
        nothing = bool((inside & (self.scale <= blur)).all())
        self.differences = (
            ratio(off[sharp], self.scale) if sharp.any() else 0.0 if nothing else None
        )
        self.autodiff: float | None = None
        self.expected, wrong = value, sharp & ~inside
        plain = None if ordinary is None else pair(ordinary, i, vs)
        if plain is not None and np.isfinite(plain).all():
            self.autodiff = ratio(plain - d, self.scale)
            self.expected = np.where(sharp, value, plain)
            wrong |= ~sharp & (abs(plain - d) > small * np.maximum(self.scale, abs(plain)))
        self.ok = bool(np.isfinite(d).all() and not wrong.any())

    def difference(self) -> str:
        """Say how far the declared gradient is from the expected one."""
        d, e = self.declared, self.expected
        sizes = np.linalg.norm(d) * np.linalg.norm(e)
        if not sizes:
            return "expected is zero" if d.any() else "declared is zero"
        distance = np.linalg.norm(d - e) / np.linalg.norm(e)
        return f"differs by {distance:.2g} x expected, cosine {np.sum(d * e) / sizes:.3f}"

    def mistake(self, others: Mapping[str, "Study"]) -> str:
        """Name the likely mistake."""
        d, e = self.declared, self.expected
        f, xs, i, us = self._at

        def is_declared(value: Any) -> bool:
            return value.shape == d.shape and ratio(value - d, self.scale) < 1e-3

        if not (np.isfinite(d).all() and np.isfinite(e).all()):
            return "not finite"
        if not (d.any() and e.any()):
            return "declared no gradient, expected one" if e.any() else "expected no gradient"
        for path, other in others.items():
            if other.vs[0].shape == self.vs[0].shape and is_declared(other.expected):
                swapped = ratio(other.declared - e, self.scale) < 1e-3
                return f"swapped with `{path}`?" if swapped else f"declared that of `{path}`"
        if np.iscomplexobj(self.vs[0]):
            for factors in ([[np.conj(u) for u in row] for row in us], us):
                conjugate = _differences(f, xs, i, factors, [np.conj(v) for v in self.vs])[0]
                if is_declared(conjugate):
                    return "declared = conjugate of expected"
        if self.vs[0].ndim == 2 and self.vs[0].shape == self.vs[0].T.shape:
            transpose = _differences(f, xs, i, us, [v.T for v in self.vs])[0]
            if is_declared(transpose):
                return "declared = transpose of expected"
        factor = np.sum(d * e) / np.sum(e * e)
        if is_declared(factor * e):
            sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
            return f"{sign}declared = {factor:.4g} x expected"
        worst = np.unravel_index(np.argmax(abs(d - e)), d.shape)
        direction = np.argwhere(self.vs[worst[1]])
        at = f" at {direction[0].tolist()}" if len(direction) == 1 and direction.size else ""
        return f"declared {d[worst]:.4g}, expected {e[worst]:.4g}{at}"


def _differences(f: Any, xs: Any, i: int, us: Any, vs: Any) -> tuple[np.ndarray, ...]:
    """Return `<u, f'(x) v>` in the i-th argument by differences: value, error, least, greatest.

    Central differences at two steps tell their own error. One-sided ones tell a kink: there,
    every number between the two is a derivative.
    """
    x, dtype = numbers(xs[i]), spec(xs[i]).dtype
    ys = [numbers(y) for y in f(*xs)]
    finite = [np.isfinite(y) for y in ys]
    sizes = [np.where(ok, abs(y), 0) for ok, y in zip(finite, ys, strict=True)]
    size = np.array([sum(map(dot, map(abs, row), sizes)) for row in us])
    eps = float(jnp.finfo(dtype).eps)

    def change(v: Any, t: float) -> np.ndarray:
        moved = [*xs[:i], jnp.asarray(x + t * v, dtype), *xs[i + 1 :]]
        new = map(numbers, f(*moved))
        changes = [np.where(ok, n - y, 0) for ok, n, y in zip(finite, new, ys, strict=True)]
        return np.array([sum(map(dot, row, changes)) for row in us])

    columns = []
    for v in vs:
        best = None
        for power in (0.25, 0.4):
            t = eps**power * (float(np.linalg.norm(x)) / max(x.size, 1) ** 0.5 or 1.0)
            a, b, c, d = (change(v, s) for s in (t, -t, t / 2, -t / 2))
            noise = 8 * eps * size / t
            blur = np.nan_to_num(abs((a - b) / (2 * t) - (c - d) / t) + noise, nan=np.inf)
            jump, half = abs(a + b) / t, abs(c + d) / t * 2
            value = (4 * (c - d) / t - (a - b) / (2 * t)) / 3
            kink = (half > 0.7 * jump) & (half > 10 * noise)
            sides = np.sort([c / t * 2, -d / t * 2], axis=0)
            new = np.stack([value, blur, *(np.where(kink, s, value) for s in sides)])
            best = new if best is None else np.where(new[1] < best[1], new, best)
            if (best[1] <= 1e-6 * abs(best[0])).all():
                break
        columns.append(best)
    return tuple(np.moveaxis(np.array(columns), 0, -1))


def numbers(x: Any) -> np.ndarray:
    """Return an array in double precision."""
    x = np.asarray(x)
    return x.astype(complex if np.iscomplexobj(x) else float)


def like(values: Sequence[Any], arrays: Sequence[Any]) -> list[jax.Array]:
    """Return the values in the dtypes of the arrays."""
    return [jnp.asarray(v, spec(a).dtype) for v, a in zip(values, arrays, strict=True)]


def _normal(x: Any, *key: int) -> np.ndarray:
    """Return random numbers in the shape of `x`, the same in every precision."""
    shape = np.shape(x)
    normal = np.random.default_rng([*key, *shape]).standard_normal((2, *shape))
    normal = normal.astype(jnp.bfloat16).astype(float)
    return normal[0] + 1j * normal[1] if np.iscomplexobj(x) else normal[0]


def random(arrays: Sequence[Any], count: int, seed: int) -> list[list[np.ndarray]]:
    """Return rows of random numbers in the shapes of the arrays."""
    return [[_normal(x, seed, n, j) for j, x in enumerate(arrays)] for n in range(count)]


def basis(arrays: Sequence[Any]) -> list[list[np.ndarray]]:
    """Return every unit vector, among arrays of zeros."""
    rows = []
    for j, x in enumerate(arrays):
        for one in (1, 1j) if np.iscomplexobj(x) else (1,):
            for index in np.ndindex(np.shape(x)):
                rows.append([np.zeros(np.shape(a), type(one)) for a in arrays])
                rows[-1][j][index] = one
    return rows


def pull_back(f: Any, xs: Sequence[Any], rows: Sequence[Any]) -> list[list[np.ndarray]]:
    """Return the gradients of `f` for each row of upstreams."""
    ys, pull_back = jax.vjp(f, *xs)
    return [[numbers(g) for g in pull_back(like(us, ys))] for us in rows]


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return the change that a cotangent gives to a tangent."""
    return float(np.sum(a * b).real)


def pair(gradients: Sequence[Any], i: int, vs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the i-th gradient of each row along each direction."""
    return np.array([[dot(g[i], v) for v in vs] for g in gradients]).reshape(-1, len(vs))


def ratio(error: Any, size: Any) -> float:
    """Return the largest error relative to the largest size."""
    error, size = (float(np.max(np.abs(v), initial=0.0)) for v in (error, size))
    return 0.0 if error == 0 else error / size if size else float("inf")


def distance(a: Any, b: Any) -> float:
    """Return the largest difference relative to 1 or the largest number."""
    a, b = numbers(a), numbers(b)
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, abs(a - b))
    size = np.max(abs(b), initial=1.0, where=np.isfinite(b))
    return ratio(np.nan_to_num(error, nan=np.inf), size)
