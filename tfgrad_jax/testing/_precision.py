"""How precisely the judges work.

Where possible they work in double precision, so they are sharp for float32 functions too.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax._jax.compat import laid_out_as
from tfgrad_jax._jax.types import Leaf
from tfgrad_jax._tools.call import UserCodeError, attempt

from ._judges import distance, numbers, vector
from ._problem import Problem

# Relative errors that count as rounding, by dtype; from jax.test_util.
_TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 2e-3, "complex64": 2e-3}
_DOUBLE_TOLERANCE = 1e-5
_STEPS = 0, 1e-12, 1e-3  # relative, to see whether a function rounds


def rounding_of(arrays: Iterable[Leaf]) -> float:
    """Return the relative error that counts as rounding, for the least precise of arrays."""
    dtypes = [str(jnp.result_type(v)) for v in arrays]
    return max(_TOLERANCE.get(d, _DOUBLE_TOLERANCE) for d in dtypes)


class Setting(NamedTuple):
    """Where and how precisely the judges work."""

    point: Sequence[Leaf]
    precision: Callable[[], AbstractContextManager[None]]
    tolerance: float


def setting_of(of: Problem, ys: Sequence[jax.Array], tolerance: float) -> Setting:
    """Work in double precision, if the function neither differs nor rounds there."""
    with contextlib.suppress(UserCodeError), _double_precision():
        # A function that casts to float32 itself has the same value at a point and very near it,
        # and another one farther away. To move all numbers by one factor would not show that: what
        # cancels at the point, as in a normalization, would cancel there, too.
        doubles = [numbers(jnp.asarray(x)) for x in of.xs]
        ways = [np.random.default_rng(0).uniform(0.5, 1, x.shape) for x in doubles]
        moved = [[x * (1 + by * w) for x, w in zip(doubles, ways, strict=True)] for by in _STEPS]
        points = [[*map(laid_out_as, map(jnp.asarray, xs), of.xs)] for xs in moved]
        values = [attempt(of.value, *xs) for xs in points]
        here, near, far = map(vector, values)
        same = attempt(distance, here, vector(ys)) <= tolerance
        same &= not ((here == near) & (here != far)).any()
        if same and {y.dtype.name for y in values[0]} <= {"float64", "complex128"}:
            return Setting(points[0], _double_precision, _DOUBLE_TOLERANCE)
    return Setting(of.xs, contextlib.nullcontext, tolerance)


@contextlib.contextmanager
def _double_precision() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield
