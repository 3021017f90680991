"""The loop of `howto/implicit.md` ends for every contracting map, whatever rounding does to it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import eager_and_jit

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "implicit.md"
COUNT, SIZE = 400, 8


def contracting_maps(dtype):
    """Return linear maps `a @ z + b` at random, with spectral radii of up to 0.99."""
    random = np.random.default_rng(0)
    a = random.standard_normal((COUNT, SIZE, SIZE))
    radius = np.max(np.abs(np.linalg.eigvals(a)), axis=-1)
    a *= (random.choice([0.5, 0.9, 0.97, 0.99], COUNT) / radius)[:, None, None]
    return jnp.asarray(a, dtype), jnp.asarray(random.standard_normal((COUNT, SIZE)), dtype)


@eager_and_jit
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_ends_with_the_solution_and_its_gradient(dtype, mode):
    page = {}
    exec(re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S).group(1), page)

    def solve(a, b):
        return page["fixed_point"](lambda a_b, z: a_b[0] @ z + a_b[1], (a, b), jnp.zeros_like(b))

    def solution_and_gradient(a, b):
        z, pull_back = jax.vjp(solve, a, b)
        return z, pull_back(jnp.ones_like(z))[1]

    a, b = contracting_maps(dtype)
    with jax.numpy_dtype_promotion("standard"):  # the page is written as everyone writes
        z, db = mode(jax.vmap(solution_and_gradient))(a, b)

    inverse = np.linalg.inv(np.eye(SIZE) - np.asarray(a, np.float64))
    expected = inverse @ np.asarray(b, np.float64)[..., None], inverse.sum(-2)[..., None]
    # An error of some rounding in the last step, and what the map makes of it.
    tolerance = 30 * float(jnp.finfo(dtype).eps) * np.linalg.norm(inverse, np.inf, axis=(1, 2))
    for found, exact in zip((z, db), expected, strict=True):
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - exact[..., 0]).max(-1)
        assert np.all(error <= tolerance * np.abs(exact).max((1, 2)))
