"""Judge a derivative at one point, and name the mistake where it is wrong.

`Flat` turns a function of arrays into one of vectors; a complex number becomes a pair. For
upstreams, the rows of `us`, and directions, the columns of `vs`, a `Point` compares `us @ J @ vs`
as the rule declares it with what finite differences and plain autodiff say, argument by argument.
`mistake` names the first guess that explains what is wrong at all points; `nearby` makes these.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from .._jax.types import Leaf
from .._tools import UserCodeError, attempt

Matrix: TypeAlias = np.ndarray[Any, Any]
Argument: TypeAlias = int  # an index into the arguments and weights that are checked
Holding: TypeAlias = Callable[[Sequence[Leaf]], contextlib.AbstractContextManager[object]]
# Relative errors that count as rounding: of one operation, by differences, by autodiff.
Precision: TypeAlias = tuple[float, float, float]
RANDOM = 3  # upstreams, and directions


def numbers(x: Leaf) -> Matrix:
    x = np.asarray(x)
    return x.astype(complex if np.iscomplexobj(x) else float)


def vector(arrays: Sequence[Leaf]) -> Matrix:
    return np.concatenate([np.zeros(0), *(numbers(a).ravel().view(float) for a in arrays)])


def random_numbers(shape: tuple[int, ...], *key: int) -> Matrix:
    normal = np.random.default_rng(key).standard_normal(shape)
    return normal.astype(jnp.bfloat16).astype(float)  # every precision has these


def largest(values: ArrayLike) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def ratio(error: ArrayLike, size: float) -> float:
    e = largest(error)
    return 0.0 if e == 0 else e / size if size else float("inf")


class Flat:
    """A function of arrays, as a function of vectors."""

    def __init__(
        self, of_arrays: Callable[..., list[Leaf]], arrays: Sequence[Leaf], holding: Holding
    ) -> None:
        self.of_arrays, self.arrays, self.holding = of_arrays, arrays, holding
        ends = np.cumsum([0, *(len(vector([a])) for a in arrays)])
        self.parts = [slice(*ends) for ends in itertools.pairwise(ends)]

    def __call__(self, x: Matrix) -> Matrix:
        return vector(attempt(self.of_arrays, *fill(self.arrays, x)))

    def rows(self, x: Matrix, us: Matrix) -> Matrix:
        """Return `us @ J` as it is declared: the gradient for each upstream."""
        xs = fill(self.arrays, x)
        ys, pull_back = attempt(jax.vjp, self.of_arrays, *xs)
        with self.holding(xs):  # the rule may read weights of the function
            rows = [vector(attempt(pull_back, fill(ys, signs(ys) * u))) for u in us]
        return signs(self.arrays) * np.array(rows)

    def derivative(self, seed: int) -> "Flat":
        """Return the gradient, as a function of the arrays and of the upstreams."""
        n, ys = len(self.arrays), attempt(self.of_arrays, *self.arrays)
        y = vector(ys)
        us = fill(ys, random_numbers(y.shape, seed) * np.isfinite(y))

        def gradient(*both: Leaf) -> list[Leaf]:
            _, pull_back = jax.vjp(self.of_arrays, *both[:n])
            with self.holding(both[:n]):
                return list(pull_back(list(both[n:])))

        return Flat(gradient, [*self.arrays, *us], lambda both: self.holding(both[:n]))


def signs(arrays: Sequence[Leaf]) -> Matrix:
    """Return those of a complex conjugate: JAX pairs a cotangent with a tangent as `ct * t`."""
    return vector([np.full(np.shape(a), 1 - 1j if np.iscomplexobj(a) else 1.0) for a in arrays])


def fill(like: Sequence[Leaf], x: Matrix) -> list[Leaf]:
    """Return the arrays of a vector; Python numbers for Python numbers."""
    arrays: list[Leaf] = []
    for a in like:
        kind, size = (complex, 2) if np.iscomplexobj(a) else (float, 1)
        part, x = np.split(x, [size * np.size(a)])
        new = np.array(part).view(kind).reshape(np.shape(a))
        is_number = isinstance(a, kind)
        arrays.append(type(a)(new) if is_number else jnp.asarray(new, jnp.result_type(a)))
    return arrays


def nearby(x: Leaf, radius: float, *seed: int) -> Matrix:
    """Return an array near `x`, of distinct entries; signs stay, and what rules may rely on."""
    a = numbers(x)
    change = radius * np.random.default_rng([*seed, *a.shape]).uniform(-1, 1, a.shape)
    near = a * np.exp(change) if a.any() else change
    if a.ndim > 1 and a.shape[-1] == a.shape[-2] and len(np.unique(a)) > 1:  # ones by accident
        turned, also = (np.conj(np.swapaxes(v, -1, -2)) for v in (a, near))
        near = (near + also) / 2 if np.allclose(a, turned, rtol=1e-3) else near
    if a.ndim and a.shape[-1] > 1 and np.allclose(np.sum(a, -1), 1, rtol=1e-3) and (a >= 0).all():
        near = near / np.sum(near, -1, keepdims=True)  # probabilities
    return near


class Study(NamedTuple):
    """The verdict on the declared derivative in one argument."""

    vs: Matrix  # directions, the columns
    declared: Matrix  # `us @ J @ vs`
    expected: Matrix
    differences: float | None  # relative error against finite differences; None: too noisy
    autodiff: float | None  # against plain autodiff; None: it has no derivative
    ok: bool | None  # None: no judge could tell

    def distance(self) -> str:
        d, e = self.declared, self.expected
        if not (d.any() and e.any()):
            return "expected is zero" if d.any() else "declared is zero"
        size = np.linalg.norm(e)
        off, cosine = np.linalg.norm(d - e) / size, np.sum(d * e) / (size * np.linalg.norm(d))
        return f"differs by {off:.2g} * expected, cosine {cosine:.3f}"


class Point(NamedTuple):
    """A function at one point: what its rule declares there, and the verdict on each argument."""

    f: Flat  # whose derivative is true
    x: Matrix
    us: Matrix  # upstreams, the rows
    declared: Matrix  # `us @ J` by the rule
    precision: Precision
    is_near: bool  # near the given point
    studies: Sequence[Study] = ()

    def true(
        self, i: Argument, x: Matrix, us: Matrix, vs: Matrix
    ) -> tuple[Matrix, float, float, Matrix, Matrix]:
        """Return `us @ J @ vs` by differences at `x`, for directions in one argument.

        Then how large its rounding is, and its error, rounding among it; and then the least and the
        greatest that the derivative may be: they differ at a kink.
        """
        y, own, eps = self.f(x), x[self.f.parts[i]], self.precision[0]
        y, us = y[finite := np.isfinite(y)], us[:, finite]
        t = eps ** (1 / 3) * (np.linalg.norm(own) / own.size**0.5 if own.any() else 1.0)

        def change(step: float) -> Matrix:
            return us @ np.transpose([self.f(x + step * v)[finite] - y for v in vs.T])

        # Central differences with the steps t and t / 2 give a value of higher order, and how far
        # apart they are is its error. The one-sided differences of a smooth function come closer as
        # the step shrinks: half as far apart at half the step. At a kink, such as that of `relu` at
        # 0, they do not, and every number between the two is a derivative. 0.7 tells them apart.
        a, b, c, d = (change(s) for s in (t, -t, t / 2, -t / 2))
        noise, error = 8 * eps * largest(abs(us) @ abs(y)) / t, (a - b) / (2 * t) - (c - d) / t
        value = (4 * (c - d) / t - (a - b) / (2 * t)) / 3
        right, left, jump = 2 * c / t, -2 * d / t, abs(a + b) / t
        kink = (abs(right - left) > 0.7 * jump) & (abs(right - left) > noise)
        low, high = (np.where(kink, f(left, right), value) for f in (np.minimum, np.maximum))
        return value, noise, noise + largest(np.nan_to_num(error, nan=np.inf)), low, high

    def judged(self, plains: Sequence[Matrix | None], seed: int, is_reference: bool) -> "Point":
        """Judge the declared derivative in each argument; what autodiff says may be None.

        Near the given point, a rule counts as wrong only if there is no kink and no noise, and both
        judges disagree with it. A reference says what is expected.
        """
        studies, (_, small, rounding) = [], self.precision
        for i, rows in enumerate(plains):
            # Equal for arrays of equal shape, so that a swapped pair shows.
            part, vs = self.f.parts[i], np.zeros((len(self.x), RANDOM))
            shape = RANDOM, part.stop - part.start
            vs[part] = random_numbers(shape, seed, *np.shape(self.f.arrays[i])).T
            d, plain = self.declared @ vs, None
            if rows is not None and np.isfinite(rows).all():
                plain = rows @ vs
            value, noise, blur, low, high = self.true(i, self.x, self.us, vs)
            # If differences are rounding alone, there may be no gradient; autodiff rounds less.
            size, slope, expects = map(largest, (d, value, 0.0 if plain is None else plain))
            is_nothing = slope <= noise and (
                plain is None or noise >= expects or noise <= 0.01 * max(size, expects)
            )
            is_sharp = blur <= 0.01 * slope or is_nothing
            scale = max(size, slope if is_sharp else 0.01 * noise)
            off, slack = np.maximum(np.maximum(low - d, d - high), 0), small * scale + blur
            ok: bool | None = None
            if is_sharp:
                wrong = off > slack
                if self.is_near:
                    agree = True if plain is None else abs(plain - value) <= slack
                    wrong &= (low == high) & agree
                ok = not wrong.any()
            bound = rounding * max(size, expects, 0.01 * noise)
            fits = plain is None or largest(plain - d) <= bound
            if plain is not None and (is_nothing or not is_sharp):
                ok = ok is not False and (self.is_near or fits)
            ok = ok if np.isfinite(d).all() else self.is_near
            by_plain = plain is not None and (not is_sharp or (is_reference and not fits))
            differences = ratio(off, scale) if is_sharp else None
            autodiff = None if plain is None else ratio(plain - d, scale)
            studies += [Study(vs, d, plain if by_plain else value, differences, autodiff, ok)]
        return self._replace(studies=studies)


def mistake(i: Argument, names: Sequence[str], points: Sequence[Point], cause: str) -> str:
    """Name the mistake that explains a wrong derivative at all points, or say how far off it is."""
    studies = [p.studies[i] for p in points]
    d = np.concatenate([s.declared.ravel() for s in studies])
    e = np.concatenate([s.expected.ravel() for s in studies])
    if ratio(d - e, largest(d)) >= 1e-3:  # so small an error fits every guess
        every = (_guesses(i, names, p, cause) for p in points)
        with contextlib.suppress(UserCodeError):  # a transpose may be outside of the domain
            for guesses in zip(*every, strict=True):
                if all(ratio(one - other, largest(one)) < 1e-3 for _, one, other in guesses):
                    return guesses[0][0]
        factor = np.sum(d * e) / np.sum(e * e)
        if ratio(d - factor * e, largest(d)) < 1e-3:
            sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
            return f"{sign}declared = {factor:.3g} * expected"
    return studies[0].distance()


def _guesses(
    i: Argument, names: Sequence[str], p: Point, cause: str
) -> Iterator[tuple[str, Matrix, Matrix]]:
    """Yield mistakes, each with two arrays that are equal if it was made."""
    s, f, nothing = p.studies[i], p.f, 0 * p.studies[i].declared
    yield "expected no gradient", s.expected, nothing
    yield f"declared no gradient, expected one{cause}", s.declared, nothing
    for name, t in zip(names, p.studies, strict=True):
        both = np.stack([s.declared, t.declared]), np.stack([t.expected, s.expected])
        yield f"swapped with `{name}`?", *both
        yield f"declared that of `{name}`", s.declared, t.expected
    if np.iscomplexobj(f.arrays[i]):
        of_conjugate = p.declared * signs(f.arrays) @ s.vs
        for us in (p.us * signs(f.of_arrays(*fill(f.arrays, p.x))), p.us):
            yield "declared = conjugate of expected", p.true(i, p.x, us, s.vs)[0], of_conjugate
    for name, a, part in zip(names, f.arrays, f.parts, strict=True):
        if np.ndim(a) == 2 and a.shape == a.shape[::-1]:
            order = np.arange(len(p.x))
            order[part] = np.swapaxes(order[part].reshape(*a.shape, -1), 0, 1).ravel()
            at_transpose, *_ = p.true(i, p.x[order], p.us, s.vs)
            yield "declared = transpose of expected", s.expected, p.declared[:, order] @ s.vs
            yield f"missing transpose of `{name}`?", at_transpose, s.declared
