"""The report: how it prints, what it raises, and what it says beside the rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checked import X, rule

import tfgrad_jax.testing
from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import assert_gradient, check_gradient

half = rule(jnp.square, lambda dy, y, x: dy * x)
full = rule(jnp.square, lambda dy, y, x: dy * 2 * x)


def test_prints_as_a_table():
    lines = str(check_gradient(half, X)).splitlines()
    assert lines[0] == "Gradient of `rule.h`: WRONG"
    heads = "order  argument  type        error: differences  error: autodiff"
    assert lines[1].strip() == heads
    assert lines[2].split()[:5] == ["1", "xs[0]", "float32[3]", "5.0e-01", "5.0e-01"]
    assert lines[2].endswith("WRONG: declared = 0.5 * expected")
    assert lines[3] == "  linear in dy  yes" and len(lines) == 4
    assert repr(check_gradient(full, X)).startswith("Gradient of `rule.h`: ok\n")
    public = {"GradientReport", "assert_gradient", "check_gradient"}
    assert {*tfgrad_jax.testing.__all__} == public


def test_raises_with_the_table():
    wrong, fine = check_gradient(half, X), check_gradient(full, X)
    assert fine and fine.ok and not wrong and not wrong.ok
    assert_gradient(full, X)
    with pytest.raises(AssertionError) as caught:
        assert_gradient(half, X)
    _, *ours = caught.traceback  # pytest shows none of these
    assert ours and all(entry.frame.f_locals.get("__tracebackhide__") for entry in ours)


def test_is_deterministic():
    first, again, other = (check_gradient(half, X, seed=n) for n in (0, 0, 1))
    assert str(first) == str(again) and str(first.points) != str(other.points)


def test_names_every_argument():
    @custom_gradient
    def h(params, x, mode, *rest):
        (w,), n = params["w"], params["n"]
        y = w * x * n + rest[0]
        return y, lambda dy: ({"n": None, "w": [dy * x * n]}, dy * w * n, None, dy)

    report = check_gradient(h, {"w": [X], "n": jnp.float32(1)}, X, "mode", X)
    names = ["params['n']", "params['w'][0]", "x", "rest[0]"]
    assert [r.argument for r in report.rows] == names
    assert [r.ok for r in report.rows] == [False, True, True, True]
    assert report.rows[0].type == "float32[]"
    by_name = custom_gradient(lambda x, scale=2.0: (x * scale, lambda dy: (dy * scale, None)))
    report = check_gradient(by_name, X, kwargs={"scale": 3.0})
    assert [(r.argument, r.ok) for r in report.rows] == [("x", True), ("scale", False)]
    # It shows the signature of what it wraps, and takes one argument more.
    one = custom_gradient(lambda x: (x**2, lambda dy: dy * 2 * x))
    scaled = functools.wraps(one)(lambda scale, x: scale * one(x))
    report = check_gradient(scaled, jnp.float32(2), X)
    assert [r.argument for r in report.rows] == ["args[0]", "args[1]"]


def test_the_points_near_the_given_one():
    report = check_gradient(rule(jnp.abs, lambda dy, y, x: dy), 2.0)  # right at this sign alone
    assert report.ok and all(point["xs[0]"] > 0 for point in report.points)
    for x in [X, [0.0, 2.0, -3.0], [[1.0, 2j], [-2j, 5.0]], [1.0, 1.0, 1.0]]:
        x = jnp.asarray(x)
        _, *points = check_gradient(rule(lambda x: 2 * x, lambda dy, y, x: 2 * dy), x).points
        assert len(points) == 2
        for near in (np.asarray(point["xs[0]"]) for point in points):
            if np.iscomplexobj(near):  # of another phase
                assert (abs(np.angle(near / np.where(x == 0, near, x))) < 0.4).all()
                continue
            same = np.asarray(x) != 0
            np.testing.assert_array_equal(np.sign(near.real)[same], np.sign(x.real)[same])
            assert near.dtype == x.dtype and 1e-3 < abs(near - x).max() < 0.4 * abs(x).max()
    assert len(np.unique(near)) == 3
    points = check_gradient(full, 0 * X).points  # zeros become positive, and then negative
    assert points[1]["xs[0]"].min() > 0 > points[2]["xs[0]"].max()
    assert len(check_gradient(full, X, near=5).points) == 6
    turned = custom_gradient(lambda x, w: (x @ w, lambda dy: (dy @ w, x.T @ dy)))
    assert not check_gradient(turned, jnp.arange(4.0).reshape(2, 2), jnp.eye(2)).ok


def test_what_is_not_finite_is_left_out_of_the_value():
    log = rule(jnp.log, lambda dy, y, x: 7 * dy / x)
    with pytest.raises(ValueError, match="float outputs, finite here"):
        check_gradient(log, -1.0)
    partly = rule(lambda x: jnp.log(x).at[1].set(x[1]), lambda dy, y, x: dy.at[0].set(0 * dy[0]))
    report = check_gradient(partly, jnp.asarray([-1.0, 2.0]))
    texts = [fact.text for fact in report.facts if fact.name == "value"]
    assert report and texts == ["infinite or NaN in 1 of 2 numbers, which are left out"]
    assert not check_gradient(log, jnp.asarray([-1.0, 2.0])).ok


def test_a_rule_or_a_function_that_cannot_run():
    def silent(dy, y, x):
        try:
            raise RuntimeError
        finally:
            del dy

    report = check_gradient(rule(jnp.sin, silent), X)
    line = f"({__file__}:{silent.__code__.co_firstlineno + 2})"
    assert [tuple(fact) for fact in report.facts] == [("rule", False, f"RuntimeError {line}")]
    with pytest.raises(ZeroDivisionError):
        check_gradient(rule(lambda x: 1 / 0, None), X)
    outside = rule(jnp.square, lambda dy, y, x: dy * jax.pure_callback(lambda x: 2 * x, x, x))
    report = check_gradient(outside, X, order=2)
    (failed,) = [fact for fact in report.facts if fact.ok is False]
    assert report.rows[0].ok and failed.name == "order 2"
    for text in ("JVP", "computes something that JAX cannot differentiate"):
        assert text in failed.text
    integers = lambda x: jnp.ones_like(x, int)  # noqa: E731
    for f, x, kind in (integers, jnp.arange(3), "inputs"), (integers, X, "outputs"):
        with pytest.raises(ValueError, match=f"expected a function with float {kind}"):
            check_gradient(rule(f, lambda dy, y, x: None), x)
