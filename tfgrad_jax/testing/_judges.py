"""Judge one argument of a function at one point, and name the mistake where it is wrong.

`Flat` turns a function of arrays into one of vectors; a complex number becomes a pair. For
upstreams, the rows of `us`, and directions, the columns of `vs`, `Study` compares `us @ J @ vs` as
the rule declares it with what finite differences (`true`) and plain autodiff say. `mistake` names
the first guess that explains a failed row at all points where it is wrong; `nearby` makes these
points.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax._jax.compat import laid_out_as, summed_parts

Matrix: TypeAlias = np.ndarray[Any, Any]
_POWERS = 0, 1, -1, 2, -2, 3, -3, 0.5, -0.5  # of an argument, by which its gradient may be wrong


def numbers(x: Any) -> Matrix:
    x = np.asarray(summed_parts(x))
    return x.astype(complex if np.iscomplexobj(x) else float)


def vector(arrays: Sequence[Any]) -> Matrix:
    return np.concatenate([np.zeros(0), *(numbers(a).ravel().view(float) for a in arrays)])


def random(shape: Any, *key: int) -> Matrix:
    """Return random numbers that every precision has."""
    normal = np.random.default_rng(key).standard_normal(shape)
    return normal.astype(jnp.bfloat16).astype(float)


def ratio(error: Any, size: Any) -> float:
    """Return the largest error relative to the largest size."""
    error, size = (float(np.max(np.abs(v), initial=0.0)) for v in (error, size))
    return 0.0 if error == 0 else error / size if size else float("inf")


def distance(a: Any, b: Any) -> float:
    """Return the largest difference relative to 1 or the largest number."""
    if np.shape(a) != np.shape(b) or jnp.result_type(a) != jnp.result_type(b):
        raise TypeError("has another shape or dtype than the value")
    a, b = numbers(a), numbers(b)
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, abs(a - b))
    size = np.max(abs(b), initial=1.0, where=np.isfinite(b))
    return ratio(np.nan_to_num(error, nan=np.inf), size)


class Space:
    """The vectors of arrays of given shapes and dtypes."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = arrays
        ones = [np.full(np.shape(a), 1 - 1j if np.iscomplexobj(a) else 1.0) for a in arrays]
        # Of a complex conjugate: JAX pairs a cotangent with a tangent without one, as `ct * t`.
        self.signs = vector(ones)
        ends = np.cumsum([0, *(len(vector([one])) for one in ones)])
        self.parts = [slice(*ends) for ends in itertools.pairwise(ends)]

    def fill(self, x: Matrix) -> list[Any]:
        """Return the arrays of a vector; Python numbers for Python numbers.

        Over an explicit mesh, where they are is a part of their type: a rule gets no others.
        """
        arrays: list[Any] = []
        for part, a in zip(self.parts, self.arrays, strict=True):
            kind = complex if np.iscomplexobj(a) else float
            new: Any = np.array(x[part]).view(kind).reshape(np.shape(a))
            is_number, dtype = isinstance(a, kind), jnp.result_type(a)
            new = type(a)(new) if is_number else laid_out_as(jnp.asarray(new, dtype), a)
            arrays.append(new)
        return arrays


class Flat:
    """A function of arrays, as a function of vectors."""

    def __init__(self, of_arrays: Callable[..., list[Any]], arrays: Sequence[Any]) -> None:
        self.of_arrays, self.space = of_arrays, Space(arrays)

    def __call__(self, x: Matrix) -> Matrix:
        return vector(self.of_arrays(*self.space.fill(x)))

    def rows(self, x: Matrix, us: Matrix) -> Matrix:
        """Return `us @ J` as it is declared: the gradient for each upstream."""
        ys, pull_back = jax.vjp(self.of_arrays, *self.space.fill(x))
        to = Space(ys)
        rows = [vector(pull_back(to.fill(to.signs * u))) for u in us]
        return self.space.signs * np.array(rows)

    def derivative(self, seed: int) -> "Flat":
        """Return the gradient for one upstream, as a function."""

        def gradient(*xs: Any) -> list[Any]:
            ys, pull_back = jax.vjp(self.of_arrays, *xs)
            to = Space(ys)
            return list(pull_back(to.fill(random(len(to.signs), seed))))

        return Flat(gradient, self.space.arrays)


def _forms(a: Matrix) -> Iterator[Any]:
    """Yield the array with each property that a rule may rely on: equal to it where it has that."""
    yield np.sort(a)
    # Ones are symmetric by accident.
    square = a.ndim > 1 and a.shape[-1] == a.shape[-2] and len(np.unique(a)) > 1
    yield (a + np.conj(np.swapaxes(a, -1, -2))) / 2 if square else np.nan
    yield abs(a) / np.sum(a, axis=-1, keepdims=True)  # probabilities
    yield a / np.linalg.norm(a, axis=-1, keepdims=True)
    if a.ndim > 1 and a.size <= 100_000 and np.isfinite(a).all():  # orthogonal
        u, _, v = np.linalg.svd(a, full_matrices=False)
        yield u @ v


def nearby(x: Any, radius: float, *seed: int) -> Matrix:
    """Return an array near `x`, of distinct entries; zeros and signs stay."""
    a = numbers(x)
    change = radius * np.random.default_rng([*seed, *a.shape]).uniform(-1, 1, a.shape)
    near = a * np.exp(change) if a.any() else change
    for i, form in enumerate(_forms(a) if a.size > 1 and a.shape[-1] > 1 else ()):
        if np.allclose(form, a, rtol=1e-3):
            near = next(itertools.islice(_forms(near), i, None))
    return near


class Study:
    """The declared derivative in the i-th argument, whose part of the Jacobian it is.

    At a nearby point, a rule counts as wrong only if there is no kink and no noise, and both judges
    disagree with it.
    """

    def __init__(
        self,
        f: Flat,
        x: Matrix,
        i: int,  # the position of the argument
        vs: Matrix,  # directions among the arguments
        us: Matrix,  # directions among the outputs
        rows: Matrix,  # the declared derivative
        plain_rows: Matrix | None,  # that of plain autodiff
        small: float,
        near: bool,
    ) -> None:
        self.f, self.x, self.us, self.vs, self.rows = f, x, us, vs, rows
        self.part, self._dtype = f.space.parts[i], jnp.result_type(f.space.arrays[i])
        self.declared = d = rows @ vs
        size = np.vstack([np.linalg.norm(row) for row in rows[:, self.part]])
        value, blur, low, high, noise = self.true(x, us, vs)
        sharp = blur <= 0.01 * np.maximum(size, abs(value))
        self.scale = scale = np.maximum(np.maximum(size, abs(d)), np.where(sharp, abs(value), 0))
        slack, off = small * scale + blur, np.maximum(np.maximum(low - d, d - high), 0)
        # Differences that are nothing but rounding say that there is no gradient.
        nothing = (np.maximum(scale, abs(value)) <= noise).all()
        self.differences = ratio(off[sharp], scale) if sharp.any() else 0.0 if nothing else None
        self.autodiff: float | None = None
        self.expected, wrong = value, sharp & (off > slack) & ((low == high) | (not near))
        plain = None if plain_rows is None else plain_rows @ vs
        if plain is not None and np.isfinite(plain).all():
            # Of two that are zero but for rounding none is wrong. Autodiff rounds far less.
            apart = abs(plain - d) * (sharp | (abs(plain - d) > 0.01 * noise))
            self.autodiff, self.expected = ratio(apart, scale), np.where(sharp, value, plain)
            if near:
                wrong &= abs(plain - value) <= slack
            else:
                wrong |= ~sharp & (apart > small * np.maximum(scale, abs(plain)))
        finite = np.isfinite(d).all()
        self.ok = not wrong.any() if finite else near

    def true(self, x: Matrix, us: Matrix, vs: Matrix) -> Matrix:
        """Return `us @ J @ vs`, its error, the least and greatest it may be, its rounding error.

        Central differences at two steps estimate their own error. Steps longer than the period of
        the function tell nothing: shorter ones have larger errors then. One-sided differences
        reveal a kink: there, every number between the two is a derivative.
        """
        y, own, eps = self.f(x), x[self.part], float(jnp.finfo(self._dtype).eps)
        finite = np.isfinite(y)
        y, us = y[finite], us[:, finite]
        size = np.vstack(list(abs(us) @ abs(y)))
        typical = np.linalg.norm(own) / own.size**0.5 if own.any() else 1.0

        def change(t: float) -> Matrix:
            return us @ np.transpose([self.f(x + t * v)[finite] - y for v in vs.T])

        def differences(t: float) -> Matrix:
            a, b, c, d = (change(s) for s in (t, -t, t / 2, -t / 2))
            noise = np.broadcast_to(8 * eps * size / t, a.shape)
            blur = np.nan_to_num(abs((a - b) / (2 * t) - (c - d) / t) + noise, nan=np.inf)
            value = (4 * (c - d) / t - (a - b) / (2 * t)) / 3
            right, left, jump = 2 * c / t, -2 * d / t, abs(a + b) / t
            kink = (abs(right - left) > 0.7 * jump) & (abs(right - left) > noise)
            low = np.where(kink, np.minimum(left, right), value)
            high = np.where(kink, np.maximum(left, right), value)
            return np.stack([value, blur, low, high, noise])

        best = long = differences(eps**0.25 * typical)
        value, blur, *_ = long
        if (blur > 1e-6 * abs(value)).any():
            short = differences(eps**0.4 * typical)
            other, its_blur, _, _, its_noise = short
            is_periodic = (blur > 0.3 * abs(value)) & (its_blur > blur)
            is_periodic &= its_blur > 10 * its_noise  # that of a step function is rounding
            is_periodic |= abs(other - value) > its_blur + blur
            best = np.where(its_blur < blur, short, long)
            if is_periodic.any():
                best[1] = np.inf  # others agree by accident
        return best

    def difference(self) -> str:
        d, e = self.declared, self.expected
        sizes = np.linalg.norm(d) * np.linalg.norm(e)
        if not sizes:
            return "expected is zero" if d.any() else "declared is zero"
        distance = np.linalg.norm(d - e) / np.linalg.norm(e)
        return f"differs by {distance:.2g} x expected, cosine {np.sum(d * e) / sizes:.3f}"


def mistake(
    i: int, names: Sequence[str], points: Sequence[Sequence[Study]], is_weight: bool
) -> str:
    every = (_guesses(i, names, studies, is_weight) for studies in points)
    # So small an error fits every guess.
    is_small = all(ratio(p[i].declared - p[i].expected, p[i].declared) < 1e-3 for p in points)
    for guesses in zip(*every, strict=True) if not is_small else ():
        note, *_ = guesses[0]
        d, e = (np.concatenate([np.ravel(g[k]) for g in guesses]) for k in (1, 2))
        proportional = note.startswith(" x ")
        factor = np.sum(d * e) / np.sum(e * e) if proportional else 1
        if ratio(d - factor * e, d) < 1e-3:
            sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
            return f"{sign}declared = {factor:.4g}{note}" if proportional else note
    return points[0][i].difference()


def _guesses(
    i: int, names: Sequence[str], studies: Sequence[Study], is_weight: bool
) -> Iterator[Any]:
    """Yield notes, with two arrays that then are equal, or proportional if it starts with " x "."""
    s = studies[i]
    x, us, vs, space, nothing = s.x, s.us, s.vs, s.f.space, 0 * s.declared
    yield "expected no gradient", s.expected, nothing
    forgotten = ": forgotten among those of `variables`?" * is_weight
    yield f"declared no gradient, expected one{forgotten}", s.declared, nothing
    for j, t in enumerate(studies):
        both = np.stack([s.declared, t.declared]), np.stack([t.expected, s.expected])
        yield f"swapped with `{names[j]}`?", *both
        yield f"declared that of `{names[j]}`", s.declared, t.expected
    if np.iscomplexobj(space.arrays[i]):
        to = Space(s.f.of_arrays(*space.fill(x)))
        of_conjugate = s.rows * space.signs @ vs
        for of in (us * to.signs, us):
            yield "declared = conjugate of expected", s.true(x, of, vs)[0], of_conjugate
    for j, (a, part) in enumerate(zip(space.arrays, space.parts, strict=True)):
        if np.ndim(a) == 2 and a.shape == a.shape[::-1]:
            order = np.arange(len(x))
            order[part] = np.swapaxes(order[part].reshape(*a.shape, -1), 0, 1).ravel()
            yield "declared = transpose of expected", s.expected, s.rows[:, order] @ vs
            yield f"missing transpose of `{names[j]}`?", s.true(x[order], us, vs)[0], s.declared
    for power in _POWERS:
        note = f" x expected x `{names[i]}`**{power}" if power else " x expected"
        yield note, s.rows[:, s.part] * x[s.part] ** -power @ vs[s.part], s.expected
