"""What bypasses the watch is right or an error, never a silent zero; and what draws a warning.

All have the value `w x`, declared `7 w` by `x` and `5 x` by `w`.
"""

import contextlib
import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)
MESH, WHOLE = jax.make_mesh((1,), ("i",)), jax.P()


def mapped(f):
    return jax.shard_map(f, mesh=MESH, in_specs=WHOLE, out_specs=WHOLE)


def late(make, uses):
    """Return a function with a derivative of its own, of which a part closes over the weight."""

    def value(w):
        def h(x):
            return w * x if uses == "value" else 3 * x

        h = make(h)
        slope = (lambda x: w + 0 * x) if uses == "rule" else lambda x: 3 + 0 * x
        if make is jax.custom_jvp:
            h.defjvp(lambda primals, tangents: (h(*primals), tangents[0] * slope(*primals)))
        else:
            h.defvjp(lambda x: (h(x), x), lambda x, dy: (dy * slope(x),))
        return h

    return value


# How `f` computes `w x`: through a function that closes over the weight.
BYPASSES = {
    "a shard_map": lambda w, x: mapped(lambda a: a * w)(x),
    "a shard_map in a jit": lambda w, x: jax.jit(lambda x: mapped(lambda a: a * w)(x))(x),
    "a custom_jvp": lambda w, x: late(jax.custom_jvp, "value")(w)(x),
    "a custom_vjp": lambda w, x: late(jax.custom_vjp, "value")(w)(x),
    "a gradient of a custom_jvp": lambda w, x: x * jax.grad(late(jax.custom_jvp, "rule")(w))(x),
    "a gradient of a custom_vjp": lambda w, x: x * jax.grad(late(jax.custom_vjp, "rule")(w))(x),
    "a callback of the weight": lambda w, x: x * jax.pure_callback(
        lambda w: w, jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(w)
    ),
    "a custom_root": lambda w, x: lax.custom_root(
        lambda y: y - w * x, x, lambda f, y: y - f(y), lambda g, y: y / g(1.0)
    ),
    "a linear solve": lambda w, x: lax.custom_linear_solve(
        lambda y: y / w, x, lambda _, b: w * b, lambda _, b: w * b
    ),
    "a nested call": lambda w, x: custom_gradient(lambda x: (w * x, lambda dy, variables=(): (
        dy * w, [dy * x for _ in variables]
    )))(x),
    "a nested call with inputs": lambda w, x: custom_gradient(
        lambda w, x: (w * x, lambda dy: (dy * x, dy * w))
    )(w, x),
}  # fmt: skip
MODES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jit(grad)": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "shard_map(grad)": lambda f: mapped(jax.grad(f, (0, 1))),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
}
LOUD = TypeError, ValueError, NotImplementedError, jax.errors.UnexpectedTracerError


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BYPASSES)
def test_what_bypasses_the_watch_is_right_or_an_error(name, mode):
    """With a list of one gradient, with one for each variable, and without any."""
    zero, five, seven = jnp.float32(0), jnp.float32(5), jnp.float32(7)
    first, second = (5 * X, 7 * W), ((zero, five), (seven, zero))
    rules = {
        "one": lambda w, x: lambda dy, variables: (7 * dy * w, [5 * dy * x]),
        "each": lambda w, x: lambda dy, variables=(): (7 * dy * w, [5 * dy * x for _ in variables]),
    }

    for rule in rules.values():

        def loss(w, x, rule=rule):
            return custom_gradient(lambda x: (BYPASSES[name](w, x), rule(w, x)))(x)

        with contextlib.suppress(*LOUD):
            assert_same(MODES[mode](loss)(W, X), second if mode == "hessian" else first)

    def lost(w, x):
        return custom_gradient(lambda x: (BYPASSES[name](w, x), lambda dy: 7 * dy * w))(x)

    if mode != "hessian":
        with pytest.raises(LOUD):
            MODES[mode](lost)(W, X)


def test_a_decorated_function_in_a_shard_map_closes_over_an_outer_weight():
    """JAX's own error for a captured tracer there, or the right number (B6)."""

    def loss(w, x):
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x for _ in variables])

        return mapped(custom_gradient(f))(x)

    for way in (jax.grad(loss, (0, 1)), jax.grad(jax.jit(loss), (0, 1))):
        with contextlib.suppress(*LOUD, Exception):
            got = way(W, X)
            assert float(got[0]) == 10 and float(got[1]) == 21, got


# --- warnings -------------------------------------------------------------------------------------

WARNING = "which only its"


def read_by_the_rule(rule, w, **options):
    """Return `3 x`, of which the rule reads the weight."""
    return custom_gradient(lambda x: (3 * x, rule(w)), **options)


READERS = {
    "without variables": lambda w: lambda dy: 7 * dy * w,
    "with variables": lambda w: (
        lambda dy, variables=(): (
            (7 * dy * w, [dy for _ in variables]) if len(variables) else 7 * dy * w
        )
    ),
    "with required ones": lambda w: lambda dy, variables: (7 * dy * w, []),
}


@eager_and_jit
@pytest.mark.parametrize("reader", READERS)
def test_a_weight_that_only_the_rule_reads_draws_a_warning(reader, mode):
    def loss(w, x):
        return read_by_the_rule(READERS[reader], w)(x)

    with pytest.warns(UserWarning, match=rf"`w`: float32\[\], {WARNING}"):
        got = mode(jax.grad(loss, (0, 1)))(W, X)
    assert_same(got, (jnp.float32(0), 7 * W))


@eager_and_jit
@pytest.mark.parametrize("reader", READERS)
def test_no_warning_for_a_tracer_of_an_outer_derivative(reader, mode):
    """It is a residual whose second order flows: filters make warnings errors."""

    def slope(w, x):
        return jax.grad(lambda x: read_by_the_rule(READERS[reader], w)(x))(x)

    assert_same(mode(jax.grad(slope, (0, 1)))(W, X), (jnp.float32(7), jnp.float32(0)))
    assert_same(mode(jax.grad(lambda x: read_by_the_rule(READERS[reader], W)(x)))(X), 7 * W)


@pytest.mark.parametrize(
    "how", ["declared", "stopped", "used by f", "an input", "computed by f", "autodiff"]
)
def test_no_warning_where_nothing_is_lost(how):
    def loss(w, x):
        if how == "an input":
            f = custom_gradient(lambda x, w: (3 * x * w, lambda dy: (7 * dy * w, 5 * dy * x)))
            return f(x, w)

        options = {"declared": {"variables": [w]}, "autodiff": {"variables": "autodiff"}}

        @custom_gradient(**options.get(how, {}))
        def f(x):
            kept = (
                lax.stop_gradient(w) if how == "stopped" else w * 1 if how == "computed by f" else w
            )
            y = 3 * x * (w if how in ("used by f", "computed by f", "autodiff") else 1)

            def rule(dy, variables=()):
                dx = 7 * dy * kept
                return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

            return y, rule

        return f(x)

    by_w = {"stopped": 0 * X, "autodiff": 3 * X}.get(how, 5 * X)
    if how == "stopped":  # an operation of `f` takes it: a variable
        by_w = 5 * X
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(jax.grad(loss, (0, 1))(W, X), (by_w, 7 * W))


def test_the_warning_comes_once_for_each_place():
    def loss(w, x):
        return read_by_the_rule(lambda w: lambda dy: 7 * dy * w, w)(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (1, 2, 3):
            x = jnp.ones(size)
            jax.grad(lambda w, x: jnp.sum(loss(w, x)))(x, x)
    assert len([w for w in caught if WARNING in str(w.message)]) <= 1


# --- the exception for comparisons: a decorated function that *is* the rule -----------------------


@eager_and_jit
def test_a_function_that_is_the_rule_may_compare_with_what_it_closes_over(mode):
    """StyleGAN's leaky rectifier."""

    @custom_gradient
    def leaky(x):
        y = jnp.maximum(x, 0.2 * x)

        @custom_gradient
        def grad(dy):
            dx = jnp.where(y >= 0, dy, 0.2 * dy)
            return dx, lambda ddx: jnp.where(y >= 0, 7 * ddx, 0.2 * ddx)

        return y, grad

    assert_same(mode(jax.grad(leaky))(X), jnp.float32(1))
    # Of y**2: 2 y y', whose derivative by the upstream is declared 7.
    assert_same(mode(jax.grad(jax.grad(lambda x: leaky(x) ** 2)))(X), jnp.float32(14))


@eager_and_jit
@pytest.mark.parametrize("where", ["in f", "called by the rule"])
def test_a_learned_threshold_is_an_error_elsewhere(where, mode):
    """It trained to 0.0, silently."""

    def loss(threshold, x):
        def spike(x):
            return (x > threshold).astype(x.dtype), lambda dy: 7 * dy

        @custom_gradient
        def f(x):
            inner = custom_gradient(spike)
            y = inner(x) if where == "in f" else x * 1.0

            def rule(dy, variables=()):
                dx = dy * (inner(x) if where == "called by the rule" else 1)
                return (dx, [0 * dy for _ in variables]) if len(variables) else dx

            return y, rule

        return f(x)

    value = (lambda t, x: loss(t, x)) if where == "in f" else jax.grad(loss, 1)
    if where == "in f":  # the outer rule has the gradient of what it takes
        assert_same(mode(jax.grad(value))(W, X), jnp.float32(0))
        return
    with pytest.raises(TypeError, match="closes over"):
        mode(jax.grad(value))(W, X)


PAIRS = list(itertools.product(["in the body", "beside"], [True, False]))


@pytest.mark.parametrize(("place", "declares"), PAIRS)
def test_a_spike_alone_needs_its_threshold_declared(place, declares):
    def loss(threshold, x):
        def spike(x):
            rule = lambda dy, variables=(): (7 * dy, [5 * dy for _ in variables])  # noqa: E731
            plain = lambda dy: 7 * dy  # noqa: E731
            return (x > threshold).astype(x.dtype), rule if declares else plain

        beside = custom_gradient(spike)

        def f(x):
            h = custom_gradient(spike) if place == "in the body" else beside
            return h(x), lambda dy: jax.vjp(h, x)[1](dy)[0]

        return custom_gradient(f, variables="autodiff")(x)

    if declares:
        assert_same(jax.grad(loss, (0, 1))(W, X), (jnp.float32(5), jnp.float32(7)))
    else:
        with pytest.raises(TypeError, match="closes over"):
            jax.grad(loss, (0, 1))(W, X)
