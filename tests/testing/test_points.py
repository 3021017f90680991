"""Mistakes that a commonplace point hides, the points near it, and what is kept there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import declare, fact, full_square, quick

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.slow

ONES = jnp.ones(3)


def pairwise(f, rule):
    @custom_gradient
    def h(a, b):
        return f(a, b), lambda dy: rule(a, b, dy)

    return h


# Wrong rules that are right at ones, with the notes on their arguments.
HIDDEN = {
    "swapped product": (
        pairwise(lambda a, b: a * b, lambda a, b, dy: (dy * a, dy * b)),
        (ONES, ONES),
        ["swapped with `b`?", "swapped with `a`?"],
    ),
    "power": (
        declare(lambda x: x**3, lambda x, dy: dy * 3 * x),
        (ONES,),
        ["wrong power: declared = 1 x expected x `x`**-1"],
    ),
    "transposes": (
        pairwise(lambda a, b: a @ b, lambda a, b, dy: (dy @ b, a @ dy)),
        (jnp.ones((3, 3)), jnp.ones((3, 3))),
        ["missing transpose of `b`?", "missing transpose of `a`?"],
    ),
    "factor": (
        declare(lambda x: jnp.exp(x - 1), lambda x, dy: dy * x),
        (ONES,),
        ["declared = expected x a factor that depends on the input, 0.9"],
    ),
    "another input": (
        pairwise(lambda a, b: a * jnp.exp(b), lambda a, b, dy: (dy * jnp.exp(b),) * 2),
        (ONES, ONES),
        ["", "declared that of `a`"],
    ),
    "quotient": (
        pairwise(lambda a, b: a / b, lambda a, b, dy: (dy / b, -dy / b)),
        (ONES, ONES),
        ["", "declared = expected x a factor that depends on the input"],
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_mistakes_that_ones_hide(name):
    h, args, notes = HIDDEN[name]
    assert quick(h, *args, near=0).ok  # the point alone tells nothing
    for seed in range(3):
        report = quick(h, *args, seed=seed)
        assert not report.ok
        for row, note in zip(report.rows, notes, strict=True):
            assert row.ok is not bool(note)
            start, _, rest = row.note.partition(note) if note else ("", "", row.note)
            assert start == ("at points[1]: " if note else ""), row
            assert not rest or note.endswith(("0.9", "input")), row


def test_says_where_it_looked():
    h, args, _ = HIDDEN["power"]
    report = quick(h, *args)
    assert fact(report, "points").text == "the given one and 2 near it, in `points`"
    given, *others = (np.asarray(p["x"]) for p in report.points)
    np.testing.assert_array_equal(given, np.ones(3))
    for x in others:
        assert len(set(x)) == 3 and (abs(np.log(x)) <= 0.3).all()
    assert not np.array_equal(*others)
    # The point that the note names is one where the rule is wrong.
    x = jnp.asarray(report.points[1]["x"], jnp.float32)
    assert abs(jax.grad(lambda x: h(x).sum())(x) - 3 * x**2).max() > 0.05
    assert len(quick(h, *args, near=5).points) == 6


def test_zeros_move_and_single_ones_stay():
    (row,) = quick(declare(lambda x: x + x**2, lambda x, dy: dy), jnp.zeros(3)).rows
    assert not row.ok and row.note.startswith("at points[1]: declared = expected x a factor")
    x = jnp.asarray([0.0, 1.0, -2.0])
    moved = quick(full_square, x).points[1]["x"]
    assert moved[0] == 0 and moved[1] > 0 > moved[2] and not (moved == x)[1:].any()


@pytest.mark.parametrize(
    ("x", "holds"),
    [
        ([[1.0, 2.0], [2.0, 5.0]], lambda x: x - x.T),
        ([[1.0, 2j], [-2j, 5.0]], lambda x: x - np.conj(x.T)),
        ([[0.1, 0.9, 0.0], [0.3, 0.3, 0.4]], lambda x: np.sum(x, -1) - 1),
        ([0.6, -0.8], lambda x: np.linalg.norm(x) - 1),
        ([[0.6, 0.0], [0.8, 0.0], [0.0, 1.0]], lambda x: x.T @ x - np.eye(2)),
        ([[0.6, -0.8], [0.8, 0.6]], lambda x: x @ x.T - np.eye(2)),
        ([-3.0, 0.5, 0.51, 0.52, 2.0], lambda x: np.minimum(np.diff(x), 0)),
    ],
)
def test_what_holds_of_an_array_is_kept(x, holds):
    x = np.asarray(x)
    for point in quick(declare(lambda x: x * 2, lambda x, dy: dy * 2), jnp.asarray(x)).points[1:]:
        assert abs(holds(np.asarray(point["x"]))).max() < 1e-6
        assert abs(np.asarray(point["x"]) - x).max() > 1e-3


def test_points_outside_of_the_domain_are_left_out():
    h = declare(lambda x: jnp.arcsin(x), lambda x, dy: dy / jnp.sqrt((1 - x) * (1 + x)))
    report = quick(h, jnp.asarray([0.9, -0.95]))
    assert report.ok and len(report.points) == 3
    assert all(abs(p["x"]).max() < 1 for p in report.points)
    assert "left out, where the value is not finite" in fact(report, "points").text

    def of_one_point(x):
        if x != 2.0:
            raise ValueError("elsewhere")
        return x * 3

    report = quick(declare(of_one_point, lambda x, dy: dy * 3), 2.0, reference=lambda x: 3 * x)
    assert len(report.points) == 1
    assert fact(report, "points").text.startswith("the given one and 0 near it, in `points`; 6")


def test_a_rule_that_fails_near_is_not_blamed_for_it():
    # `f` is defined around 1; the rule, by its own check, is not.
    def rule(x, dy):
        if isinstance(x, jax.core.Tracer) or (np.asarray(x) == 1).all():
            return dy * 2 * x
        raise ValueError("outside of the domain")

    report = quick(declare(jnp.square, rule), ONES)
    assert [r.ok for r in report.rows] == [True]


def test_kinks_near_the_point_are_not_judged():
    # Rounded to eighths, a point near may be on the kink, where any slope is a derivative.
    def f(x):
        return jnp.abs(jnp.where(jnp.abs(x - 1) < 0.4, 0, x))

    h = declare(f, lambda x, dy: dy * jnp.where(jnp.abs(x - 1) < 0.4, 0, jnp.sign(x)))
    for seed in range(5):
        assert quick(h, ONES, seed=seed).ok


def test_surrogates_are_measured_at_the_point_alone():
    report = quick(declare(jnp.round, lambda x, dy: dy), ONES, expect="surrogate")
    assert len(report.points) == 1 and not [f for f in report.facts if f.name == "points"]
