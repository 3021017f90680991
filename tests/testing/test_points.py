"""Mistakes are named, and those found that a commonplace point hides; the points near it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import ONES, X, declare, fact, note, notes, quick
from right_rules import rule
from support.helpers import sample

SQUARE = 4 * jnp.eye(3) + jnp.arange(9.0).reshape(3, 3)
COMPLEX = jax.lax.complex(X, X[::-1])


def _cube(a, dy):
    return jax.vjp(lambda a: a @ a @ a, a)[1](dy)[0]


@pytest.mark.parametrize(
    ("f", "rule", "x", "expected"),
    [
        (jnp.sin, lambda x, dy: (None,), X, "declared no gradient, expected one"),
        (jnp.cos, lambda x, dy: dy * jnp.sin(x), X, "wrong sign: declared = -1 x expected"),
        (lambda a: a @ a @ a, lambda a, dy: _cube(a, dy).T, SQUARE,
         "declared = transpose of expected"),
        (lambda a: a**3, lambda a, dy: (dy * 3 * a.conj() ** 2).T,
         jax.lax.complex(SQUARE, SQUARE.T), "declared = transpose of expected"),
        (jnp.round, lambda x, dy: dy, X, "expected no gradient"),
        (jnp.mean, lambda x, dy: jnp.full_like(x, dy), X, "declared = 3 x expected"),
        (lambda z: z**3, lambda z, dy: dy * 3 * z**2, COMPLEX, "declared = conjugate of expected"),
        (jnp.square, lambda z, dy: dy * z.conj(), COMPLEX, "declared = 0.5 x expected"),
    ],
    ids=["none", "sign", "transpose", "transpose, complex", "unexpected", "3", "conjugate", "half"],
)  # fmt: skip
def test_names_the_mistake(f, rule, x, expected):
    assert note(declare(f, rule), x) == expected


def test_one_wrong_entry_is_found():
    x = jnp.linspace(0.1, 2, 1000)
    h = declare(jnp.sin, lambda x, dy: (dy * jnp.cos(x)).at[617].multiply(1.01))
    assert note(h, x, near=0).startswith("differs by ")
    assert quick(declare(jnp.sin, lambda x, dy: dy * jnp.cos(x)), x).ok
    # The transpose of a matrix has the same trace: an error so small fits that guess, too.
    h = rule(
        lambda x, a: x * a.trace(),
        lambda dy, y, x, a: ((dy * a.trace()).at[617].multiply(1.01), jnp.sum(dy * x) * jnp.eye(3)),
    )
    found = notes(quick(h, x, SQUARE, near=0))
    assert found.pop("xs[0]").startswith("differs by ") and found == {"xs[1]": ""}


def test_what_is_real_has_no_conjugate():
    h = declare(lambda x: jax.lax.complex(x, x), lambda x, dy: dy.real - dy.imag)
    assert note(h, X).startswith("differs by ")


# --- mistakes that the point hides ----------------------------------------------------------------

MATRIX = jnp.ones((3, 3))

# Wrong rules that are right at ones, with how the notes on their arguments begin.
HIDDEN = {
    "swapped product": (jnp.multiply, lambda dz, z, x, y: (dz * x, dz * y), (ONES, ONES),
                        ["swapped with `xs[1]`?", "swapped with `xs[0]`?"]),
    "one gradient twice": (lambda x, y: x * jnp.exp(y), lambda dz, z, x, y: (dz * jnp.exp(y),) * 2,
                           (ONES, ONES), ["", "declared that of `xs[0]`"]),
    "power": (lambda x: x**3, lambda dy, y, x: dy * 3 * x, (ONES[:, None],),
              ["declared = 1 x expected x `xs[0]`**-1"]),
    "transposes": (jnp.matmul, lambda dy, y, a, b: (dy @ b, a @ dy), (MATRIX, MATRIX),
                   ["missing transpose of `xs[1]`?", "missing transpose of `xs[0]`?"]),
    "quotient": (jnp.divide, lambda dy, y, a, b: (dy / b, -dy / b), (ONES, ONES),
                 ["", "differs by "]),
}  # fmt: skip


# Wrong rules as people write them, and how each begins.
LITERATURE = {
    "softmax, the diagonal alone": (
        jax.nn.softmax,
        lambda dy, y, x: dy * y * (1 - y),
        (X,),
        "differs by ",
    ),
    "logsumexp over the other axis": (
        lambda x: jax.nn.logsumexp(x, -1),
        lambda dy, y, x: dy[:, None] * jax.nn.softmax(x, 0),
        (SQUARE[:2],),
        "differs by ",
    ),
    "norm, not divided": (jnp.linalg.norm, lambda dy, y, x: dy * x, (X,), "differs by "),
    "layer norm, its moments held fixed": (
        lambda x: (x - x.mean()) / x.std(),
        lambda dy, y, x: dy / x.std(),
        (X,),
        "differs by ",
    ),
    "cumsum, not reversed": (jnp.cumsum, lambda dy, y, x: jnp.cumsum(dy), (X,), "differs by "),
    "sort, permuted the other way": (
        jnp.sort,
        lambda dy, y, x: dy[jnp.argsort(x)],
        (jnp.asarray([3.0, 1, 2, 5, 4]),),
        "differs by ",
    ),
    "embedding, set for add": (
        lambda t: t[jnp.asarray([0, 1, 1])],
        lambda dy, y, t: jnp.zeros_like(t).at[jnp.asarray([0, 1, 1])].set(dy),
        (SQUARE,),
        "differs by ",
    ),
    "convolution, the kernel not flipped": (
        lambda x: jnp.convolve(x, X, "valid"),
        lambda dy, y, x: jnp.convolve(dy, X),
        (SQUARE[2],),
        "differs by ",
    ),
    "modulus, conjugated": (
        jnp.abs,
        lambda dy, y, z: jax.lax.complex(dy / y, 0 * y) * jnp.conj(z),
        (COMPLEX,),
        "declared = conjugate of expected",
    ),
    "one part in a thousand": (
        jnp.sin,
        lambda dy, y, x: 1.001 * dy * jnp.cos(x),
        (X,),
        "differs by 0.001 x expected",
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LITERATURE)
def test_wrong_rules_of_the_literature_are_found(name):
    f, grad, args, begin = LITERATURE[name]
    (row,) = quick(rule(f, grad), *args).rows
    assert not row.ok and row.note.startswith(begin), row


@pytest.mark.parametrize("name", HIDDEN)
def test_mistakes_that_ones_hide(name):
    f, grad, args, begins = HIDDEN[name]
    h = rule(f, grad)
    assert quick(h, *args, near=0).ok  # the point alone tells nothing
    for seed in (0, *sample(range(1, 1000), 1)):
        report = quick(h, *args, seed=seed)
        for row, begin in zip(report.rows, begins, strict=True):
            assert row.ok is not bool(begin)
            assert row.note.startswith(begin and f"at points[1]: {begin}"), (seed, row)


def test_says_where_it_looked():
    h = declare(lambda x: x**3, lambda x, dy: dy * 3 * x)
    report = quick(h, ONES)
    text = fact(report, "points").text
    begin, _, end = text.partition("; ")
    assert begin.startswith("the given one and 2 near it, in `points`: x from 0.")
    assert end == "the other sign of x is not tried"
    given, *others = (np.asarray(p["x"]) for p in report.points)
    np.testing.assert_array_equal(given, np.ones(3))
    for x in others:
        assert len(set(x.tolist())) == 3 and (abs(np.log(x)) <= 0.3).all()
        # The rule is wrong there.
        assert abs(jax.grad(lambda x: h(x).sum())(jnp.asarray(x)) - 3 * x**2).max() > 0.05
    assert len(quick(h, ONES, near=5).points) == 6


@pytest.mark.parametrize(
    ("x", "holds"),
    [
        ([[1.0, 2.0], [2.0, 5.0]], lambda x: x - x.T),
        ([[1.0, 0.5], [0.5, 1.0]], lambda x: x - x.T),
        ([[1.0, 2j], [-2j, 5.0]], lambda x: x - np.conj(x.T)),
        ([[0.1, 0.9, 0.0], [0.3, 0.3, 0.4]], lambda x: np.sum(x, -1) - 1),
        ([0.6, -0.8], lambda x: np.linalg.norm(x) - 1),
        ([[0.6, -0.8], [0.6, 0.8]], lambda x: np.linalg.norm(x, axis=1) - 1),
        ([[0.6, 0.0], [0.8, 0.0], [0.0, 1.0]], lambda x: x.T @ x - np.eye(2)),
        ([[0.6, -0.8], [0.8, 0.6]], lambda x: x @ x.T - np.eye(2)),
        ([-3.0, 0.5, 0.51, 0.52, 2.0], lambda x: np.minimum(np.diff(x), 0)),
        ([0.0, 2.0, -3.0], lambda x: np.sign(x) - [0, 1, -1]),
        ([0.0, 0.0], lambda x: 0 * x),
    ],
    ids=[
        "symmetric",
        "symmetric, ones",
        "Hermitian",
        "probabilities",
        "unit",
        "unit rows",
        "orthonormal columns",
        "orthonormal rows",
        "sorted",
        "signs",
        "zeros",
    ],
)
def test_what_holds_of_an_array_is_kept(x, holds):
    h = declare(lambda x: x * 2, lambda x, dy: dy * 2)
    _, *points = quick(h, jnp.asarray(x)).points
    assert len(points) == 2
    for point in points:
        assert abs(holds(np.asarray(point["x"]))).max() < 1e-6
        assert abs(np.asarray(point["x"]) - x).max() > 1e-3


def test_a_rule_that_is_right_at_one_sign_alone():
    """It is right there, so the report says which sign was not tried."""
    h = declare(jnp.abs, lambda x, dy: dy)
    report = quick(h, 2.0)
    assert report.ok and all(point["x"] > 0 for point in report.points)
    assert fact(report, "points").text.endswith("; the other sign of x is not tried")
    report = quick(h, X)
    assert not report.ok and "sign" not in fact(report, "points").text
    several = rule(lambda *xs: sum(xs), lambda dy, y, *xs: (dy,) * len(xs))
    text = fact(quick(several, *[1.0] * 5, near=0), "points").text
    assert text.startswith("the given one alone: xs[0] from 1 to 1, xs[1] from 1 to 1, ")
    assert text.endswith(", ...; the other sign of xs[0], xs[1], xs[2], ... is not tried")


def test_points_outside_of_the_domain_are_left_out():
    h = declare(lambda x: jnp.arcsin(x), lambda x, dy: dy / jnp.sqrt((1 - x) * (1 + x)))
    report = quick(h, jnp.asarray([0.98, -0.98, 0.98, 0.98]))
    assert report.ok and len(report.points) == 3
    assert all(abs(p["x"]).max() < 1 for p in report.points)


def test_a_rule_that_fails_near_is_not_blamed_for_it():
    # `f` is defined around 1; the rule, by its own check, is not.
    def rule(x, dy):
        if isinstance(x, jax.core.Tracer) or (np.asarray(x) == 1).all():
            return dy * 2 * x
        raise ValueError("outside of the domain")

    report = quick(declare(jnp.square, rule), ONES)
    assert [r.ok for r in report.rows] == [True]


def test_near_the_point_nothing_is_judged_where_the_judges_disagree():
    def f(x):  # plain autodiff gives 0 near 1, and differences 1
        return jnp.where(x == 1, x, jax.lax.stop_gradient(x))

    assert quick(declare(f, lambda x, dy: jnp.where(x == 1, dy, 0)), ONES).ok
