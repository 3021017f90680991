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
    assert lines[3] == "  points        the given one and 2 near it, in `points`"
    assert lines[4] == "  linear in dy  yes" and len(lines) == 5
    assert repr(check_gradient(full, X)).startswith("Gradient of `rule.h`: ok\n")
    assert sorted(tfgrad_jax.testing.__all__) == [
        "GradientReport",
        "assert_gradient",
        "check_gradient",
    ]


def test_raises_with_the_table():
    wrong, fine = check_gradient(half, X), check_gradient(full, X)
    assert fine and fine.ok and not wrong and not wrong.ok
    assert_gradient(full, X)
    with pytest.raises(AssertionError) as caught:
        assert_gradient(half, X)
    assert str(caught.value) == str(wrong)
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
    (points,) = [fact.text for fact in report.facts if fact.name == "points"]
    assert points.endswith("; the other sign of xs[0] is not tried")
    double = rule(lambda x: 2 * x, lambda dy, y, x: 2 * dy)
    for x, holds in (
        (X, lambda x: np.sign(x) - np.sign(X)),
        ([0.0, 2.0, -3.0], lambda x: np.sign(x) - [0, 1, -1]),
        ([[1.0, 2.0], [2.0, 5.0]], lambda x: x - x.T),
        ([[1.0, 2j], [-2j, 5.0]], lambda x: x - np.conj(x.T)),
        ([[0.1, 0.9, 0.0], [0.3, 0.3, 0.4]], lambda x: np.sum(x, -1) - 1),
        ([1.0, 1.0, 1.0], lambda x: np.array(len(np.unique(x)) - 3)),
    ):
        _, *points = check_gradient(double, jnp.asarray(x)).points
        assert len(points) == 2
        for point in points:
            assert abs(holds(np.asarray(point["xs[0]"]))).max() < 1e-6
            assert abs(np.asarray(point["xs[0]"]) - x).max() > 1e-3
    assert len(check_gradient(double, X, near=5).points) == 6


def test_where_the_value_is_not_finite_nothing_is_judged():
    log = rule(jnp.log, lambda dy, y, x: 7 * dy / x)
    head = lambda report: str(report).partition("\n")[0].partition(": ")[2]  # noqa: E731
    report = check_gradient(log, -1.0)
    assert report.ok and not report and head(report) == "not judged"
    assert report.rows[0][3:] == (None, None, None, "the value is not finite")
    with pytest.raises(AssertionError, match=r"(?s)not judged: the value .*\nNo judge could tell"):
        assert_gradient(log, -1.0)
    assert_gradient(log, -1.0, unchecked="allow")
    partly = rule(lambda x: jnp.log(x).at[1].set(x[1]), lambda dy, y, x: dy.at[0].set(0 * dy[0]))
    report = check_gradient(partly, jnp.asarray([-1.0, 2.0]))
    texts = [fact.text for fact in report.facts if fact.name == "value"]
    assert report and texts == ["infinite or NaN in 1 of 2 numbers, which are left out"]
    assert head(check_gradient(log, jnp.asarray([-1.0, 2.0]))) == "WRONG"


def test_a_formatted_value_is_not_judged_where_jax_traces_it(capsys):
    @custom_gradient
    def prints(x):
        print(f"x = {x:g}")
        return x**3, lambda dy: dy * 3 * x**2

    assert_gradient(prints, 2.0)  # a first derivative shows values
    report = check_gradient(prints, 2.0, order=2)
    assert report.ok and not report
    (first, second), line = report.rows, prints.__wrapped__.__code__.co_firstlineno + 2
    assert (first.ok, second.order, second.ok) == (True, 2, None)
    assert second.note == (
        f"it formats an array that JAX is tracing, at {__file__}:{line}: drop the format, as the "
        "`:g` of `{x:g}`, or use `jax.debug.print`"
    )
    assert check_gradient(lambda x: prints(x) if f"{x:g}" else x, 2.0).rows[0].ok is None
    assert capsys.readouterr().out.startswith("x = 2\nx = 2\n")


def test_a_rule_or_a_function_that_cannot_run():
    def silent(dy, y, x):
        raise RuntimeError

    report = check_gradient(rule(jnp.sin, silent), X)
    assert [tuple(fact) for fact in report.facts] == [("rule", False, "RuntimeError")]
    with pytest.raises(ZeroDivisionError):
        check_gradient(rule(lambda x: 1 / 0, None), X)
    outside = rule(jnp.square, lambda dy, y, x: dy * jax.pure_callback(lambda x: 2 * x, x, x))
    report = check_gradient(outside, X, order=2)
    (failed,) = [fact for fact in report.facts if fact.ok is False]
    assert failed.name == "order 2" and "JVP" in failed.text
    for f, x in [(lambda n: n + 1, jnp.arange(3)), (lambda x: jnp.ones_like(x, int), X)]:
        with pytest.raises(ValueError, match="found nothing to differentiate"):
            check_gradient(rule(f, lambda dy, y, x: None), x)
