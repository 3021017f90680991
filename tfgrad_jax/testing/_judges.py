"""Judge a derivative at one point, and name the mistake where it is wrong.

`Flat` turns a function of arrays into one of vectors; a complex number becomes a pair. For
upstreams, the rows of `us`, and directions, the columns of `vs`, `judged` compares `us @ J @ vs` as
the rule declares it with what finite differences and plain autodiff say, argument by argument.
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

from tfgrad_jax._jax.types import Leaf
from tfgrad_jax._tools import UserCodeError, attempt

Matrix: TypeAlias = np.ndarray[Any, Any]
Argument: TypeAlias = int  # an index into the arguments and weights that are checked
Holding: TypeAlias = Callable[[Sequence[Leaf]], contextlib.AbstractContextManager[None]]
RANDOM = 3  # upstreams, and directions


def numbers(x: Leaf) -> Matrix:
    x = np.asarray(x)
    return x.astype(complex if np.iscomplexobj(x) else float)


def vector(arrays: Sequence[Leaf]) -> Matrix:
    return np.concatenate([np.zeros(0), *(numbers(a).ravel().view(float) for a in arrays)])


def random_numbers(shape: tuple[int, ...], *key: int) -> Matrix:
    """Return random numbers that every precision has."""
    normal = np.random.default_rng(key).standard_normal(shape)
    return normal.astype(jnp.bfloat16).astype(float)


def largest(values: ArrayLike) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def ratio(error: ArrayLike, size: float) -> float:
    e = largest(error)
    return 0.0 if e == 0 else e / size if size else float("inf")


class Space:
    """The vectors of arrays of given shapes and dtypes."""

    def __init__(self, arrays: Sequence[Leaf]) -> None:
        self.arrays = arrays
        ones = [np.full(np.shape(a), 1 - 1j if np.iscomplexobj(a) else 1.0) for a in arrays]
        # Of a complex conjugate: JAX pairs a cotangent with a tangent without one, as `ct * t`.
        self.signs = vector(ones)
        ends = np.cumsum([0, *(len(vector([one])) for one in ones)])
        self.parts = [slice(*ends) for ends in itertools.pairwise(ends)]

    def fill(self, x: Matrix) -> list[Leaf]:
        """Return the arrays of a vector; Python numbers for Python numbers."""
        arrays: list[Leaf] = []
        for part, a in zip(self.parts, self.arrays, strict=True):
            kind = complex if np.iscomplexobj(a) else float
            new = np.array(x[part]).view(kind).reshape(np.shape(a))
            is_number, dtype = isinstance(a, kind), jnp.result_type(a)
            arrays.append(type(a)(new) if is_number else jnp.asarray(new, dtype))
        return arrays

    def directions(self, i: Argument, seed: int) -> Matrix:
        """Return columns; equal for arrays of equal shape, so that a swapped pair shows."""
        part, vs = self.parts[i], np.zeros((len(self.signs), RANDOM))
        key = seed, *np.shape(self.arrays[i])
        vs[part] = random_numbers(
            (RANDOM, part.stop - part.start), seed, *np.shape(self.arrays[i])
        ).T
        return vs


class Flat:
    """A function of arrays, as a function of vectors."""

    def __init__(
        self, of_arrays: Callable[..., list[Leaf]], arrays: Sequence[Leaf], holding: Holding
    ) -> None:
        self.of_arrays, self.space, self.holding = of_arrays, Space(arrays), holding

    def __call__(self, x: Matrix) -> Matrix:
        return vector(attempt(self.of_arrays, *self.space.fill(x)))

    def rows(self, x: Matrix, us: Matrix) -> Matrix:
        """Return `us @ J` as it is declared: the gradient for each upstream."""
        xs = self.space.fill(x)
        ys, pull_back = attempt(jax.vjp, self.of_arrays, *xs)
        to = Space(ys)
        with self.holding(xs):  # the rule may read weights of the function
            rows = [vector(attempt(pull_back, to.fill(to.signs * u))) for u in us]
        return self.space.signs * np.array(rows)

    def derivative(self, seed: int) -> "Flat":
        """Return the gradient, as a function of the arrays and of the upstreams."""
        n, to = len(self.space.arrays), Space(attempt(self.of_arrays, *self.space.arrays))
        us = to.fill(random_numbers((len(to.signs),), seed) * np.isfinite(vector(to.arrays)))

        def gradient(*both: Leaf) -> list[Leaf]:
            _, pull_back = jax.vjp(self.of_arrays, *both[:n])
            with self.holding(both[:n]):
                return list(pull_back(list(both[n:])))

        return Flat(gradient, [*self.space.arrays, *us], lambda both: self.holding(both[:n]))


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


class Differences(NamedTuple):
    """`us @ J @ vs` by finite differences."""

    value: Matrix
    noise: float  # by rounding
    blur: float  # the error of the value, `noise` among it
    low: Matrix  # the least and the greatest that the derivative may be: they differ at a kink
    high: Matrix


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
        if not d.any() or not e.any():
            return "expected is zero" if d.any() else "declared is zero"
        size = np.linalg.norm(e)
        off, cosine = np.linalg.norm(d - e) / size, np.sum(d * e) / (size * np.linalg.norm(d))
        return f"differs by {off:.2g} * expected, cosine {cosine:.3f}"


class Precision(NamedTuple):
    """The relative errors that count as rounding."""

    eps: float  # of one operation
    differences: float
    autodiff: float


class Point(NamedTuple):
    """A function at one point: what its rule declares there, and the verdict on each argument."""

    f: Flat  # whose derivative is true
    x: Matrix
    us: Matrix  # upstreams, the rows
    declared: Matrix  # `us @ J` by the rule
    precision: Precision
    studies: Sequence[Study] = ()

    def true(self, i: Argument, x: Matrix, us: Matrix, vs: Matrix) -> Differences:
        """Return `us @ J @ vs` at `x`, for directions in one argument."""
        y, own, eps = self.f(x), x[self.f.space.parts[i]], self.precision.eps
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
        low = np.where(kink, np.minimum(left, right), value)
        high = np.where(kink, np.maximum(left, right), value)
        blur = noise + largest(np.nan_to_num(error, nan=np.inf))
        return Differences(value, noise, blur, low, high)

    def judged(
        self, by_autodiff: Sequence[Matrix | None], seed: int, is_near: bool, is_reference: bool
    ) -> "Point":
        """Judge the declared derivative in each argument; what autodiff says may be None.

        At a point near the given one, a rule counts as wrong only if there is no kink and no noise,
        and both judges disagree with it. A reference says what is expected.
        """
        studies, (_, small, rounding) = [], self.precision
        for i, rows in enumerate(by_autodiff):
            vs = self.f.space.directions(i, seed)
            d, by = self.declared @ vs, self.true(i, self.x, self.us, vs)
            plain = rows @ vs if rows is not None and np.isfinite(rows).all() else None
            # If differences are rounding alone, there may be no gradient; autodiff rounds less.
            size, slope = largest(d), largest(by.value)
            expects = None if plain is None else largest(plain)
            is_nothing = slope <= by.noise and (
                expects is None or by.noise >= expects or by.noise <= 0.01 * max(size, expects)
            )
            is_sharp = by.blur <= 0.01 * slope or is_nothing
            scale = max(size, slope if is_sharp else 0.01 * by.noise)
            off = np.maximum(np.maximum(by.low - d, d - by.high), 0)
            ok: bool | None = None
            if is_sharp:
                slack = small * scale + by.blur
                wrong = off > slack
                if is_near:
                    agree = True if plain is None else abs(plain - by.value) <= slack
                    wrong &= (by.low == by.high) & agree
                ok = not wrong.any()
            fits = True
            if plain is not None and expects is not None:
                fits = largest(plain - d) <= rounding * max(size, expects, 0.01 * by.noise)
                if is_nothing or not is_sharp:
                    ok = ok is not False and (is_near or fits)
            differences = ratio(off, scale) if is_sharp else None
            autodiff = None if plain is None else ratio(plain - d, scale)
            by_plain = plain is not None and (not is_sharp or (is_reference and not fits))
            ok = ok if np.isfinite(d).all() else is_near
            expected = plain if by_plain else by.value
            studies.append(Study(vs, d, expected, differences, autodiff, ok))
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
    s, space, nothing = p.studies[i], p.f.space, 0 * p.studies[i].declared
    yield "expected no gradient", s.expected, nothing
    yield f"declared no gradient, expected one{cause}", s.declared, nothing
    for j, t in enumerate(p.studies):
        both = np.stack([s.declared, t.declared]), np.stack([t.expected, s.expected])
        yield f"swapped with `{names[j]}`?", *both
        yield f"declared that of `{names[j]}`", s.declared, t.expected
    if np.iscomplexobj(space.arrays[i]):
        to = Space(p.f.of_arrays(*space.fill(p.x)))
        of_conjugate = p.declared * space.signs @ s.vs
        for us in (p.us * to.signs, p.us):
            yield "declared = conjugate of expected", p.true(i, p.x, us, s.vs).value, of_conjugate
    for j, (a, part) in enumerate(zip(space.arrays, space.parts, strict=True)):
        if np.ndim(a) == 2 and a.shape == a.shape[::-1]:
            order = np.arange(len(p.x))
            order[part] = np.swapaxes(order[part].reshape(*a.shape, -1), 0, 1).ravel()
            at_transpose = p.true(i, p.x[order], p.us, s.vs).value
            yield "declared = transpose of expected", s.expected, p.declared[:, order] @ s.vs
            yield f"missing transpose of `{names[j]}`?", at_transpose, s.declared
