"""Each wrong rule is found and named; no right rule is blamed, at any random point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checked import COMPLEX, RIGHT, WRONG, X, rule
from support.helpers import sample

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import assert_gradient, check_gradient

SEEDS = range(1, 10_000)


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.name)
def test_a_wrong_rule_is_found_and_named(row):
    report = check_gradient(row.decorated(), *row.args, **row.options)
    failed = [fact.text for fact in report.facts if fact.ok is False]
    if failed:
        assert row.says and row.says in failed[-1], report
    else:
        for found, says in zip(report.rows, row.says.split("|"), strict=True):
            assert found.note.startswith(says) and found.ok is not bool(says), report
    assert not report.ok and not report
    with pytest.raises(AssertionError) as caught:
        assert_gradient(row.decorated(), *row.args, **row.options)
    assert str(caught.value) == str(report)


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("row", RIGHT, ids=lambda row: row.name)
def test_no_right_rule_is_blamed(row, x64):
    """At any seed: `--count` takes more of them."""
    with jax.enable_x64(x64):
        for seed in (0, *sample(SEEDS, 1)):
            report = check_gradient(row.decorated(), *row.args, **row.options, seed=seed)
            assert report and report.ok, (seed, report)
            assert all(fact.ok is None for fact in report.facts)


@pytest.mark.parametrize("x", [jnp.zeros(()), X.at[0].set(0), jnp.zeros(3), jnp.zeros(100)])
@pytest.mark.parametrize("slope", [0.0, 0.3, 1.0])
def test_at_a_kink_it_is_judged_near_it(x, slope):
    """Several slopes are right there; if JAX has the same one, it is."""
    h = rule(jnp.abs, lambda dy, y, x: dy * jnp.where(x == 0, slope, jnp.sign(x)))
    (row,), (alone,) = check_gradient(h, x).rows, check_gradient(h, x, near=0).rows
    note, judged = "a kink at the given point", True if slope == jax.grad(jnp.abs)(0.0) else None
    assert (row.ok, row.note) == (True, note + ", judged near it")
    assert (alone.ok, alone.note) == (judged, note)
    for wrong in (lambda dy, y, x: 2 * dy * jnp.sign(x), lambda dy, y, x: dy):
        assert not check_gradient(rule(jnp.abs, wrong), x).ok


@pytest.mark.parametrize("factor", [1, 2])
def test_what_rounds_inside_is_judged_as_coarsely(factor):
    def f(x):  # as a kernel does, with `stop_gradient` around its argument
        return jnp.tanh(jax.lax.stop_gradient(x).astype("float32")).astype(x.dtype)

    h = rule(f, lambda dy, y, x: factor * dy * (1 - jnp.tanh(x) ** 2))
    (row,) = check_gradient(h, X).rows
    assert row.ok is (factor == 1)


def test_a_primal_returns_what_the_function_does():
    y, f = jnp.tanh, lambda x: (jnp.tanh(x), lambda dy: dy * (1 - y(x) ** 2))
    h = lambda primal: custom_gradient(f, primal=primal)  # noqa: E731
    text = "another one where JAX differentiates: does `primal` return what the function does?"
    assert check_gradient(h(y), X) and not check_gradient(jax.jit(h(jnp.square)), X).ok
    near = h(lambda x: y(x) + 1e-3 * (x - X))  # another value near the point alone
    assert not check_gradient(lambda x: near(x), X).ok
    for wrong in (jnp.square, jnp.sum, lambda x: [y(x)], lambda x: y(x).astype("bfloat16")):
        (fact,) = check_gradient(h(wrong), X).facts
        assert fact.ok is False and fact.text == text


def test_at_a_jump_plain_autodiff_decides():
    at_jump, flat = jnp.asarray([0.5, 1.5]), rule(jnp.round, lambda dy, y, x: None)
    for x, differences in (at_jump, None), (at_jump + 0.2, 0.0):
        (row,) = check_gradient(flat, x).rows
        assert (row.ok, row.differences, row.autodiff) == (True, differences, 0.0)
        noisy = "finite differences are too noisy here (a jump, or a minimum?)"
        assert row.note == noisy * (differences is None)
    assert not check_gradient(rule(jnp.round, lambda dy, y, x: dy), at_jump).ok


def test_a_jump_within_the_step_is_no_kink():
    step = rule(lambda v: jnp.heaviside(v, 0.5), lambda dy, y, v: dy / (1 + 10 * abs(v)) ** 2)
    (row,) = check_gradient(
        lambda t: step(1.001 - t.astype("float32")), jnp.float32(1), near=0
    ).rows
    assert (row.ok, row.differences) == (None, None)


@pytest.mark.parametrize(
    "grad", [lambda dy: 0.01 * dy / jnp.linalg.norm(dy), jax.nn.relu, abs, jax.nn.leaky_relu]
)
def test_a_gradient_that_is_not_linear_is_found_at_any_seed(grad):
    h = rule(lambda x: x, lambda dy, y, x: grad(dy))
    for seed in range(12):
        facts = check_gradient(h, jnp.float32(2), seed=seed, near=0).facts
        assert [fact.ok for fact in facts if fact.name == "linear in dy"] == [False]


def test_where_plain_autodiff_is_wrong_differences_decide(x64):
    h = rule(lambda x: jnp.log(1 + jnp.exp(x)), lambda dy, y, x: dy * jax.nn.sigmoid(x))
    assert check_gradient(h, 50.0).ok
    root = rule(lambda x: jnp.sqrt(x * x), lambda dy, y, x: dy * jnp.sign(x))
    (row,) = check_gradient(root, jnp.zeros(3), near=0).rows  # plain autodiff gives nan at the kink
    assert row.ok is row.autodiff is None
    stops = rule(lambda x: jax.lax.stop_gradient(x) * x, lambda dy, y, x: dy * 2 * x)
    (row,) = check_gradient(stops, X).rows
    assert row.ok and row.autodiff == pytest.approx(0.5) and row.note == "plain autodiff differs"


def test_what_no_judge_can_tell_is_not_judged():
    h = rule(jnp.sin, lambda dy, y, x: dy * jnp.cos(x))
    report = check_gradient(lambda x: h(x), jnp.float32(1.2345e9))
    assert report.rows[0].ok is None and report.ok and not report
    with pytest.raises(AssertionError, match="not judged: finite differences are too noisy here"):
        assert_gradient(lambda x: h(x), jnp.float32(1.2345e9))
    assert_gradient(lambda x: h(x), jnp.float32(1.2345e9), unchecked="allow")


def test_the_precision_of_the_judges():
    wrong = rule(jnp.sin, lambda dy, y, x: dy * 1.05 * jnp.cos(x))
    for x in (X, X.astype("bfloat16"), X.astype("float16")):  # judged in double precision
        (row,) = check_gradient(wrong, x).rows
        assert row.note == "declared = 1.05 * expected"
        assert row.differences == pytest.approx(0.05 / 1.05, rel=1e-4)
    assert check_gradient(wrong, X, tolerance=0.1).ok

    def only_float32(x):
        assert x.dtype == jnp.float32
        return jnp.sin(x)

    for factor in (1, 1.01):  # in float32, with the tolerance of it
        h = rule(only_float32, lambda dy, y, x: factor * dy * jnp.cos(x))  # noqa: B023
        assert check_gradient(h, X).ok is (factor == 1)


# --- surrogates -----------------------------------------------------------------------------------


def straight_through(x):
    return 2 * x + jax.lax.stop_gradient(jnp.sign(x) - 2 * x)


SURROGATES = {  # of a sign, its reference, and what is said of it
    "a window": (
        lambda dy, y, x: jnp.where(abs(x) < 1, dy, 0), lambda x: jnp.clip(x, -1, 1), ""),
    "straight through": (lambda dy, y, x: 2 * dy, straight_through, ""),
    "another factor": (lambda dy, y, x: 3 * dy, straight_through, "declared = 1.5 * expected"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SURROGATES)
def test_a_surrogate_is_the_gradient_of_its_reference(kind):
    grad, reference, note = SURROGATES[kind]
    sign, x = rule(jnp.sign, grad), jnp.asarray([-2.0, -0.5, 0.25, 3.0])
    (row,) = check_gradient(sign, x, expect="surrogate", reference=reference).rows
    assert (row.note, row.ok) == (note, not note)


def test_a_surrogate_without_a_reference_is_measured_at_the_point_alone():
    for f, grad, note in (
        (jnp.round, lambda dy, y, x: dy, "expected is zero"),
        (jnp.sin, lambda dy, y, x: None, "declared is zero"),
        (jnp.sin, lambda dy, y, x: 1.1 * dy * jnp.cos(x),
         "relative error 0.1, cosine 1.000"),
        (lambda x: x, lambda dy, y, x: jnp.clip(dy, -0.1, 0.1), "relative error "),
    ):  # fmt: skip
        report = check_gradient(rule(f, grad), X, expect="surrogate")
        (row,) = report.rows
        assert report.ok and not report and (row.ok, len(report.points)) == (None, 1)
        assert row.note.startswith(note)
        assert [fact.ok for fact in report.facts if fact.name == "linear in dy"] == [None]


def test_a_surrogate_is_linear_if_its_reference_is():
    clip = lambda x: rule(lambda x: x, lambda dy, y, x: jnp.clip(dy, -9, 9))(x)  # noqa: E731
    for reference, ok in ((lambda x: x, False), (lambda x: 1.0 * clip(x), True)):
        report = check_gradient(clip, X, expect="surrogate", reference=reference)
        assert report.ok is ok, report


@pytest.mark.parametrize("factor", [1, 1.5])
def test_at_a_minimum_and_where_all_is_tiny(factor, x64):
    poisson = lambda x: 300 * x - jnp.exp(x) - 1414.9  # noqa: E731
    h = rule(poisson, lambda dy, y, x: -factor * 300 * dy * jnp.expm1(x - jnp.log(300.0)))
    assert check_gradient(h, jnp.log(300.0)).ok is (factor == 1)
    (row,) = check_gradient(lambda x: h(x), jnp.log(300.0)).rows  # which no autodiff judges
    assert (row.ok, row.note.endswith("judged near it")) == (factor == 1,) * 2
    # And what is tiny has precision.
    cut = lambda dy, y, x: dy * jnp.where(x < -290, 0, jax.nn.sigmoid(x))  # noqa: E731
    assert not check_gradient(rule(jax.nn.softplus, cut), -300.0).ok
    square = rule(lambda x: 1e-300 * x * x, lambda dy, y, x: factor * 2e-300 * dy * x)
    sine = rule(jnp.sin, lambda dy, y, x: factor * dy * jnp.cos(x))
    for h, x in (square, X), (sine, jnp.float64(1e-200)):
        assert check_gradient(h, x).ok is (factor == 1)
    softplus = rule(jax.nn.softplus, lambda dy, y, x: dy * jax.nn.sigmoid(x))
    assert all(check_gradient(softplus, x, order=2) for x in (-550.0, -700.0, -708.0, -745.0))


LOW, MANY = jnp.ones(8, "bfloat16"), jnp.ones(1000)
ROUNDED = {  # in low precision: right and wrong
    "an output": (lambda w, x: jnp.dot(w, x).astype("bfloat16"), (jnp.ones(8), jnp.ones(8))),
    "inside": (lambda w, x: (w * x).astype("bfloat16").astype(x.dtype), (jnp.ones(3), X)),
    "all": (jnp.multiply, (LOW, LOW)),
    "a sum": (lambda w, x: jnp.sum(w.astype("float32") * x).astype(w.dtype), (MANY, MANY)),
}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("factor", [0, 0.5, 1, 1.2, 2])
def test_low_precision_hides_no_mistake_and_makes_none(kind, factor):
    f, args = ROUNDED[kind]
    scaled = lambda dy, y, *xs: [factor * g for g in jax.vjp(f, *xs)[1](dy)]  # noqa: E731
    for seed in range(3):
        assert check_gradient(rule(f, scaled), *args, seed=seed).ok is (factor == 1)


@pytest.mark.parametrize("factor", [1, 1.02])
def test_a_cast_to_float32_hides_no_small_factor(factor):
    for f in (ROUNDED["a sum"][0], lambda w, x: jnp.sin(w.astype("float32") * x).astype(w.dtype)):
        scaled = lambda dy, y, *xs, f=f: [factor * g for g in jax.vjp(f, *xs)[1](dy)]  # noqa: E731
        assert check_gradient(rule(f, scaled), MANY, MANY).ok is (factor == 1)


REFERENCES = {
    "its own error": (lambda x: 1 / 0, ZeroDivisionError, "zero"),
    "other arguments": (lambda: X, TypeError, "takes 0 positional arguments"),
    "another shape": (jnp.sum, ValueError, "outputs of the same shapes as those of `h`"),
    "no derivative": (np.sin, jax.errors.TracerArrayConversionError, "traced array"),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_that_cannot_be_compared_is_an_error(kind):
    reference, error, text = REFERENCES[kind]
    with pytest.raises(error, match=text):
        check_gradient(rule(jnp.sin, lambda dy, y, x: dy * jnp.cos(x)), X, reference=reference)


def test_the_derivative_of_jax_itself_is_checked_by_a_reference():
    h = jax.custom_vjp(jnp.sin)
    h.defvjp(lambda z: (jnp.sin(z), z), lambda z, dy: (2 * dy * jnp.conj(jnp.cos(z)),))
    (row,) = check_gradient(h, X).rows
    assert row.note == "declared = 2 * expected" and row.autodiff is None
    (row,) = check_gradient(h, X, reference=jnp.sin).rows
    assert row.autodiff == pytest.approx(0.5, rel=0.02)
    assert check_gradient(jnp.square, COMPLEX).ok
