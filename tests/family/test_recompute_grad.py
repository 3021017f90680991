"""`recompute_grad(f)` has the derivatives of `f` itself, and keeps the arguments alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient, recompute_grad

X = jnp.asarray(np.linspace(0.2, 1.4, 4), jnp.float32)


def body(x):
    return jnp.sin(x) * jnp.exp(x)


@custom_gradient
def seven(x):
    return x * x, lambda dy: 7 * dy * x


def kept(f, *args):
    """Return the number of array elements that the backward pass of `f` keeps."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(jax.vjp(f, *args)[1]))


# --- recompute_grad: derivatives ----------------------------------------------------------------


def _derivatives(f):
    total = lambda x: jnp.sum(f(x))  # noqa: E731
    return {
        "value": f,
        "gradient": jax.grad(total),
        "compiled": jax.jit(jax.grad(total)),
        "second": jax.grad(lambda x: jnp.sum(jax.grad(total)(x) ** 2)),
        "jvp": lambda x: jax.jvp(f, (x,), (2 * x,)),
        "jacfwd": jax.jacfwd(f),
        "jacrev": jax.jacrev(f),
        "hessian": jax.hessian(total),
        "forward over forward": jax.jacfwd(jax.jacfwd(f)),
        "vmap": jax.vmap(jax.grad(lambda x: f(x))),
        "gradient of vmap": jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))),
        "scan": jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0])),
        "cond": jax.grad(lambda x: jnp.sum(jax.lax.cond(x[0] > 0, f, lambda x: x, x))),
        "linearize": lambda x: jax.linearize(f, x)[1](x),
        "nonlinear use": jax.hessian(lambda x: jnp.sum(f(x) ** 2)),
    }


@pytest.mark.parametrize("name", _derivatives(body))
def test_recompute_has_the_derivatives_of_the_function(name):
    recomputed, plain = _derivatives(recompute_grad(body)), _derivatives(body)
    assert_same(recomputed[name](X), plain[name](X))


def test_recompute_third_order():
    f = recompute_grad(lambda x: x**5)
    assert_same(jax.grad(jax.grad(jax.grad(f)))(jnp.float32(2.0)), jnp.float32(240.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_recompute_keeps_the_dtype(dtype):
    x = jnp.asarray([0.5, 2.0], dtype)
    assert_same(jax.grad(lambda x: recompute_grad(lambda x: x * x)(x).sum())(x), 2 * x)


def test_recompute_in_double_precision(x64):
    x = jnp.asarray([0.5, 2.0], jnp.float64)
    expected = jax.grad(lambda x: body(x).sum())(x)
    assert expected.dtype == jnp.float64
    assert_same(jax.grad(lambda x: recompute_grad(body)(x).sum())(x), expected, rtol=1e-12)


def test_recompute_complex():
    z = jnp.asarray([1 + 2j, 0.5 - 1j], jnp.complex64)

    def loss(f, z):
        return jnp.sum(jnp.abs(f(z)) ** 2)

    square = lambda z: z * z  # noqa: E731
    expected = jax.grad(functools.partial(loss, square))(z)
    assert_same(jax.grad(functools.partial(loss, recompute_grad(square)))(z), expected)
    holomorphic = jax.grad(lambda z: jnp.sum(recompute_grad(square)(z)), holomorphic=True)(z)
    assert_same(holomorphic, 2 * z)


# --- recompute_grad: it recomputes --------------------------------------------------------------


def deep(x):
    for _ in range(6):
        x = jnp.sin(x) * x
    return x


def test_recompute_keeps_the_arguments_alone():
    x = jnp.ones(100, jnp.float32)
    assert kept(deep, x) >= 6 * 100
    assert kept(recompute_grad(deep), x) <= 100


def test_policy_says_what_is_kept():
    x = jnp.ones(100, jnp.float32)
    everything = recompute_grad(deep, policy=jax.checkpoint_policies.everything_saveable)
    nothing = recompute_grad(deep, policy=jax.checkpoint_policies.nothing_saveable)
    assert kept(everything, x) >= 6 * 100
    assert kept(nothing, x) <= 100
    expected = jax.grad(lambda x: deep(x).sum())(x)
    for f in (everything, nothing):
        assert_same(jax.grad(lambda x, f=f: f(x).sum())(x), expected)


@pytest.mark.parametrize("options", [{}, {"policy": jax.checkpoint_policies.dots_saveable}])
def test_with_parentheses(options):
    @recompute_grad(**options)
    def f(x):
        return jnp.sin(x) * x

    x = jnp.float32(0.5)
    expected = jnp.sin(x) + x * jnp.cos(x)
    assert f.__name__ == "f"
    assert_same(jax.grad(f)(x), expected)
    assert_same(jax.jit(jax.grad(f))(x), expected)


def test_policy_by_name():
    from jax.ad_checkpoint import checkpoint_name

    def f(x):
        return jnp.sin(checkpoint_name(jnp.sin(jnp.sin(x)), "middle"))

    x = jnp.ones(100, jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names("middle")
    assert kept(recompute_grad(f), x) <= 100
    assert 100 < kept(recompute_grad(f, policy=policy), x) <= 200


def test_the_function_runs_again_in_the_backward_pass():
    runs = []

    @recompute_grad
    def f(x):
        jax.debug.callback(lambda: runs.append(1))
        return jnp.sin(x)

    jax.block_until_ready(f(X))
    jax.effects_barrier()
    forward = len(runs)
    jax.block_until_ready(jax.grad(lambda x: f(x).sum())(X))
    jax.effects_barrier()
    assert forward == 1
    assert len(runs) - forward >= 2


# --- recompute_grad: decorated functions inside -------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_uses_the_declared_gradient_inside(compiled):
    wrap = jax.jit if compiled else (lambda f: f)
    direct = wrap(jax.grad(lambda x: recompute_grad(seven)(x).sum()))
    within = wrap(jax.grad(lambda x: recompute_grad(lambda x: jnp.sin(seven(x)))(x).sum()))
    assert_same(direct(X), 7 * X)
    assert_same(within(X), jnp.cos(X * X) * 7 * X)


def test_recompute_second_order_of_a_decorated_function():
    """d2 sin(h): -sin(h) h'^2 + cos(h) h'', with h' = 7x and h'' = 7."""
    f = recompute_grad(lambda x: jnp.sin(seven(x)))
    x = jnp.float32(0.7)
    expected = -jnp.sin(x * x) * (7 * x) ** 2 + jnp.cos(x * x) * 7
    assert_same(jax.grad(jax.grad(f))(x), expected)


def test_recompute_forward_mode_of_a_decorated_function():
    h = custom_gradient(lambda x: (x * x, lambda dy: 7 * dy * x))
    f = recompute_grad(lambda x: 3 * h(x))
    assert_same(jax.jvp(f, (X,), (jnp.ones_like(X),))[1], 21 * X)


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_passes_variables_on(compiled):
    def loss(w, x):
        @recompute_grad
        def f(x):
            @custom_gradient
            def h(x):
                def grad(dy, variables):
                    return 5 * dy * w, [7 * jnp.sum(dy * x) for _ in variables]

                return w * x, grad

            return h(x)

        return f(x).sum()

    g = jax.grad(loss, (0, 1))
    w = jnp.float32(3.0)
    expected = 7 * jnp.sum(X), 15 * jnp.ones_like(X)
    assert_same((jax.jit(g) if compiled else g)(w, X), expected)


def test_recompute_in_a_rule():
    @custom_gradient
    def h(x):
        inner = recompute_grad(lambda x: 7 * jnp.sin(x))
        return x * x, lambda dy: dy * inner(x)

    x = jnp.float32(0.7)
    assert_same(jax.grad(h)(x), 7 * jnp.sin(x))
    assert_same(jax.grad(jax.grad(h))(x), 7 * jnp.cos(x))
