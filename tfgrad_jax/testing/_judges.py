"""Judge one argument of a function at one point, and name the mistake where it is wrong.

`Flat` turns a function of arrays into one of vectors; a complex number becomes a pair. For
upstreams, the rows of `us`, and directions, the columns of `vs`, `study` compares `us @ J @ vs` as
the rule declares it with what finite differences and plain autodiff say. `mistake` names
the first guess that explains a failed row at all points where it is wrong; `nearby` makes these
points.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from tfgrad_jax._jax.compat import laid_out_as, summed_parts
from tfgrad_jax._jax.types import Leaf
from tfgrad_jax._tools.call import UserCodeError, attempt

Matrix: TypeAlias = np.ndarray[Any, Any]
ArgumentIndex: TypeAlias = int  # into the arguments and weights that are checked
_POWERS = 0, 1, -1, 2, -2, 3, -3, 0.5, -0.5  # of an argument, by which its gradient may be wrong


def numbers(x: Leaf) -> Matrix:
    x = np.asarray(summed_parts(x))
    return x.astype(complex if np.iscomplexobj(x) else float)


def vector(arrays: Sequence[Leaf]) -> Matrix:
    return np.concatenate([np.zeros(0), *(numbers(a).ravel().view(float) for a in arrays)])


def random(shape: int | tuple[int, ...], *key: int) -> Matrix:
    """Return random numbers that every precision has."""
    normal = np.random.default_rng(key).standard_normal(shape)
    return normal.astype(jnp.bfloat16).astype(float)


def ratio(errors: ArrayLike, sizes: ArrayLike) -> float:
    """Return the largest error relative to the largest size."""
    error, size = (float(np.max(np.abs(v), initial=0.0)) for v in (errors, sizes))
    return 0.0 if error == 0 else error / size if size else float("inf")


def distance(a: Leaf, b: Leaf) -> float:
    """Return the largest difference relative to 1 or the largest number."""
    if np.shape(a) != np.shape(b) or jnp.result_type(a) != jnp.result_type(b):
        raise TypeError("has another shape or dtype than the value")
    a, b = numbers(a), numbers(b)
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, abs(a - b))
    size = np.max(abs(b), initial=1.0, where=np.isfinite(b))
    return ratio(np.nan_to_num(error, nan=np.inf), size)


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
        """Return the arrays of a vector; Python numbers for Python numbers.

        Over an explicit mesh, where they are is a part of their type: a rule gets no others.
        """
        arrays: list[Leaf] = []
        for part, a in zip(self.parts, self.arrays, strict=True):
            kind = complex if np.iscomplexobj(a) else float
            new = np.array(x[part]).view(kind).reshape(np.shape(a))
            is_number, dtype = isinstance(a, kind), jnp.result_type(a)
            array = type(a)(new) if is_number else laid_out_as(jnp.asarray(new, dtype), a)
            arrays.append(array)
        return arrays


class Flat:
    """A function of arrays, as a function of vectors."""

    def __init__(self, of_arrays: Callable[..., list[Leaf]], arrays: Sequence[Leaf]) -> None:
        self.of_arrays, self.space = of_arrays, Space(arrays)

    def __call__(self, x: Matrix) -> Matrix:
        return vector(attempt(self.of_arrays, *self.space.fill(x)))

    def rows(self, x: Matrix, us: Matrix) -> Matrix:
        """Return `us @ J` as it is declared: the gradient for each upstream."""
        ys, pull_back = attempt(jax.vjp, self.of_arrays, *self.space.fill(x))
        to = Space(ys)
        rows = [vector(attempt(pull_back, to.fill(to.signs * u))) for u in us]
        return self.space.signs * np.array(rows)

    def derivative(self, seed: int, in_upstreams: bool) -> "Flat":
        """Return the gradient, as a function of the arrays, and of the upstreams or for these."""
        n, to = len(self.space.arrays), Space(attempt(self.of_arrays, *self.space.arrays))
        us = to.fill(random(len(to.signs), seed) * np.isfinite(vector(to.arrays)))

        def gradient(*both: Leaf) -> list[Leaf]:
            return list(jax.vjp(self.of_arrays, *both[:n])[1](list(both[n:] or us)))

        return Flat(gradient, [*self.space.arrays, *(us if in_upstreams else ())])


def _forms(a: Matrix) -> Iterator[Matrix]:
    """Yield the array with each property that a rule may rely on: equal to it where it has that."""
    yield np.sort(a)
    # Ones are symmetric by accident.
    square = a.ndim > 1 and a.shape[-1] == a.shape[-2] and len(np.unique(a)) > 1
    yield (a + np.conj(np.swapaxes(a, -1, -2))) / 2 if square else np.full_like(a, np.nan)
    yield abs(a) / np.sum(a, axis=-1, keepdims=True)  # probabilities
    yield a / np.linalg.norm(a, axis=-1, keepdims=True)
    if a.ndim > 1 and a.size <= 100_000 and np.isfinite(a).all():  # orthogonal
        u, _, v = np.linalg.svd(a, full_matrices=False)
        yield u @ v


def nearby(x: Leaf, radius: float, *seed: int) -> Matrix:
    """Return an array near `x`, of distinct entries; zeros and signs stay."""
    a = numbers(x)
    change = radius * np.random.default_rng([*seed, *a.shape]).uniform(-1, 1, a.shape)
    near = a * np.exp(change) if a.any() else change
    for i, form in enumerate(_forms(a) if a.size > 1 and a.shape[-1] > 1 else ()):
        if np.allclose(form, a, rtol=1e-3):
            near = next(itertools.islice(_forms(near), i, None))
    return near


class Place(NamedTuple):
    """A function at one point: what its rule declares there, and what plain autodiff says."""

    f: Flat
    x: Matrix
    us: Matrix  # upstreams, the rows
    declared: Matrix  # `us @ J` by the rule
    by_autodiff: Matrix | None  # `us @ J` by plain autodiff; None: it has no derivative
    small: float  # the relative error that counts as rounding
    is_near: bool  # whether it is a point near the given one

    def true(self, i: ArgumentIndex, x: Matrix, us: Matrix, vs: Matrix) -> "Differences":
        """Return `us @ J @ vs` at `x`, for directions in one argument."""
        return _differences(self.f, self.f.space.parts[i], i, x, us, vs)


class Differences(NamedTuple):
    """`us @ J @ vs` by finite differences."""

    value: Matrix
    blur: Matrix  # the error of the value
    low: Matrix  # the least and the greatest that the derivative may be: they differ at a kink
    high: Matrix
    noise: Matrix  # the part of `blur` that is rounding


class Study(NamedTuple):
    """The verdict on the declared derivative in one argument."""

    place: Place
    i: ArgumentIndex
    vs: Matrix  # directions, the columns
    declared: Matrix  # `us @ J @ vs`
    expected: Matrix
    differences: float | None  # relative error against finite differences; None: too noisy
    autodiff: float | None  # against plain autodiff; None: it has no derivative
    ok: bool

    def divided_by(self, power: float) -> Matrix:
        """Return what is declared, divided by a power of the argument."""
        part = self.place.f.space.parts[self.i]
        return self.place.declared[:, part] * self.place.x[part] ** -power @ self.vs[part]

    @property
    def fits_autodiff(self) -> bool:
        """Whether plain autodiff agrees."""
        return self.autodiff is not None and self.autodiff <= self.place.small

    def difference(self) -> str:
        d, e = self.declared, self.expected
        sizes = np.linalg.norm(d) * np.linalg.norm(e)
        if not sizes:
            return "expected is zero" if d.any() else "declared is zero"
        distance = np.linalg.norm(d - e) / np.linalg.norm(e)
        return f"differs by {distance:.2g} x expected, cosine {np.sum(d * e) / sizes:.3f}"


def study(place: Place, i: ArgumentIndex, vs: Matrix, trust_autodiff: bool) -> Study:
    """Judge the declared derivative in one argument.

    At a nearby point, a rule counts as wrong only if there is no kink and no noise, and both judges
    disagree with it.
    """
    x, us, rows, small = place.x, place.us, place.declared, place.small
    part, d = place.f.space.parts[i], rows @ vs
    size = np.vstack([np.linalg.norm(row) for row in rows[:, part]])
    value, blur, low, high, noise = place.true(i, x, us, vs)
    sharp = blur <= 0.01 * np.maximum(size, abs(value))
    scale = np.maximum(np.maximum(size, abs(d)), np.where(sharp, abs(value), 0))
    slack, off = small * scale + blur, np.maximum(np.maximum(low - d, d - high), 0)
    # Differences that are nothing but rounding say that there is no gradient.
    nothing = (np.maximum(scale, abs(value)) <= noise).all()
    differences = ratio(off[sharp], scale) if sharp.any() else 0.0 if nothing else None
    autodiff, expected = None, value
    wrong = sharp & (off > slack) & ((low == high) | (not place.is_near))
    plain = place.by_autodiff @ vs if trust_autodiff and place.by_autodiff is not None else None
    if plain is not None and np.isfinite(plain).all():
        # Of two that are zero but for rounding none is wrong. Autodiff rounds far less.
        apart = abs(plain - d) * (sharp | (abs(plain - d) > 0.01 * noise))
        autodiff, expected = ratio(apart, scale), np.where(sharp, value, plain)
        if place.is_near:
            wrong &= abs(plain - value) <= slack
        else:
            wrong |= ~sharp & (apart > small * np.maximum(scale, abs(plain)))
    ok = not wrong.any() if np.isfinite(d).all() else place.is_near
    return Study(place, i, vs, d, expected, differences, autodiff, bool(ok))


def _differences(
    f: Flat, part: slice, i: ArgumentIndex, x: Matrix, us: Matrix, vs: Matrix
) -> Differences:
    y, own = f(x), x[part]
    eps = float(jnp.finfo(jnp.result_type(f.space.arrays[i])).eps)
    finite = np.isfinite(y)
    y, us = y[finite], us[:, finite]
    size = np.vstack(list(abs(us) @ abs(y)))
    typical = np.linalg.norm(own) / own.size**0.5 if own.any() else 1.0

    def change(t: float) -> Matrix:
        return us @ np.transpose([f(x + t * v)[finite] - y for v in vs.T])

    # Central differences with the steps t and t / 2 give a value of higher order, and how far apart
    # they are is its error. The one-sided differences of a smooth function come closer as the step
    # shrinks: half as far apart at half the step. At a kink, such as that of `relu` at 0, they do
    # not, and every number between the two is a derivative. 0.7 tells the two cases apart.
    def with_step(t: float) -> Differences:
        a, b, c, d = (change(s) for s in (t, -t, t / 2, -t / 2))
        noise = np.broadcast_to(8 * eps * size / t, a.shape)
        blur = np.nan_to_num(abs((a - b) / (2 * t) - (c - d) / t) + noise, nan=np.inf)
        value = (4 * (c - d) / t - (a - b) / (2 * t)) / 3
        right, left, jump = 2 * c / t, -2 * d / t, abs(a + b) / t
        kink = (abs(right - left) > 0.7 * jump) & (abs(right - left) > noise)
        low = np.where(kink, np.minimum(left, right), value)
        high = np.where(kink, np.maximum(left, right), value)
        return Differences(value, blur, low, high, noise)

    long = with_step(eps**0.25 * typical)
    if not (long.blur > 1e-6 * abs(long.value)).any():
        return long
    short = with_step(eps**0.4 * typical)
    both = zip(short, long, strict=True)
    best = Differences(*(np.where(short.blur < long.blur, s, t) for s, t in both))
    # Steps longer than the period of the function say nothing, and some agree by accident. The sign
    # of such steps is that the shorter one has the larger error. That of a step function is larger,
    # too, but there it is rounding.
    is_periodic = (long.blur > 0.3 * abs(long.value)) & (short.blur > long.blur)
    is_periodic &= short.blur > 10 * short.noise
    is_periodic |= abs(short.value - long.value) > short.blur + long.blur
    blur = np.full_like(best.blur, np.inf) if is_periodic.any() else best.blur
    return best._replace(blur=blur)


def mistake(
    i: ArgumentIndex, names: Sequence[str], points: Sequence[Sequence[Study]], cause: str
) -> str:
    """Name the mistake that explains a wrong derivative at all points, or say how far off it is."""
    e = np.concatenate([np.ravel(p[i].expected) for p in points])

    def declared(power: float) -> Matrix:
        return np.concatenate([np.ravel(p[i].divided_by(power)) for p in points])

    # So small an error fits every guess.
    if ratio(declared(0) - e, declared(0)) >= 1e-3:
        every = (_guesses(i, names, studies, cause) for studies in points)
        with contextlib.suppress(UserCodeError):  # a transpose may be outside of the domain
            for guesses in zip(*every, strict=True):
                if all(ratio(one - other, one) < 1e-3 for _, one, other in guesses):
                    return guesses[0][0]
        for power in _POWERS:
            d = declared(power)
            factor = np.sum(d * e) / np.sum(e * e)
            if ratio(d - factor * e, d) < 1e-3:
                sign = "wrong sign: " if abs(factor + 1) < 1e-3 else ""
                by = f" x `{names[i]}`**{power}" if power else ""
                return f"{sign}declared = {factor:.4g} x expected{by}"
    return points[0][i].difference()


def _guesses(
    i: ArgumentIndex, names: Sequence[str], studies: Sequence[Study], cause: str
) -> Iterator[tuple[str, Matrix, Matrix]]:
    """Yield mistakes, each with two arrays that are equal if it was made."""
    s = studies[i]
    (f, x, us, rows, *_), vs, nothing = s.place, s.vs, 0 * s.declared
    space, true = f.space, functools.partial(s.place.true, i)
    yield "expected no gradient", s.expected, nothing
    yield f"declared no gradient, expected one{cause}", s.declared, nothing
    for j, t in enumerate(studies):
        both = np.stack([s.declared, t.declared]), np.stack([t.expected, s.expected])
        yield f"swapped with `{names[j]}`?", *both
        yield f"declared that of `{names[j]}`", s.declared, t.expected
    if np.iscomplexobj(space.arrays[i]):
        to = Space(f.of_arrays(*space.fill(x)))
        of_conjugate = rows * space.signs @ vs
        for of in (us * to.signs, us):
            yield "declared = conjugate of expected", true(x, of, vs).value, of_conjugate
    for j, (a, part) in enumerate(zip(space.arrays, space.parts, strict=True)):
        if np.ndim(a) == 2 and a.shape == a.shape[::-1]:
            order = np.arange(len(x))
            order[part] = np.swapaxes(order[part].reshape(*a.shape, -1), 0, 1).ravel()
            yield "declared = transpose of expected", s.expected, rows[:, order] @ vs
            yield f"missing transpose of `{names[j]}`?", true(x[order], us, vs).value, s.declared
