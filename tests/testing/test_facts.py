"""Facts beside the rows: surrogates, linearity, transformations, both modes, infinities."""

import jax
import jax.numpy as jnp
import pytest
from checking import X, clipped, declare, fact, full_square, quick

from tfgrad_jax.testing import check_gradient

pytestmark = pytest.mark.slow


def test_surrogates_are_measured():
    straight = declare(jnp.round, lambda x, dy: dy)
    assert not quick(straight, X).ok
    report = quick(straight, X, expect="surrogate")
    assert report.ok and report.rows[0].note == "expected is zero"
    report = quick(declare(jnp.sin, lambda x, dy: dy * 1.1 * jnp.cos(x)), X, expect="surrogate")
    assert report.ok and report.rows[0].note == "differs by 0.1 x expected, cosine 1.000"
    report = quick(clipped, X, expect="surrogate")
    assert report.ok and "cosine 0." in report.rows[0].note


def test_linearity_is_a_fact():
    found = fact(quick(full_square, X), "linear")
    assert (found.ok, found.text) == (None, "yes")
    found = fact(quick(full_square, X), "linear")
    assert (found.ok, found.text) == (True, "yes")
    for rule, text in (
        (lambda x, dy: jnp.clip(dy, -0.1, 0.1), "no: grad(dy1 + dy2) is not grad(dy1) + grad(dy2)"),
        (lambda x, dy: dy / 1e-3 * jnp.clip(1e-2, 0, 1 / (1 + jnp.sum(dy) ** 2)), "no: grad("),
        (lambda x, dy: dy + 1, "no: grad(0) is not 0"),
        (lambda x, dy: x, "no: the rule ignores dy; did you forget to multiply by it?"),
    ):
        h = declare(lambda x: x, rule)
        found = fact(quick(h, X, expect="surrogate"), "linear")
        assert found.ok is None and found.text.startswith(text)
        assert fact(quick(h, X, expect="surrogate"), "linear").ok is False


def test_large_upstreams_are_tried():
    # Not clipped at upstreams of ordinary size.
    found = fact(quick(declare(lambda x: x, lambda x, dy: jnp.clip(dy, -50, 50)), X), "linear")
    assert found.text == "no: grad(1000 dy) is not 1000 grad(dy)"


def test_eager_jit_and_vmap_agree():
    report = check_gradient(full_square, X)
    assert [fact(report, n).ok for n in ("jit", "vmap")] == [True, True]
    differs = declare(
        jnp.square, lambda x, dy: dy * (3 if isinstance(x, jax.core.Tracer) else 2) * x
    )
    report = check_gradient(differs, X)
    assert [r.ok for r in report.rows] == [True] and not report.ok
    assert fact(report, "jit").text.startswith("disagrees with eager evaluation")
    assert not fact(report, "vmap").ok


def test_branches_on_values_need_no_jit():
    h = declare(lambda x: x * 3 if x > 0 else x, lambda x, dy: dy * 3 if x > 0 else dy)
    report = check_gradient(h, 2.0)
    assert report.ok and fact(report, "jit").ok is None
    assert "boolean conversion" in fact(report, "jit").text


def test_forward_mode():
    report = quick(declare(jnp.square, lambda x, dy: dy * 2 * x), X, forward=True)
    assert report.ok and fact(report, "forward mode").ok
    assert fact(report, "forward mode").text.startswith("agrees with reverse mode")
    report = quick(clipped, X, expect="surrogate", forward=True)
    assert not report.ok and "is not linear" in fact(report, "forward mode").text


def test_not_finite():
    log = declare(jnp.log, lambda x, dy: dy / x)
    report = quick(log, jnp.asarray([0.0, 1.0]))
    assert not report.ok and report.rows[0].note == "not finite"
    assert fact(report, "finite").text.startswith(
        "the gradient of `x` is not finite, first in `div`"
    )
    assert fact(report, "value").ok is None
    made_by_rule = declare(jnp.sin, lambda x, dy: dy * jnp.sqrt(x - 1))
    report = quick(made_by_rule, jnp.asarray([0.5, 2.0]))
    assert "first in `sqrt`" in fact(report, "finite").text
    in_jit = declare(jnp.sin, lambda x, dy: dy * jax.jit(lambda x: jnp.exp(x))(x))
    assert "first in `exp`" in fact(quick(in_jit, jnp.asarray([200.0, 1.0])), "finite").text
    assert "neither is the argument" in fact(quick(log, jnp.asarray([jnp.nan])), "finite").text


def test_place_has_its_line():
    def f(x):
        y = jnp.where(x > 0, -jnp.inf, x)  # an infinity that makes no harm
        z = jnp.log(x)
        return jnp.where(x > 0, jnp.exp(y), z)

    line = f.__code__.co_firstlineno + 2
    report = quick(f, jnp.asarray([-1.0, 1.0]))
    assert fact(report, "value").text.endswith(f"first in `log` (test_facts.py:{line})")
