"""What bypasses the watch is right or an error, never a silent zero; who need not declare.

All have the value `w x`, declared `7 w` by `x` and `5 x` by `w`.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit
from support.ways import DECLARED, WAYS, assert_derivative, gradient

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)
MESH, WHOLE = jax.make_mesh((1,), ("i",)), jax.P()


def mapped(f):
    return jax.shard_map(f, mesh=MESH, in_specs=WHOLE, out_specs=WHOLE)


def late(make, value, slope):
    """Return a function with a derivative of its own."""
    h = make(value)
    if make is jax.custom_jvp:
        h.defjvp(lambda primals, tangents: (h(*primals), tangents[0] * slope(*primals)))
    else:
        h.defvjp(lambda x: (h(x), x), lambda x, dy: (dy * slope(x),))
    return h


def value_of(make):
    return lambda w, x: late(make, lambda x: w * x, lambda x: 3 + 0 * x)(x)


def slope_of(make):
    return lambda w, x: x * jax.grad(late(make, lambda x: 3 * x, lambda x: w + 0 * x))(x)


# How `f` computes `w x`: through a function that closes over the weight.
BYPASSES = {
    "a shard_map": lambda w, x: mapped(lambda a: a * w)(x),
    "a shard_map of a result": lambda w, x: (lambda s: mapped(lambda a: a * s)(x))(w * 1),
    "a shard_map in a jit": lambda w, x: jax.jit(lambda x: mapped(lambda a: a * w)(x))(x),
    "a custom_jvp": value_of(jax.custom_jvp),
    "a custom_vjp": value_of(jax.custom_vjp),
    "a gradient of a custom_jvp": slope_of(jax.custom_jvp),
    "a gradient of a custom_vjp": slope_of(jax.custom_vjp),
    "a callback": lambda w, x: x * jax.pure_callback(lambda w: w, X, lax.stop_gradient(w)),
    "a custom_root": lambda w, x: lax.custom_root(
        lambda y: y - w * x, x, lambda f, y: y - f(y), lambda g, y: y / g(1.0)
    ),
    "a linear solve": lambda w, x: lax.custom_linear_solve(
        lambda y: y / w, x, lambda _, b: w * b, lambda _, b: w * b
    ),
}
MODES = {way: WAYS[way] for way in ("grad", "jvp", "jit(grad)", "grad(jit)", "grad(checkpoint)")}
MODES |= {"hessian": WAYS["hessian"], "shard_map(grad)": lambda f: mapped(gradient(f))}
LOUD = TypeError, ValueError, NotImplementedError, jax.errors.UnexpectedTracerError


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BYPASSES)
def test_what_bypasses_the_watch_is_right_or_an_error(name, mode):
    """With a list of one gradient, with one for each variable, and without any."""

    def loss(rule, variables=None):
        f = lambda w, x: (BYPASSES[name](w, x), rule(w, x))  # noqa: E731
        return lambda w, x: custom_gradient(lambda x: f(w, x), variables=variables)(x)

    for rule in (
        lambda w, x: lambda dy, variables: (7 * dy * w, [5 * dy * x]),
        lambda w, x: lambda dy, variables=(): (7 * dy * w, [5 * dy * x for _ in variables]),
    ):
        with contextlib.suppress(*LOUD):
            assert_derivative(MODES[mode], loss(rule), DECLARED, W, X)
    rule = lambda w, x: lambda dy: 7 * dy * w  # noqa: E731
    with pytest.raises(LOUD):
        MODES[mode](loss(rule))(W, X)
    if "shard_map" in name and mode in ("grad", "jit(grad)"):  # of what has no rule of its own
        assert_same(MODES[mode](loss(rule, "autodiff"))(W, X), (X, 7 * W))


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


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("place", ["in the body of f", "beside it"])
def test_a_learned_threshold_must_be_declared_elsewhere(place, declares):
    """It trained to 0.0, silently, where a spike was written in the body of another function."""

    def loss(threshold, x):
        def spike(x):
            more = lambda dy, variables=(): (7 * dy, [5 * dy for _ in variables])  # noqa: E731
            return (x > threshold).astype(x.dtype), more if declares else lambda dy: 7 * dy

        beside = custom_gradient(spike)

        def f(x):
            h = beside if place == "beside it" else custom_gradient(spike)
            return h(x), lambda dy: jax.vjp(h, x)[1](dy)[0]

        return custom_gradient(f, variables="autodiff")(x)

    if declares:
        assert_same(gradient(loss)(W, X), (jnp.float32(5), jnp.float32(7)))
    else:
        with pytest.raises(TypeError, match="closes over"):
            gradient(loss)(W, X)
