"""Which judge decides where they disagree; no right rule is blamed, at any random point."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import X, declare, full_square, half_square, note, quick
from right_rules import RULES
from support.helpers import sample

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import check_gradient


def test_where_plain_autodiff_fails(x64):
    h = declare(lambda x: jnp.log(1 + jnp.exp(x)), lambda x, dy: dy * jax.nn.sigmoid(x))
    assert quick(h, jnp.float64(50.0)).ok
    root = declare(lambda x: jnp.sqrt(x * x), lambda x, dy: dy * jnp.sign(x))
    (row,) = quick(root, jnp.zeros(3)).rows  # plain autodiff gives nan at the kink
    assert row.ok and row.autodiff is None and row.differences == 0


def test_where_plain_autodiff_stops():
    h = declare(lambda x: jax.lax.stop_gradient(x) * x, lambda x, dy: dy * 2 * x)
    (row,) = quick(h, X).rows
    assert row.ok and row.autodiff == pytest.approx(0.5) and row.note == "plain autodiff differs"
    assert note(declare(lambda x: jax.lax.stop_gradient(x) * x, lambda x, dy: dy * x), X)


@pytest.mark.parametrize(
    "f", [lambda x: 0 * x, lambda x: jnp.sum(jax.nn.softmax(x))], ids=["zero", "softmax"]
)
def test_a_gradient_that_is_zero_but_for_rounding(f):
    (row,) = quick(declare(f, lambda x, dy: (None,)), X).rows
    assert (row.ok, row.differences, row.autodiff, row.note) == (True, 0.0, 0.0, "")
    assert not quick(declare(f, lambda x, dy: 1e-6 * x * jnp.sum(dy)), X).ok


def test_a_value_that_is_zero_by_cancellation():
    h = declare(lambda x: x @ jnp.ones((3, 2)), lambda x, dy: jnp.full_like(x, dy.sum()))
    (row,) = quick(h, jnp.asarray([1.0, 2.0, -3.0]), near=0).rows
    assert row.ok and row.differences < 1e-8 and not row.note


def test_at_a_jump_plain_autodiff_decides():
    at_jump = jnp.asarray([0.5, 1.5])
    flat = declare(jnp.round, lambda x, dy: (None,))
    for x, differences in (at_jump, None), (at_jump + 0.2, 0.0):
        (row,) = quick(flat, x).rows
        assert (row.ok, row.differences, row.autodiff) == (True, differences, 0.0)
        assert row.note == "finite differences are too noisy here" * (differences is None)
    assert not quick(declare(jnp.round, lambda x, dy: dy), at_jump).ok


@pytest.mark.parametrize("slope", [-1.0, 0.0, 0.3, 1.0, 1.5])
def test_at_a_kink_every_slope_between_is_right(slope):
    h = declare(jnp.abs, lambda x, dy: dy * jnp.where(x == 0, slope, jnp.sign(x)))
    assert quick(h, X.at[0].set(0)).ok is (slope <= 1)


def only_float32(f):
    def g(x):
        assert x.dtype == jnp.float32
        return f(x)

    return g


def test_function_of_float32_alone():
    exact = declare(only_float32(jnp.sin), lambda x, dy: dy * jnp.cos(x))
    (row,) = quick(exact, X, order=2).rows[:1]
    assert row.ok and 0 < row.differences < 2e-3
    for f in (jnp.sin, only_float32(jnp.sin)):
        wrong = declare(f, lambda x, dy: dy * 1.05 * jnp.cos(x))
        assert note(wrong, X) == "declared = 1.05 x expected"
        assert quick(wrong, X, tolerance=0.1).ok
    # Hidden from the dtypes: the noise is seen in the differences themselves.
    hidden = declare(
        lambda x: jnp.sin(x.astype(jnp.float32)).astype(x.dtype), lambda x, dy: dy * jnp.cos(x)
    )
    for seed in (602, 759, *sample(range(1000), 3)):
        assert quick(hidden, X, seed=seed).ok


def test_real_and_complex_outputs_are_judged_in_double_precision():
    @custom_gradient
    def f(x):
        return (x**2, jax.lax.complex(x, x)), lambda a, b: 2 * x * a + b.real + b.imag

    assert quick(f, X).rows[0].differences < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype):
    x = X.astype(dtype)
    (row,) = quick(full_square, x).rows
    assert row.ok and row.type == f"{dtype}[3]" and row.differences < 1e-6
    assert note(half_square, x) == "declared = 0.5 x expected"


def test_a_function_that_rounds_its_value_is_judged_by_what_that_allows():
    h = declare(lambda x: (3 * x).astype("bfloat16"), lambda x, dy: 3 * dy.astype(x.dtype))
    for x in (X, jnp.zeros(3)):
        assert quick(h, x).ok


def test_differences_are_as_small_as_the_argument():
    (row,) = quick(declare(jnp.log, lambda x, dy: dy / x), 1e-6 * abs(X)).rows
    assert row.ok and row.differences is not None


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
def test_a_period_that_is_short_beside_the_argument(scale):
    x = jnp.float32(1.2345 * scale)
    for seed in range(5):
        for factor in (1, 1.5):
            h = declare(jnp.sin, lambda x, dy, factor=factor: factor * dy * jnp.cos(x))
            assert quick(h, x, seed=seed).ok is (factor == 1)


@pytest.mark.parametrize("frequency", [1e3, 1e4])
def test_differences_of_a_function_that_changes_fast(frequency):
    h = declare(
        lambda x: jnp.sin(frequency * x), lambda x, dy: dy * frequency * jnp.cos(frequency * x)
    )
    for seed in range(3):
        (row,) = quick(h, jnp.float32(1.2345), seed=seed, near=0).rows
        assert row.ok and row.differences < 1e-8


def test_what_no_judge_can_tell_is_noted():
    h = declare(jnp.sin, lambda x, dy: dy * jnp.cos(x))
    (row,) = quick(lambda x: h(x), jnp.float32(1.2345e9)).rows
    assert row.ok is None and row.note == "finite differences are too noisy here"


def test_reference():
    @jax.custom_vjp
    def h(x):
        return jnp.sin(x)

    h.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (2 * dy * jnp.cos(x),))
    (row,) = quick(h, X).rows
    assert row.note == "declared = 2 x expected" and row.autodiff is None
    (row,) = quick(h, X, reference=jnp.sin).rows
    assert row.autodiff == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("factor", [1, 2])
def test_a_reference_may_be_straight_through(factor):
    """Plain autodiff of it is meant: finite differences see through `stop_gradient`."""
    h = declare(jnp.round, lambda x, dy: factor * dy)
    reference = lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x)  # noqa: E731
    (row,) = quick(h, X + 0.2, expect="surrogate", reference=reference).rows
    assert row.ok is (factor == 1)
    assert not row.ok or row.note == "finite differences of the reference differ"


# --- right rules: a core and a sample, and nightly all of them ------------------------------------

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
@pytest.mark.parametrize("name", [*CORE, *sample(sorted({*RULES} - {*CORE}), 3)])
def test_no_right_rule_is_blamed(name):
    report = assert_right(name, 0, near=1, transforms=False)
    # Near the edge of a domain one try may be outside of it.
    assert len(report.points) == 2 or name == "arcsine_near_its_edge"


@pytest.mark.parametrize("name", ["layer_of_pytree", "complex_square"])
def test_no_right_rule_is_blamed_with_every_check(name):
    for seed in sample(SEEDS, 1):
        assert_right(name, seed, order=2)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RULES)
def test_no_right_rule_is_blamed_at_any_point(name, dtype):
    assert len(assert_right(name, 0, dtype).points) == 3
    for seed in sample(SEEDS, 3):
        assert_right(name, seed, dtype, transforms=False)
