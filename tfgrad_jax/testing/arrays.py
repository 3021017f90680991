"""Arrays of numbers: random ones, ones near a given one, and how far apart two are.

All other modules here use these. `nearby` keeps what holds of an array, since a rule may rely on
it: zeros, signs, order, symmetry, rows that are probabilities, unit vectors or orthogonal.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax._frontend.structure import spec


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


def _symmetric(a: np.ndarray) -> Any:
    # Ones and the identity are symmetric by accident.
    square = a.ndim > 1 and a.shape[-1] == a.shape[-2] and len(np.unique(a)) > 2
    return (a + np.conj(np.swapaxes(a, -1, -2))) / 2 if square else np.nan


def _orthogonal(a: np.ndarray) -> Any:
    short = -1 if a.ndim < 2 or a.shape[-2] <= a.shape[-1] else -2
    if a.ndim < 2 or not np.allclose(np.linalg.norm(a, axis=short), 1, rtol=1e-3):
        return np.nan
    u, _, v = np.linalg.svd(a, full_matrices=False)
    return u @ v


_KEPT: list[Callable[[np.ndarray], Any]] = [
    np.sort,
    _symmetric,
    lambda a: abs(a) / np.sum(a, axis=-1, keepdims=True),
    lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True),
    _orthogonal,
]


def nearby(x: Any, seed: Sequence[int], radius: float) -> Any:
    """Return an array or number near `x`, of distinct entries."""
    a = numbers(x)
    change = radius * np.random.default_rng([*seed, *a.shape]).uniform(-1, 1, a.shape)
    moved = a * np.exp(change) if a.any() else change
    for keep in _KEPT if a.size > 1 and a.shape[-1] > 1 else ():
        if np.allclose(keep(a), a, rtol=1e-3):
            moved = keep(moved)
    return type(x)(moved) if isinstance(x, float | complex) else jnp.asarray(moved, spec(x).dtype)


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
