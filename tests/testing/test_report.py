"""The report: how it prints, what it raises, which argument and order each row is about."""

import jax
import jax.numpy as jnp
import pytest
from checking import X, clipped, declare, full_square, half_square, note, quick

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import assert_gradient, check_gradient


def test_prints_as_a_table():
    lines = str(quick(half_square, X)).splitlines()
    assert lines[0] == "Gradient of `declare.h`: WRONG"
    assert lines[1].split() == ["order", "argument", "type", "differences", "autodiff"]
    assert lines[2].split()[:5] == ["1", "x", "float32[3]", "5.0e-01", "5.0e-01"]
    assert lines[2].endswith("WRONG: declared = 0.5 x expected")
    assert lines[3] == "  points  the given one and 2 near it, in `points`"
    assert lines[4].split() == ["linear", "yes"]
    assert "x         float32[3]" in lines[2] and len(lines) == 5
    assert repr(quick(full_square, X)).startswith("Gradient of `declare.h`: ok\n")


def test_raises_with_the_table():
    wrong, fine = quick(half_square, X), quick(full_square, X)
    assert fine and fine.ok and not wrong and not wrong.ok
    assert_gradient(full_square, X, transforms=False)
    with pytest.raises(AssertionError) as caught:
        assert_gradient(half_square, X, transforms=False)
    assert str(caught.value) == str(wrong)


def test_is_deterministic():
    first, again, other = (quick(clipped, X, expect="surrogate", seed=n) for n in (0, 0, 1))
    assert str(first) == str(again) != str(other)


def test_names_every_argument():
    @custom_gradient
    def h(params, x, mode, *rest, y):
        (w,), n = params["w"], params["n"]
        return (
            w * x * n + rest[0] + y,
            lambda dy, variables: ([{"n": None, "w": [dy * x * n]}, dy * w * n, None, dy], [dy]),
        )

    params = {"w": [X], "n": jnp.float32(1)}
    report = quick(h, params, X, "mode", X, kwargs={"y": X})
    names = ["params['n']", "params['w'][0]", "x", "rest[0]", "y"]
    assert [r.argument for r in report.rows] == names
    assert [r.ok for r in report.rows] == [False, True, True, True, True]
    assert report.rows[0].note == "declared no gradient, expected one"
    assert report.rows[0].type == "float32[]"


def test_second_order():
    h = declare(jnp.square, lambda x, dy: dy * 2 * jax.lax.stop_gradient(x))
    assert quick(h, X).ok
    first, second = quick(h, X, order=2).rows
    assert first.ok and not second.ok
    assert (second.order, second.note) == (2, "declared no gradient, expected one")
    assert [r.order for r in quick(full_square, X, order=3).rows] == [1, 2, 3]


def test_rule_or_function_that_cannot_run():
    report = quick(declare(jnp.sin, lambda x, dy: jnp.zeros(7)), X)
    assert not report.ok and not report.rows
    (found,) = report.facts
    assert found.name == "rule" and "of shape (7,) for the input `x`" in found.text
    assert "(checking.py:" in found.text and "/" not in found.text.partition(" returned")[0]
    with pytest.raises(ZeroDivisionError):
        check_gradient(declare(lambda x: 1 / 0, None), X)


def test_what_calls_a_decorated_function():
    for h in (jax.jit(half_square), lambda x: half_square(x), jax.vmap(half_square)):
        assert note(h, X) == "declared = 0.5 x expected"


def test_nothing_to_differentiate():
    for f, x in [(lambda n: n + 1, jnp.arange(3)), (lambda x: jnp.ones_like(x, int), X)]:
        with pytest.raises(ValueError, match="found nothing to differentiate"):
            quick(declare(f, lambda x, dy: (None,)), x)
    (row,) = quick(full_square, jnp.zeros((0, 2))).rows
    assert row.ok
