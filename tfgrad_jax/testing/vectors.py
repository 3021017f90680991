"""Functions of arrays as functions R^n -> R^m, so that what is compared are products of matrices.

`Flat` is such a function; a complex number is a pair. `nearby` makes the points near the given one.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Matrix: TypeAlias = np.ndarray[Any, Any]
OfArrays: TypeAlias = Callable[..., list[Any]]  # a function of arrays that returns arrays


def numbers(x: Any) -> Matrix:
    x = np.asarray(x)
    return x.astype(complex if np.iscomplexobj(x) else float)


def vector(arrays: Sequence[Any]) -> Matrix:
    return np.concatenate([np.zeros(0), *(numbers(a).ravel().view(float) for a in arrays)])


def random(rows: int, columns: int, *key: int) -> Matrix:
    """Return random numbers that every precision has."""
    normal = np.random.default_rng(key).standard_normal((rows, columns))
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
        """Return the arrays of a vector; Python numbers for Python numbers."""

        def one(part: slice, a: Any) -> Any:
            kind = complex if np.iscomplexobj(a) else float
            new = np.array(x[part]).view(kind).reshape(np.shape(a))
            return type(a)(new) if isinstance(a, kind) else jnp.asarray(new, jnp.result_type(a))

        return list(map(one, self.parts, self.arrays))


class Flat:
    """A function of arrays, as a function of vectors."""

    def __init__(self, of_arrays: OfArrays, arrays: Sequence[Any]) -> None:
        self.of_arrays, self.space = of_arrays, Space(arrays)

    def __call__(self, x: Matrix) -> Matrix:
        return vector(self.of_arrays(*self.space.fill(x)))

    def rows(self, x: Matrix, us: Matrix) -> Matrix:
        """Return `us @ J` as it is declared: the gradient for each upstream."""
        ys, pull_back = jax.vjp(self.of_arrays, *self.space.fill(x))
        to = Space(ys)
        rows = [vector(pull_back(to.fill(to.signs * u))) for u in us]
        return self.space.signs * np.array(rows).reshape(len(us), len(x))

    def derivative(self, seed: int) -> "Flat":
        """Return the gradient for one upstream, as a function."""

        def gradient(*xs: Any) -> list[Any]:
            ys, pull_back = jax.vjp(self.of_arrays, *xs)
            to = Space(ys)
            return list(pull_back(to.fill(random(1, len(to.signs), seed)[0])))

        return Flat(gradient, self.space.arrays)


def _symmetric(a: Matrix) -> Any:
    # Ones and the identity are symmetric by accident.
    square = a.ndim > 1 and a.shape[-1] == a.shape[-2] and len(np.unique(a)) > 2
    return (a + np.conj(np.swapaxes(a, -1, -2))) / 2 if square else np.nan


def _orthogonal(a: Matrix) -> Any:
    if a.ndim < 2 or a.size > 100_000 or not np.isfinite(a).all():
        return np.nan
    u, _, v = np.linalg.svd(a, full_matrices=False)
    return u @ v


_KEPT: list[Callable[[Matrix], Any]] = [  # what a rule may rely on
    np.sort,
    _symmetric,
    lambda a: abs(a) / np.sum(a, axis=-1, keepdims=True),  # probabilities
    lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True),
    _orthogonal,
]


def nearby(x: Any, radius: float, *seed: int) -> Matrix:
    """Return an array near `x`, of distinct entries; zeros and signs stay."""
    a = numbers(x)
    change = radius * np.random.default_rng([*seed, *a.shape]).uniform(-1, 1, a.shape)
    moved = a * np.exp(change) if a.any() else change
    for keep in _KEPT if a.size > 1 and a.shape[-1] > 1 else ():
        if np.allclose(keep(a), a, rtol=1e-3):
            moved = keep(moved)
    return moved
