"""`check_gradient` and `assert_gradient`: no right rule fails, no planted mistake passes.

`RIGHT` and `MISTAKES` build a rule and a random point for it, in a given precision. Each planted
mistake must be found and named; each right rule must pass with every check on.
"""

import contextlib

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import assert_gradient, check_gradient

PRECISIONS = ("float32", "float64")
MANY, FEW = range(200), range(3)


def precision(name):
    if name == "float32":
        return contextlib.nullcontext()
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


class Draw:
    """Random arrays of one precision."""

    def __init__(self, seed, dtype):
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def __call__(self, *shape, scale=1.0):
        return jnp.asarray(scale * self.rng.standard_normal(shape), self.dtype)

    def complex(self, *shape):
        return jax.lax.complex(self(*shape), self(*shape))


RIGHT, MISTAKES = {}, {}


def right(build):
    RIGHT[build.__name__] = build
    return build


def mistake(*notes):
    def register(build):
        MISTAKES[build.__name__] = build, notes
        return build

    return register


# --- right rules -----------------------------------------------------------------------------


@right
def square(draw):
    @custom_gradient
    def h(x):
        return x**2, lambda dy: dy * 2 * x

    return h, (draw(3),)


@right
def scalar_sine(draw):
    @custom_gradient
    def h(x):
        return jnp.sin(x), lambda dy: dy * jnp.cos(x)

    return h, (draw(),)


@right
def python_float(draw):
    @custom_gradient
    def h(x, n):
        return x**n, lambda dy: dy * n * x ** (n - 1)

    return h, (float(draw()), 3)


@right
def product(draw):
    @custom_gradient
    def h(x, y):
        return x * jnp.exp(y), lambda dy: (dy * jnp.exp(y), dy * x * jnp.exp(y))

    return h, (draw(2, 3), draw(2, 3))


@right
def log1pexp(draw):
    @custom_gradient
    def h(x):
        return jnp.logaddexp(x, 0), lambda dy: dy * jax.nn.sigmoid(x)

    return h, (draw(4, scale=10),)


@right
def dense(draw):
    @custom_gradient
    def h(x, w, b):
        y = x @ w + jnp.broadcast_to(b, (x.shape[0], b.shape[0]))
        return y, lambda dy: (dy @ w.T, x.T @ dy, dy.sum(0))

    return h, (draw(4, 3), draw(3, 2), draw(2))


@right
def softmax(draw):
    @custom_gradient
    def h(x):
        y = jax.nn.softmax(x)
        return y, lambda dy: y * (dy - jnp.sum(dy * y))

    return h, (draw(5),)


@right
def norm(draw):
    @custom_gradient
    def h(x):
        y = jnp.sqrt(jnp.sum(x**2))
        return y, lambda dy: dy * x / y

    return h, (draw(4),)


@right
def matrix_product(draw):
    @custom_gradient
    def h(a, b):
        return a @ b, lambda dy: (dy @ b.T, a.T @ dy)

    return h, (draw(3, 3), draw(3, 3))


@right
def solve(draw):
    @custom_gradient
    def h(a, b):
        x = jnp.linalg.solve(a, b)

        def grad(dy):
            db = jnp.linalg.solve(a.T, dy)
            return -jnp.outer(db, x), db

        return x, grad

    return h, (draw(3, 3, scale=0.1) + 2 * jnp.eye(3, dtype=draw.dtype), draw(3))


@right
def complex_square(draw):
    @custom_gradient
    def h(z):
        return z * z, lambda dy: dy * jnp.conj(2 * z)

    return h, (draw.complex(3),)


@right
def complex_square_in_jax_convention(draw):
    @custom_gradient(convention="jax", forward_mode=True)
    def h(z):
        return z * z, lambda dy: dy * 2 * z

    return h, (draw.complex(3),)


@right
def complex_modulus(draw):
    @custom_gradient
    def h(z):
        y = jnp.abs(z)
        return y, lambda dy: jax.lax.complex(dy / y, jnp.zeros_like(y)) * z

    return h, (draw.complex(3),)


@right
def phase(draw):
    @custom_gradient
    def h(x):
        y = jax.lax.complex(jnp.cos(x), jnp.sin(x))
        return y, lambda dy: jnp.imag(jnp.conj(y) * dy)

    return h, (draw(3),)


@right
def layer_of_pytree(draw):
    @custom_gradient
    def h(params, x, activation="tanh"):
        assert activation == "tanh"
        y = jnp.tanh(params["w"] @ x)

        def grad(dy):
            da = dy * (1 - y**2)
            return {"w": jnp.outer(da, x), "steps": None}, params["w"].T @ da, None

        return {"y": y, "steps": params["steps"] + 1}, lambda dsteps, dy: grad(dy)

    return h, ({"w": draw(2, 3), "steps": jnp.arange(2)}, draw(3), "tanh")


@right
def relu(draw):
    @custom_gradient
    def h(x):
        return jnp.maximum(x, 0), lambda dy: jnp.where(x > 0, dy, 0)

    return h, (draw(6),)


@right
def kinks(draw):
    @custom_gradient
    def h(x):
        return jnp.abs(x), lambda dy: dy * jnp.sign(x)

    return h, (draw(4).at[1].set(0.0),)


@right
def two_outputs(draw):
    @custom_gradient
    def h(x):
        return (x**3, jnp.sum(x)), lambda d1, d2: d1 * 3 * x**2 + jnp.full_like(x, d2)

    return h, (draw(3),)


@right
def unused_argument(draw):
    @custom_gradient
    def h(x, y):
        return x + jnp.round(y), lambda dy: (dy, None)

    return h, (draw(3), draw(3))


@right
def cumulative_sum(draw):
    @custom_gradient
    def h(x):
        return jnp.cumsum(x), lambda dy: jnp.cumsum(dy[::-1])[::-1]

    return h, (draw(5),)


@right
def gather(draw):
    @custom_gradient
    def h(x, index):
        return x[index], lambda dy: (jnp.zeros_like(x).at[index].add(dy), None)

    return h, (draw(5), jnp.array([0, 3, 3]))


@right
def keyword_only(draw):
    @custom_gradient
    def h(x, *, scale):
        return x * scale, lambda dy, variables: (dy * scale, [jnp.sum(dy * x)])

    return h, (draw(3),), {"scale": draw()}


@right
def declared_variables(draw):
    def h(params, x):
        @custom_gradient(variables=params, forward_mode=True)
        def layer(x):
            y = params["w"] * x

            def grad(dy, variables):
                return dy * variables["w"], {"w": dy * x}

            return y, grad

        return layer(x)

    return h, ({"w": draw(3)}, draw(3))


@right
def captured_constant(draw):
    w = draw(3)

    @custom_gradient
    def h(x):
        return w * jnp.cos(x), lambda dy: -w * jnp.sin(x) * dy

    return h, (draw(3),)


@right
def units_far_apart(draw):
    @custom_gradient
    def h(x, y):
        return x * y, lambda dy: (dy * y, dy * x)

    return h, (draw(3, scale=1e-6), draw(3, scale=1e6))


@right
def domain_with_an_edge(draw):
    @custom_gradient
    def h(x):
        return jnp.log(x), lambda dy: dy / x

    return h, (jnp.exp(draw(4, scale=4)),)


# --- the five planted mistakes -------------------------------------------------------------------


@mistake("declared = 0.5 x expected")
def forgotten_factor(draw):
    @custom_gradient
    def h(x):
        return x**2, lambda dy: dy * x

    return h, (draw(3),)


@mistake()
def unsummed_bias(draw):
    @custom_gradient
    def h(x, b):
        return x + jnp.broadcast_to(b, x.shape), lambda dy: (dy, dy)

    return h, (draw(4, 3), draw(3))


@mistake("wrong sign: declared = -1 x expected")
def wrong_sign(draw):
    @custom_gradient
    def h(x):
        return jnp.cos(x), lambda dy: dy * jnp.sin(x)

    return h, (draw(3),)


@mistake("swapped with `y`?", "swapped with `x`?")
def swapped_pair(draw):
    @custom_gradient
    def h(x, y):
        return x * y, lambda dy: (dy * x, dy * y)

    return h, (draw(3), draw(3))


@mistake("declared = conjugate of expected")
def conjugate(draw):
    @custom_gradient
    def h(z):
        return z * z, lambda dy: dy * 2 * z

    return h, (draw.complex(3),)


def check(build, seed, dtype, **options):
    h, args, *kwargs = build(Draw(seed, dtype))
    return check_gradient(h, *args, kwargs=kwargs[0] if kwargs else None, seed=seed, **options)


def assert_found(name, seed, dtype):
    build, notes = MISTAKES[name]
    report = check(build, seed, dtype, transforms=())
    assert not report.ok, (name, seed, dtype, report)
    assert tuple(row.note for row in report.rows) == notes, (seed, dtype, report)
    if not notes:
        assert "did you forget to sum over axis 0" in report.facts[0].text


# In float32 the judges are in float64 as well, so that one precision shows nearly everything.
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name, dtype):
    with precision(dtype):
        report = check(RIGHT[name], 0, dtype, transforms=())
        assert report.ok, report


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("layer_of_pytree", "product") else pytest.mark.slow)
        for n in RIGHT
    ],
)
def test_no_false_alarm_with_every_check(name):
    report = check(RIGHT[name], 0, "float32", order=2, full=True, linear=True)
    assert report.ok, report


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", MISTAKES)
def test_no_miss(name, dtype):
    with precision(dtype):
        for seed in range(3):
            assert_found(name, seed, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm_over_many_seeds(name, dtype):
    with precision(dtype):
        for seed in range(200):
            report = check(RIGHT[name], seed, dtype, transforms=())
            assert report.ok, (seed, report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", MISTAKES)
def test_no_miss_over_many_seeds(name, dtype):
    with precision(dtype):
        for seed in range(200):
            assert_found(name, seed, dtype)


# --- the report ------------------------------------------------------------------------------

X = jnp.asarray([0.5, -1.2, 2.0], jnp.float32)


def quick(h, *args, **options):
    return check_gradient(h, *args, **{"transforms": (), **options})


def note(h, *args, **options):
    """Return the note of the only row, which must have failed."""
    report = quick(h, *args, **options)
    (row,) = report.rows
    assert not row.ok and not report.ok
    return row.note


def fact(report, name):
    (found,) = [f for f in report.facts if f.name == name]
    return found


def declare(f, rule, **options):
    """Decorate `f` of one argument with `rule(x, dy)`."""

    @custom_gradient(**options)
    def h(x):
        return f(x), lambda dy: rule(x, dy)

    return h


half_square = declare(jnp.square, lambda x, dy: dy * x)
full_square = declare(jnp.square, lambda x, dy: dy * 2 * x)
clipped = declare(lambda x: x, lambda x, dy: jnp.clip(dy, -0.1, 0.1))


def test_prints_as_a_table():
    lines = str(quick(half_square, X)).splitlines()
    assert lines[0] == "Gradient of `declare.h`: WRONG"
    assert lines[1].split() == ["order", "argument", "type", "differences", "autodiff", "precision"]
    assert lines[2].split()[:5] == ["1", "x", "float32[3]", "5.0e-01", "5.0e-01"]
    assert lines[2].endswith("WRONG: declared = 0.5 x expected")
    assert lines[3].split() == ["linear", "yes"]
    assert "x         float32[3]" in lines[2] and len(lines) == 4
    assert repr(quick(full_square, X)).startswith("Gradient of `declare.h`: ok\n")


def test_raises_with_the_table():
    wrong, fine = quick(half_square, X), quick(full_square, X)
    assert fine and fine.ok and fine.raise_if_failed() is None
    assert not wrong
    with pytest.raises(AssertionError) as caught:
        wrong.raise_if_failed()
    assert str(caught.value) == str(wrong)
    assert_gradient(full_square, X, transforms=())
    with pytest.raises(AssertionError, match=r"declared = 0\.5 x expected"):
        assert_gradient(half_square, X, transforms=())


def test_is_deterministic():
    assert str(quick(clipped, X, expect="surrogate")) == str(quick(clipped, X, expect="surrogate"))
    other = quick(clipped, X, expect="surrogate", seed=1)
    assert str(other) != str(quick(clipped, X, expect="surrogate"))


def test_names_every_argument():
    @custom_gradient
    def h(params, x, mode, *rest, y):
        return (
            params["w"][0] * x * params["n"] + rest[0] + y,
            lambda dy, variables: (
                [{"n": None, "w": [dy * x]}, dy * params["w"][0], None, dy],
                [dy],
            ),
        )

    params = {"w": [X], "n": jnp.float32(1)}
    report = quick(h, params, X, "mode", X, kwargs={"y": X})
    assert [r.argument for r in report.rows] == [
        "params['n']",
        "params['w'][0]",
        "x",
        "rest[0]",
        "y",
    ]
    assert [r.ok for r in report.rows] == [False, True, True, True, True]
    assert report.rows[0].note == "declared no gradient, expected one"
    assert report.rows[0].type == "float32[]"


def test_arguments_by_name():
    (row,) = quick(half_square, kwargs={"x": X}).rows
    assert row.argument == "x" and row.note == "declared = 0.5 x expected"


def test_unknown_expectation():
    with pytest.raises(ValueError, match="got expect='straight'"):
        check_gradient(full_square, X, expect="straight")


# --- naming mistakes ---------------------------------------------------------------------------


def test_names_other_mistakes():
    square = 4 * jnp.eye(3) + jnp.arange(9.0).reshape(3, 3)
    zero = declare(jnp.sin, lambda x, dy: None)
    assert note(zero, X) == "declared no gradient, expected one"
    transposed = declare(lambda a: a @ a @ a, lambda a, dy: _cube(a, dy).T)
    assert note(transposed, square) == "declared = transpose of expected"
    rounding = declare(jnp.round, lambda x, dy: dy)
    assert note(rounding, X) == "expected no gradient"
    doubled = declare(jnp.mean, lambda x, dy: jnp.full_like(x, dy))
    assert note(doubled, X) == "declared = 3 x expected"
    other = declare(jnp.sin, lambda x, dy: dy * jnp.exp(x))
    assert note(other, X).startswith("declared ")
    conjugated = declare(lambda z: z**3, lambda z, dy: dy * jnp.conj(3 * z**2), convention="jax")
    assert note(conjugated, jax.lax.complex(X, X[::-1])) == "declared = conjugate of expected"


def _cube(a, dy):
    return jax.vjp(lambda a: a @ a @ a, a)[1](dy)[0]


def test_names_a_gradient_in_the_wrong_place():
    @custom_gradient
    def h(x, y):
        return x * jnp.exp(y), lambda dy: (dy * jnp.exp(y), dy * jnp.exp(y))

    first, second = quick(h, X, X[::-1]).rows
    assert first.ok and second.note == "declared that of `x`"


def test_one_wrong_entry_is_found():
    x = jnp.linspace(0.1, 2, 1000)
    h = declare(jnp.sin, lambda x, dy: (dy * jnp.cos(x)).at[617].multiply(1.01))
    assert not quick(h, x).ok
    assert quick(declare(jnp.sin, lambda x, dy: dy * jnp.cos(x)), x).ok


def test_full_jacobian_finds_the_entry():
    matrix = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    h = declare(lambda x: x**3, lambda x, dy: (dy * 3 * x**2).at[1, 0].add(dy[1, 0]))
    assert note(h, matrix, full=True) == "declared 28, expected 27 at [1, 0]"
    assert quick(declare(lambda x: x**3, lambda x, dy: dy * 3 * x**2), matrix, full=True).ok
    z = jax.lax.complex(X, X[::-1])
    assert quick(declare(jnp.square, lambda z, dy: dy * jnp.conj(2 * z)), z, full=True).ok


def test_second_order():
    h = declare(jnp.square, lambda x, dy: dy * 2 * jax.lax.stop_gradient(x))
    assert quick(h, X).ok
    first, second = quick(h, X, order=2).rows
    assert first.ok and not second.ok
    assert (second.order, second.note) == (2, "declared no gradient, expected one")
    assert [r.order for r in quick(full_square, X, order=3).rows] == [1, 2, 3]


def test_rule_that_cannot_run():
    report = quick(declare(jnp.sin, lambda x, dy: jnp.zeros(7)), X)
    assert not report.ok and not report.rows
    (found,) = report.facts
    assert found.name == "rule" and "of shape (7,) for the input `x`" in found.text
    assert "(test_testing.py:" in found.text and "/" not in found.text.partition(" returned")[0]


def test_function_that_cannot_run():
    with pytest.raises(ZeroDivisionError):
        check_gradient(declare(lambda x: 1 / 0, None), X)


# --- which judge -------------------------------------------------------------------------------


def test_where_plain_autodiff_fails():
    h = declare(lambda x: jnp.log(1 + jnp.exp(x)), lambda x, dy: dy * jax.nn.sigmoid(x))
    with precision("float64"):
        assert quick(h, jnp.float64(50.0)).ok
    root = declare(lambda x: jnp.sqrt(x * x), lambda x, dy: dy * jnp.sign(x))
    (row,) = quick(root, jnp.zeros(3)).rows  # plain autodiff gives nan at the kink
    assert row.ok and row.autodiff is None and row.differences == 0


def test_where_plain_autodiff_stops():
    h = declare(lambda x: jax.lax.stop_gradient(x) * x, lambda x, dy: dy * 2 * x)
    (row,) = quick(h, X).rows
    assert row.ok and row.autodiff == pytest.approx(0.5) and row.note == "plain autodiff differs"
    assert note(declare(lambda x: jax.lax.stop_gradient(x) * x, lambda x, dy: dy * x), X)


def test_at_a_jump_plain_autodiff_decides():
    at_jump = jnp.asarray([0.5, 1.5])
    assert quick(declare(jnp.round, lambda x, dy: None), at_jump).ok
    assert not quick(declare(jnp.round, lambda x, dy: dy), at_jump).ok


def test_at_a_kink_every_slope_between_is_right():
    for slope in (-1.0, 0.0, 0.3, 1.0):
        h = declare(jnp.abs, lambda x, dy, s=slope: dy * jnp.where(x == 0, s, jnp.sign(x)))
        assert quick(h, X.at[0].set(0)).ok
    h = declare(jnp.abs, lambda x, dy: dy * jnp.where(x == 0, 1.5, jnp.sign(x)))
    assert not quick(h, X.at[0].set(0)).ok


def only_float32(f):
    def g(x):
        assert x.dtype == jnp.float32
        return f(x)

    return g


def test_function_of_float32_alone():
    exact = declare(only_float32(jnp.sin), lambda x, dy: dy * jnp.cos(x))
    (row,) = quick(exact, X, order=2).rows[:1]
    assert row.ok and row.precision is None and 0 < row.differences < 2e-3
    wrong = declare(only_float32(jnp.sin), lambda x, dy: dy * 1.05 * jnp.cos(x))
    assert note(wrong, X) == "declared = 1.05 x expected"
    # Hidden from the dtypes: the noise is seen in the differences themselves.
    hidden = declare(
        lambda x: jnp.sin(x.astype(jnp.float32)).astype(x.dtype), lambda x, dy: dy * jnp.cos(x)
    )
    assert quick(hidden, X).ok


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype):
    x = X.astype(dtype)
    (row,) = quick(full_square, x).rows
    assert row.ok and row.type == f"{dtype}[3]" and row.differences < 1e-6
    assert note(half_square, x) == "declared = 0.5 x expected"


def test_imprecise_rule():
    h = declare(lambda x: x, lambda x, dy: dy * ((x + 1e4) - 1e4) / x)
    (row,) = quick(h, jnp.asarray([1e-3, 2e-3], jnp.float32)).rows
    assert row.ok and row.precision > 2e-3 and row.note == "imprecise in its own dtype"


def test_reference():
    @jax.custom_vjp
    def h(x):
        return jnp.sin(x)

    h.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (2 * dy * jnp.cos(x),))
    (row,) = quick(h, X).rows
    assert row.note == "declared = 2 x expected" and row.autodiff is None
    (row,) = quick(h, X, reference=jnp.sin).rows
    assert row.autodiff == pytest.approx(0.5, rel=0.02)


def test_what_calls_a_decorated_function():
    for h in (jax.jit(half_square), lambda x: half_square(x), jax.vmap(half_square)):
        assert note(h, X) == "declared = 0.5 x expected"

    class Model:
        @custom_gradient
        def f(self, x):
            return x**2, lambda dy: dy * x

    (row,) = quick(Model().f, X).rows
    assert row.argument == "x" and row.autodiff == pytest.approx(0.5)


def test_variables_are_checked_as_arguments():
    w = X + 3

    @custom_gradient(variables=w)
    def layer(x):
        return w * x, lambda dy, variables: (dy * variables, dy)

    report = quick(layer, X)
    assert report.ok and "closed over, not checked" in fact(report, "variables").text

    def of_both(w, x):
        @custom_gradient(variables=w)
        def layer(x):
            return w * x, lambda dy, variables: (dy * variables, dy)

        return layer(x)

    first, second = quick(of_both, w, X).rows
    assert second.ok and not first.ok and first.argument == "w"


def test_nothing_to_differentiate():
    assert quick(declare(lambda n: n + 1, lambda n, dy: None), jnp.arange(3)).rows == ()
    (row,) = quick(
        declare(lambda x: jnp.int32(2) * jnp.ones_like(x, int), lambda x, dy: None), X
    ).rows
    assert row.ok
    (row,) = quick(full_square, jnp.zeros((0, 2))).rows
    assert row.ok


# --- facts -------------------------------------------------------------------------------------


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
    found = fact(quick(full_square, X, linear=True), "linear")
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
        assert fact(quick(h, X, expect="surrogate", linear=True), "linear").ok is False


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
    report = quick(declare(jnp.square, lambda x, dy: dy * 2 * x, forward_mode=True), X)
    assert report.ok and fact(report, "forward mode").ok
    assert fact(report, "forward mode").text.startswith("agrees with reverse mode")
    report = quick(full_square, X, forward=True)
    assert not report.ok and "forward-mode" in fact(report, "forward mode").text


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
    assert fact(report, "value").text.endswith(f"first in `log` (test_testing.py:{line})")
