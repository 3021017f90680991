"""No right rule is blamed, at any random point: a core and a sample, and nightly all of them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import sample
from right_rules import RULES

from tfgrad_jax.testing import check_gradient

SEEDS = range(1, 10_000)
CORE = [
    *("softmax", "huber_with_kinks_nearby", "log_determinant_of_symmetric", "safe_square_root"),
    *("complex_modulus", "matmul_in_bfloat16", "cross_entropy_with_probabilities", "embedding"),
    *("units_far_apart", "rotated_back", "layer_of_pytree", "unused_argument"),
]


class Draw:
    """Random arrays of one precision."""

    def __init__(self, seed, dtype):
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def __call__(self, *shape, scale=1.0):
        return jnp.asarray(scale * self.rng.standard_normal(shape), self.dtype)

    def complex(self, *shape):
        return jax.lax.complex(self(*shape), self(*shape))


def assert_right(name, seed, dtype="float32", **options):
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        h, args, *kwargs = RULES[name](Draw(seed, dtype))
        report = check_gradient(h, *args, kwargs=dict(*kwargs), seed=seed, **options)
    assert report.ok, (seed, report)
    return report


# In float32 the judges are in float64 as well, so that one precision shows nearly everything.
@pytest.mark.parametrize("name", [*CORE, *sample(sorted({*RULES} - {*CORE}), 6)])
def test_no_right_rule_is_blamed(name):
    assert len(assert_right(name, 0, near=1, transforms=False).points) == 2


@pytest.mark.parametrize("name", ["layer_of_pytree", "complex_square"])
def test_no_right_rule_is_blamed_with_every_check(name):
    assert_right(name, *sample(SEEDS, 1), order=2)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RULES)
def test_no_right_rule_is_blamed_at_any_point(name, dtype):
    assert len(assert_right(name, 0, dtype).points) == 3
    for seed in sample(SEEDS, 3):
        assert_right(name, seed, dtype, transforms=False)
