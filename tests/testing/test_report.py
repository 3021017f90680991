"""The report: how it prints, what it raises, what each row is about, and the facts beside them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import X, clipped, declare, fact, full_square, half_square, notes, quick

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
    _, *ours = caught.traceback  # pytest shows none of these
    assert ours and all(entry.frame.f_locals.get("__tracebackhide__") for entry in ours)


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


COMPLEX = jax.lax.complex(X, X[::-1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "x",
    [2.0, jnp.zeros(3), X.astype("bfloat16"), COMPLEX],
    ids=["number", "zeros", "bfloat16", "complex"],
)
def test_second_order_in_the_upstreams(x):
    """The Hessian of a loss needs the derivative of the rule in its upstreams."""
    stop, w = jax.lax.stop_gradient, 2 * jnp.ones_like(x)

    def several(stopped):
        @functools.partial(custom_gradient, variables=[w], convention="jax")
        def h(x):
            (y, z), pull = jax.vjp(lambda w, x: (w * x, 3 * jnp.sum(x)), w, x)

            def grad(dys, variables):
                dw, dx = pull((dys[0], stopped(dys[2])))
                return (dx,), [dw]

            return (y, jnp.arange(3), z), grad

        return h

    inner = declare(lambda x: 3 * x, lambda x, dy: 3 * stop(dy))
    for h, order, failed in (
        (several(lambda dy: dy), 2, ""),
        (several(stop), 2, "order 2, dy"),
        (inner, 2, "order 2, dy"),
        (declare(jnp.square, lambda x, dy: 2 / 3 * dy * jnp.conj(inner(x))), 3, "order 3, dy"),
    ):
        report = quick(h, x, order=order, near=1)
        assert [f.name for f in report.facts if f.ok is False] == [failed] * bool(failed), report
        assert report.ok is not bool(failed) and all(row.ok for row in report.rows)
        assert not failed or "is dy under a `stop_gradient`?" in fact(report, failed).text
    assert quick(inner, x, order=2, expect="surrogate").ok  # on purpose


def test_the_derivative_in_the_upstreams_is_wrong_by_a_half():
    stop = jax.lax.stop_gradient
    report = quick(declare(jnp.square, lambda x, dy: x * (dy + stop(dy))), X, order=2)
    (wrong,) = [f for f in report.facts if f.ok is False]
    off = wrong.text.removeprefix("the derivative of grad(dy) by dy is off by ").partition(":")[0]
    assert 0.3 < float(off) < 0.7, wrong.text  # a half of it is missing


@pytest.mark.parametrize(
    ("rule", "ok"),
    [(lambda x, dy: 3 * x**2 * dy, True), (lambda x, dy: 3 * x * dy, False)],
    ids=["right", "wrong"],
)
def test_points_nearby_judge_what_autodiff_cannot(rule, ok):
    def cubed(x):  # `stop_gradient`, as every callback needs: autodiff says zero
        return jax.pure_callback(lambda x: np.asarray(x) ** 3, x, jax.lax.stop_gradient(x))

    report = quick(declare(cubed, rule), jnp.ones(3))
    assert report.ok is ok and ("at points[1]: " in report.rows[0].note) is not ok, report


def test_upstreams_that_are_not_judged_at_second_order():
    callback = declare(lambda x: x, lambda x, dy: jax.pure_callback(np.asarray, dy, dy))
    report = quick(callback, X, order=2)
    assert report.ok and "JAX cannot differentiate" in fact(report, "order 2, dy").text
    # Not linear: its derivative is not known.
    stop = jax.lax.stop_gradient
    report = quick(declare(lambda x: x, lambda x, dy: stop(jnp.clip(dy, -50, 50))), X, order=2)
    assert report.ok and "order 2, dy" not in [f.name for f in report.facts]


def test_rule_or_function_that_cannot_run():
    report = quick(declare(jnp.sin, lambda x, dy: jnp.zeros(7)), X)
    assert not report.ok and not report.rows
    (found,) = report.facts
    assert found.name == "rule" and "of shape (7,) for the input `x`" in found.text
    assert "(checking.py:" in found.text and "/" not in found.text.partition(" returned")[0]
    w = jnp.ones(3)
    read = custom_gradient(lambda x: (np.asarray(w) * x, lambda dy, variables: (dy * w, [dy * x])))
    assert "called on traced array" in fact(quick(read, X), "rule").text

    def silent(x, dy):
        raise RuntimeError

    assert fact(quick(declare(jnp.sin, silent), X), "rule").text == "RuntimeError"
    outside = declare(jnp.square, lambda x, dy: dy * jax.pure_callback(lambda x: 2 * x, x, x))
    report = quick(outside, X, order=2)
    assert notes(report) == {"x": ""} and fact(report, "order 2").ok is False
    assert "JAX cannot differentiate" in fact(report, "order 2").text
    with pytest.raises(ZeroDivisionError):
        check_gradient(declare(lambda x: 1 / 0, None), X)


def test_wrappers_of_a_decorated_function():
    # It shows the signature of what it wraps, and takes one argument more.
    scaled = functools.wraps(half_square)(lambda scale, x: scale * half_square(x))
    found = notes(quick(scaled, jnp.float32(2), X))
    assert found == {"args[0]": "", "args[1]": "declared = 0.5 x expected"}

    class Half:
        square = custom_gradient(lambda self, x: (x**2, lambda dy: dy * x))

    for f in (Half.square, Half().square):  # it shows `self`, and takes none
        bound = functools.wraps(f)(lambda x: Half().square(x))
        assert notes(quick(bound, X)) == {"x": "declared = 0.5 x expected"}


def test_nothing_to_differentiate():
    for f, x in [(lambda n: n + 1, jnp.arange(3)), (lambda x: jnp.ones_like(x, int), X)]:
        with pytest.raises(ValueError, match="found nothing to differentiate"):
            quick(declare(f, lambda x, dy: (None,)), x)
    report = quick(full_square, jnp.zeros((0, 2)))
    assert [row.ok for row in report.rows] == [True] and len(report.points) == 1


# --- facts: surrogates, linearity, transformations, infinities ------------------------------------


@pytest.mark.parametrize(
    ("rule", "note"),
    [
        (lambda x, dy: jnp.where(abs(x) < 1, dy, 0), ""),
        (lambda x, dy: -jnp.where(abs(x) < 1, dy, 0), "wrong sign: declared = -1 x expected"),
        (lambda x, dy: 7 * jnp.where(abs(x) < 1, dy, 0), "declared = 7 x expected"),
        (lambda x, dy: (None,), "declared no gradient, expected one"),
    ],
    ids=["right", "sign", "7", "none"],
)
def test_a_surrogate_is_the_gradient_of_its_reference(rule, note):
    sign, x = declare(jnp.sign, rule), np.float32([-2.0, -0.5, 0.25, 3.0])
    report = quick(sign, x, expect="surrogate", reference=lambda x: jnp.clip(x, -1, 1))
    assert report.ok is (not note) and report.rows[0].note == note, report
    assert "expect=" not in str(report)


def test_surrogates_are_measured_at_the_point_alone():
    straight = declare(jnp.round, lambda x, dy: dy)
    assert not quick(straight, X).ok
    report = quick(straight, X, expect="surrogate")
    assert report.ok and report.rows[0].note == "expected is zero" and len(report.points) == 1
    (row,) = quick(straight, X + 0.25, expect="surrogate").rows  # where no step is near
    assert row.differences == row.autodiff == 1 and row.note == "expected is zero"
    report = quick(declare(jnp.sin, lambda x, dy: dy * 1.1 * jnp.cos(x)), X, expect="surrogate")
    assert report.ok and report.rows[0].note == "differs by 0.1 x expected, cosine 1.000"
    report = quick(clipped, X, expect="surrogate")
    assert report.ok and "cosine 0." in report.rows[0].note
    hint = "If the gradient differs on purpose: expect='surrogate'"
    assert fact(quick(clipped, X), "linear").text.endswith(hint)
    assert "surrogate" not in str(report) + str(quick(declare(jnp.sin, lambda x, dy: dy + 1), X))
    none = quick(declare(jnp.sin, lambda x, dy: (None,)), X, expect="surrogate")
    assert none.ok and none.rows[0].note == "declared is zero"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda x, dy: dy, "yes"),
        (lambda x, dy: 0 * dy, "yes"),
        (lambda x, dy: jnp.clip(dy, -0.1, 0.1), "no: grad(dy1 + dy2) is not grad(dy1) + grad(dy2)"),
        (lambda x, dy: dy + 1, "no: grad(0) is not 0; did you forget to multiply by dy?"),
        # Not clipped at upstreams of ordinary size.
        (lambda x, dy: jnp.clip(dy, -50, 50), "no: grad(1000 dy) is not 1000 grad(dy)"),
    ],
    ids=["identity", "zero", "clipped", "affine", "clipped far out"],
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
    power = declare(lambda x: x**1.5, lambda x, dy: dy * 1.5 * jnp.sqrt(x))
    *_, second = quick(power, jnp.asarray([0.0, 1.0]), expect=expect, order=2).rows
    assert (second.order, second.ok) == (2, False)
    assert second.note == "not finite: `jax.debug_nans` shows where"
    double = declare(lambda x: 2 * x, lambda x, dy: 2 * dy)
    report = quick(double, jnp.asarray([[jnp.inf, 1.0], [2.0, 3.0]]), expect=expect)
    assert report.ok and notes(report) == {"x": ""}
    # In double precision it would be finite.
    overflow = declare(jax.nn.softplus, lambda x, dy: dy * jnp.exp(x) / (1 + jnp.exp(x)))
    report = quick(overflow, jnp.asarray([100.0, 1.0]), expect=expect)
    assert not report.ok and report.rows[0].differences < 1e-6
