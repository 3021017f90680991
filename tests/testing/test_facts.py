"""Facts beside the rows: surrogates, linearity, transformations, infinities."""

import jax
import jax.numpy as jnp
import pytest
from checking import X, clipped, declare, fact, full_square, quick

from tfgrad_jax.testing import check_gradient


def test_surrogates_are_measured_at_the_point_alone():
    straight = declare(jnp.round, lambda x, dy: dy)
    assert not quick(straight, X).ok
    report = quick(straight, X, expect="surrogate")
    assert report.ok and report.rows[0].note == "expected is zero" and len(report.points) == 1
    report = quick(declare(jnp.sin, lambda x, dy: dy * 1.1 * jnp.cos(x)), X, expect="surrogate")
    assert report.ok and report.rows[0].note == "differs by 0.1 x expected, cosine 1.000"
    report = quick(clipped, X, expect="surrogate")
    assert report.ok and "cosine 0." in report.rows[0].note


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda x, dy: dy, "yes"),
        (lambda x, dy: jnp.clip(dy, -0.1, 0.1), "no: grad(dy1 + dy2) is not grad(dy1) + grad(dy2)"),
        (lambda x, dy: dy + 1, "no: grad(0) is not 0; did you forget to multiply by dy?"),
        # Not clipped at upstreams of ordinary size.
        (lambda x, dy: jnp.clip(dy, -50, 50), "no: grad(1000 dy) is not 1000 grad(dy)"),
    ],
)
def test_linearity_is_a_fact(rule, text):
    found = fact(quick(declare(lambda x: x, rule), X, expect="surrogate"), "linear")
    assert (found.ok, found.text) == (None, text)


def test_what_jit_of_vmap_gives_agrees():
    assert fact(check_gradient(full_square, X), "jit(vmap)").ok
    for made in (lambda x: x, lambda x: jnp.zeros(3) + 1):  # traced by both, and by `jit` alone
        differs = declare(
            jnp.square,
            lambda x, dy: dy * (3 if isinstance(made(x), jax.core.Tracer) else 2) * x,  # noqa: B023
        )
        report = check_gradient(differs, X)
        assert [r.ok for r in report.rows] == [True] and not report.ok
        assert fact(report, "jit(vmap)").text.startswith("disagrees with eager evaluation")


def test_branches_on_values_need_no_jit():
    h = declare(lambda x: x * 3 if x > 0 else x, lambda x, dy: dy * 3 if x > 0 else dy)
    report = check_gradient(h, 2.0)
    assert report.ok and fact(report, "jit(vmap)").ok is None
    assert "boolean conversion" in fact(report, "jit(vmap)").text


@pytest.mark.parametrize("expect", ["exact", "surrogate"])
def test_a_gradient_that_is_not_finite_fails(expect):
    log = declare(jnp.log, lambda x, dy: dy / x)
    report = quick(log, jnp.asarray([0.0, 1.0]), expect=expect)
    assert not report.ok and fact(report, "value").ok is None
    assert report.rows[0].note == "not finite: `jax.debug_nans` shows where"
    # In double precision it would be finite.
    overflow = declare(jax.nn.softplus, lambda x, dy: dy * jnp.exp(x) / (1 + jnp.exp(x)))
    report = quick(overflow, jnp.asarray([100.0, 1.0]), expect=expect)
    assert not report.ok and report.rows[0].differences < 1e-6
