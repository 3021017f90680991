"""Judge a derivative at one point, and name the mistake where it is wrong.

For random upstreams `us` and directions `vs`, a `Point` compares `us @ J @ vs` as the rule declares
it with what finite differences and plain autodiff say, argument by argument. `mistake` says what is
wrong at all points.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._jax.types import Leaf, Values
from ._problem import Function, UserCodeError

Matrix: TypeAlias = np.ndarray[Any, Any]
Argument: TypeAlias = int  # an index into the arguments and weights that are checked
Gradients: TypeAlias = Sequence[Values]  # for each upstream
# The relative error of one operation, and that allowed in a derivative.
Precision: TypeAlias = tuple[float, float]
_RANDOM = 3  # upstreams, and directions
# Of what a function may round to inside.
_COARSE = [float(jnp.finfo(dtype).eps) for dtype in ("float32", "bfloat16")]
_EQUAL = 1e-3  # the relative error below which a guess at a mistake fits


def vector(arrays: Values) -> Matrix:
    """Return the entries of arrays in double precision."""
    kinds = [complex if np.iscomplexobj(a) else float for a in arrays]
    parts = [np.asarray(a, kind).ravel() for a, kind in zip(arrays, kinds, strict=True)]
    return np.concatenate([np.zeros(0), *parts])


def filled(like: Leaf, numbers: Matrix) -> Leaf:
    """Return an array with other numbers; a Python number for a Python number."""
    new = numbers.reshape(np.shape(like))
    if isinstance(like, float | complex):
        return type(like)(new)
    return jnp.asarray(new, jnp.result_type(like))


def upstreams(ys: Values, seed: int) -> list[list[Leaf]]:
    """Return random factors for the outputs, zeros where these are not finite."""
    return [
        [filled(y, np.isfinite(vector([y])) * _random(y, seed, 0, k, n)) for k, y in enumerate(ys)]
        for n in range(_RANDOM)
    ]


def _random(like: Leaf, *key: int) -> Matrix:
    normal = np.random.default_rng(key).standard_normal((2, np.size(like)))
    real, imaginary = normal.astype(jnp.bfloat16).astype(float)  # every precision has these
    return real + 1j * imaginary if np.iscomplexobj(like) else real


def _largest(*values: Matrix) -> float:
    return max(float(np.max(np.abs(v), initial=0.0)) for v in values)


def _apart(a: Matrix, b: Matrix) -> float:
    """Return how far apart two arrays are, relative to the larger one."""
    size = _largest(a, b)
    return _largest(a - b) / size if size else 0.0


class Study(NamedTuple):
    """The verdict on the declared derivative in one argument."""

    declared: Matrix  # `us @ J @ vs`
    expected: Matrix
    differences: float | None  # relative error against finite differences; None: too noisy
    autodiff: float | None  # against plain autodiff; None: it has no derivative
    ok: bool | None  # None: no judge could tell
    is_kink: bool  # the function has several derivatives there
    error: float  # absolute, where no difference is sharp; else infinite


class Point:
    """What a rule declares at one point, and the verdict on each argument.

    The true derivative is that of `value` by differences, if these are sharp; else that of `plain`,
    the undecorated function, by autodiff. Either may be None.
    """

    def __init__(
        self,
        h: Function,
        value: Function | None,
        plain: Function | None,
        xs: Values,
        precision: Precision,
        seed: int,
    ) -> None:
        self.h, self.xs, self._value = h, xs, value
        self._eps, self._tolerance = precision
        # Not of `h`, whose value a `primal` may compute.
        self.us, y = upstreams(ys := (value or h)(*xs), seed), vector(ys)
        self._y = y[finite := np.isfinite(y)]
        self._us, self._finite = np.array([vector(u) for u in self.us])[:, finite], finite
        self.gradients, by_autodiff = h.gradients(xs, self.us), None
        if plain is not None:
            with contextlib.suppress(UserCodeError):  # it has no derivative
                by_autodiff = plain.gradients(xs, self.us)
        # Equal for arrays of equal shape, so that a swapped pair shows.
        self._vs = [np.transpose([_random(x, seed, 1, n) for n in range(_RANDOM)]) for x in xs]
        self.studies = [self._study(i, by_autodiff) for i in range(len(xs))]

    def along(self, i: Argument, gradients: Gradients) -> Matrix:
        """Return `us @ J @ vs` in one argument."""
        rows = np.array([vector([of_all[i]]) for of_all in gradients])
        return (rows @ self._vs[i]).real  # JAX pairs a cotangent and a tangent so

    def _study(self, i: Argument, by_autodiff: Gradients | None) -> Study:
        d, x = self.along(i, self.gradients), vector([self.xs[i]])
        plain = None if by_autodiff is None else self.along(i, by_autodiff)
        if plain is not None and not np.isfinite(plain).all():
            plain = None
        low = high = d if plain is None else plain
        scale = np.mean(abs(x)) if x.any() else 1.0  # no squares, which may underflow
        size = _largest(abs(self._us) @ abs(self._y)) / scale
        # Two formulas for zero: their terms cancel up to rounding, and may be larger than `y`.
        least = 1024 * np.finfo(float if self._eps < 1e-15 else "float32").tiny  # may become zero
        error, is_sharp, is_kink = min(2 * self._eps, _EQUAL) * size + least, False, False
        precisions = [self._eps, *(e for e in _COARSE if e > self._eps)]
        tolerance, coarse = self._tolerance, 0.0  # allowed if the function rounds inside
        # A kernel, say, may round to float32, or bfloat16, what it gets in double precision. A step
        # that it rounds away says nothing: a cast of `x`, and right rules, had the derivative 0.
        # Such a function and its rule agree to that precision, and no further.
        for eps in precisions:
            if self._value is None or (eps > _COARSE[0] and not coarse):
                break
            step = eps**0.4 * scale
            left, right, change = self._slopes(i, self._value, step)
            noise, slope = 8 * eps * size * scale / step, _largest(left, right)
            # A slope of rounding alone is none, unless a small derivative hides in the rounding.
            # Nor if one of the steps has crossed a jump.
            is_flat = max(slope, change) <= noise and not 0 < 0.01 * _largest(d, low) < noise
            if is_flat and eps < precisions[-1] and _largest(d, low) > noise:
                coarse = 0.01 if eps < _COARSE[0] else 0.1
                continue
            if is_sharp := is_flat or noise + change <= 0.01 * slope:
                left, right = (0 * left, 0 * right) if is_flat else (left, right)
                low, high = np.minimum(left, right), np.maximum(left, right)
                error = noise + change + least
                is_kink = _largest(left - right) > 4 * error
                tolerance = max(tolerance, eps**0.5) if coarse else tolerance
                break
        if not is_sharp:
            tolerance = max(tolerance, coarse)
        expected = np.clip(d, low, high)
        ok = bool((abs(d - expected) <= tolerance * _largest(d, low, high) + error).all())
        off, is_judged = _apart(d, expected), is_sharp or plain is not None
        if is_kink:  # several slopes are right there, and one of them is that of JAX
            is_judged = plain is not None and _apart(d, plain) <= self._tolerance
            ok, is_sharp = is_judged, False
        # To name a mistake, the more precise of two judges that agree.
        is_same = plain is not None and ((low - error <= plain) & (plain <= high + error)).all()
        return Study(
            d,
            plain if is_same else expected,
            differences=off if is_sharp else None,
            autodiff=None if plain is None else _apart(d, plain),
            ok=ok if is_judged else None,
            is_kink=is_kink,
            error=np.inf if is_sharp else _largest(d - expected),
        )

    def _slopes(self, i: Argument, value: Function, step: float) -> tuple[Matrix, Matrix, float]:
        """Return `us @ J @ vs` in one argument, from the left and from the right, and their error.

        They differ at a kink, such as that of `relu` at 0; elsewhere they are equal, but for the
        error: how much they change with the step.
        """
        x = self.xs[i]

        def slope(t: float) -> Matrix:
            moved = [filled(x, vector([x]) + t * v) for v in self._vs[i].T]
            every = [value(*self.xs[:i], new, *self.xs[i + 1 :]) for new in moved]
            changes = [vector(ys)[self._finite] - self._y for ys in every]
            return (self._us @ np.transpose(changes)).real / t

        far, (left, right) = ([slope(-t), slope(t)] for t in (step, step / 2))
        change = np.nan_to_num(np.subtract(far, (left, right)), nan=np.inf)
        return left, right, _largest(change)


def distance(d: Matrix, e: Matrix) -> str:
    if not (d.any() and e.any()):
        return "expected is zero" if d.any() else "declared is zero"
    size = np.linalg.norm(e)
    off, cosine = np.linalg.norm(d - e) / size, np.sum(d * e) / (size * np.linalg.norm(d))
    return f"relative error {off:.2g}, cosine {cosine:.3f}"


def mistake(i: Argument, names: Sequence[str], points: Sequence[Point]) -> str:
    """Name the mistake that explains a wrong derivative at all points, or say how far off it is."""
    d = np.concatenate([p.studies[i].declared for p in points])
    e = np.concatenate([p.studies[i].expected for p in points])
    # So small an error fits every guess.
    if d.any() and e.any() and _apart(d, e) >= _EQUAL:
        every = (_guesses(i, names, p) for p in points)
        with contextlib.suppress(UserCodeError):  # a transpose may be outside of the domain
            for guesses in zip(*every, strict=True):
                if all(_apart(a, b) < _EQUAL for _, a, b in guesses):
                    return guesses[0][0]
        factor = np.sum(d * e) / np.sum(e * e)
        if _apart(d, factor * e) < _EQUAL and (shown := f"{factor:.3g}") != "1":
            return f"{'wrong sign: ' * (shown == '-1')}declared = {shown} * expected"
    return distance(d, e)


def _guesses(i: Argument, names: Sequence[str], p: Point) -> Iterator[tuple[str, Matrix, Matrix]]:
    """Yield mistakes, each with two arrays that are equal if it was made."""
    s = p.studies[i]
    for k, (name, t, x) in enumerate(zip(names, p.studies, p.xs, strict=True)):
        both = np.stack([s.declared, t.declared]), np.stack([t.expected, s.expected])
        yield f"swapped with `{name}`?", *both
        if np.ndim(x) == 2 and len({*np.shape(x)}) == 1:
            turned = [_turned(of_all, k) for of_all in p.gradients]
            yield "declared = transpose of expected", p.along(i, turned), s.expected
            at_transpose = p.h.gradients(_turned(p.xs, k), p.us)
            yield f"missing transpose of `{name}`?", p.along(i, at_transpose), s.expected
    if np.iscomplexobj(p.xs[i]):
        conjugates = p.h.gradients(p.xs, [[*map(jnp.conj, u)] for u in p.us])
        ours = p.along(i, [[*map(jnp.conj, of_all)] for of_all in conjugates])
        yield "declared = conjugate of expected", ours, s.expected


def _turned(arrays: Values, k: Argument) -> Values:
    return [np.transpose(a) if i == k else a for i, a in enumerate(arrays)]
