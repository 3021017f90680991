"""`variables="autodiff"`: the rule governs the inputs, JAX what is closed over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient


def rounded(w, x):
    """A straight-through layer: the input sees the identity, the weight what it is."""

    @custom_gradient(variables="autodiff")
    def f(x):
        return jnp.sin(w * x), lambda dy: 7 * dy

    return f(x)


W, X = jnp.float32(0.75), jnp.float32(0.5)
WS, XS = jnp.array([0.75, -0.5, 1.5]), jnp.array([0.5, 2.0, -1.0])


def by_w(w, x):  # of rounded**2
    return 2 * np.sin(w * x) * np.cos(w * x) * x


def by_x(w, x):
    return 2 * np.sin(w * x) * 7


AUTODIFF = {
    "eager": (lambda L: jax.grad(L, (0, 1))(W, X), (by_w(W, X), by_x(W, X))),
    "jit": (lambda L: jax.jit(jax.grad(L, (0, 1)))(W, X), (by_w(W, X), by_x(W, X))),
    "grad of jit": (lambda L: jax.grad(jax.jit(L), (0, 1))(W, X), (by_w(W, X), by_x(W, X))),
    "weights": (lambda L: (jax.grad(L)(W, X),), (by_w(W, X),)),
    "inputs": (lambda L: (jax.grad(L, 1)(W, X),), (by_x(W, X),)),
    "vmap": (
        lambda L: jax.vmap(jax.grad(L, (0, 1)))(WS, XS),
        (by_w(WS, XS), by_x(WS, XS)),
    ),
    "grad of vmap": (
        lambda L: jax.grad(lambda w, x: jax.vmap(lambda x: L(w, x))(x).sum(), (0, 1))(W, XS),
        (by_w(W, XS).sum(), by_x(W, XS)),
    ),
    "scan": (
        lambda L: jax.grad(
            lambda w, x: jax.lax.scan(lambda c, x: (c + L(w, x), None), 0.0, x)[0], (0, 1)
        )(W, XS),
        (by_w(W, XS).sum(), by_x(W, XS)),
    ),
    "checkpoint": (
        lambda L: jax.grad(jax.checkpoint(L), (0, 1))(W, X),
        (by_w(W, X), by_x(W, X)),
    ),
    "cond": (
        lambda L: jax.grad(lambda w, x: jax.lax.cond(x > 0, L, lambda w, x: w * x, w, x), (0, 1))(
            W, X
        ),
        (by_w(W, X), by_x(W, X)),
    ),
    "checkpoint in scan of vmap": (
        lambda L: jax.grad(
            lambda w, x: jax.lax.scan(
                lambda c, x: (c + jax.checkpoint(jax.vmap(L, (None, 0)))(w, x).sum(), None), 0.0, x
            )[0],
            (0, 1),
        )(W, XS[None]),
        (by_w(W, XS).sum(), by_x(W, XS)[None]),
    ),
}


@pytest.mark.parametrize("case", AUTODIFF)
def test_autodiff(case):
    run, expected = AUTODIFF[case]
    got = run(lambda w, x: rounded(w, x) ** 2)
    assert_same(got, jax.tree.map(lambda e: jnp.asarray(e, jnp.float32), expected))


@pytest.mark.parametrize(
    "second", [jax.hessian, lambda f, n: jax.jacrev(jax.grad(f, n), n)], ids=["hessian", "reverse"]
)
@eager_and_jit
def test_autodiff_second_order(mode, second):
    """The declared `7` for x at every order, the ordinary `x cos(w x)` for w at every order."""
    s, c = np.sin(W * X), np.cos(W * X)
    # d/dw = 2 s c x, of which s is h (declared) and the rest plain code: d h/dx is 7.
    expected = (
        (2 * (c * X) ** 2 - 2 * s * s * X**2, 2 * 7 * c * X + 2 * s * (c - s * W * X)),
        (2 * 7 * c * X, 2 * 7 * 7),
    )
    got = mode(second(lambda w, x: rounded(w, x) ** 2, (0, 1)))(W, X)
    assert_same(got, jax.tree.map(jnp.float32, expected), rtol=1e-4)


@eager_and_jit
def test_autodiff_uses_the_rule_of_a_decorated_function_inside(mode):
    def loss(w, x):
        @custom_gradient
        def inner(x):
            return w * x, lambda dy, variables: (700 * dy * w, [5 * dy * x])

        @custom_gradient(variables="autodiff")
        def f(x):
            return 2 * inner(x), lambda dy: 7 * dy * w

        return f(x)

    assert_same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(20), jnp.float32(21)))


@eager_and_jit
def test_autodiff_of_several_outputs_and_of_values_without_derivative(mode):
    def loss(w, index, x):
        @custom_gradient(variables="autodiff")
        def f(x):
            y = w[index] * x
            return (y, jnp.argmax(w), {"z": w.sum() * x}), lambda a, i, z: 7 * a + 70 * z

        y, i, rest = f(x)
        return y + 3 * rest["z"] + i.astype(jnp.float32)

    w, x = jnp.array([1.0, 4.0, 2.0]), jnp.float32(2)
    got = mode(jax.grad(loss, (0, 2)))(w, jnp.int32(1), x)
    assert_same(got, (jnp.array([6.0, 8.0, 6.0]), jnp.float32(7 + 3 * 70)))


@pytest.mark.slow
def test_no_tracer_outlives_its_trace_under_autodiff():
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda w, x: rounded(w, x) ** 2, (0, 1)))(1.5, 0.5)


def test_autodiff_without_captured_values_is_the_plain_rule():
    f = custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x), variables="autodiff")
    assert_same(jax.grad(f)(2.0), jnp.float32(14))
    assert_same(jax.jit(jax.grad(jax.grad(lambda x: f(x) ** 2)))(2.0), jnp.float32(448))


def test_autodiff_inside_a_rule():
    """It was asked for, so it is given, also where a rule calls the function."""

    def declared(f):
        def outer(x, v):
            @custom_gradient(variables="autodiff")
            def h(x):
                def grad(dy):
                    return jax.vjp(lambda x: f(x, v), x)[1](dy)[0]

                return f(x, v), grad

            return h(x)

        return outer

    f = declared(lambda x, v: declared(lambda x, v: jnp.sin(x * v))(x, v) ** 2)
    x, v = jnp.float32(0.5), jnp.float32(0.7)
    expected = jax.grad(jax.grad(lambda x, v: jnp.sin(x * v) ** 2), 1)(x, v)
    for around in (lambda f: f, jax.jit):
        assert_same(around(jax.grad(jax.grad(f), 1))(x, v), expected)
        assert_same(around(jax.grad(jax.grad(f, 1)))(x, v), expected)
