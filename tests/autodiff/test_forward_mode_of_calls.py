"""Forward mode of what the cases do not show: integers, methods, branches, nesting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import lax
from mode_cases import W, X, of_pytree, plain_of_pytree, seven, sine

from tfgrad_jax import custom_gradient


def test_integers_and_statics():
    params = {"w": W, "x": X, "steps": jnp.arange(2)}
    zero = np.zeros(2, jax.dtypes.float0)
    y, dy = jax.jvp(
        lambda p: of_pytree(p, 2, "tanh"), (params,), ({"w": W, "x": 0 * X, "steps": zero},)
    )
    plain = seven(lambda w: plain_of_pytree({**params, "w": w}, 2, "tanh")["y"])
    assert_same((y["y"], dy["y"]), jax.jvp(plain, (W,), (W,)))
    assert y["steps"].dtype == jnp.int32
    assert dy["steps"].dtype == jax.dtypes.float0 and dy["steps"].shape == (2,)


def test_autodiff_variables():
    def f(w, x):
        h = custom_gradient(lambda x: (jnp.sin(w * x), lambda dy: 7 * dy * w * jnp.cos(w * x)),
                     variables="autodiff")  # fmt: skip
        return h(x)

    w = X[::-1]
    slope = jnp.cos(w * X)
    dy = jax.jvp(f, (w, X), (X, w))[1]
    assert_same(dy, X * slope * X + 7 * w * slope * w)
    by_w, by_x = jax.jacfwd(f, (0, 1))(w, X)
    assert_same(by_w, jnp.diag(X * slope))
    assert_same(by_x, jnp.diag(7 * w * slope))
    # Each first derivative is differentiated as what it is: w's as f's own, x's as the rule.
    assert_same(
        jax.jacfwd(lambda w: jax.jacfwd(lambda x: f(w, x).sum())(X))(w),
        jnp.diag(7 * (slope - w * X * jnp.sin(w * X))),
    )


def test_captured_without_variables_is_refused():
    def f(w, x):
        return custom_gradient(lambda x: (w * x, lambda dy: dy * w))(x)

    assert_same(jax.jvp(lambda x: f(X, x), (X,), (X,)), (X * X, X * X))
    with pytest.raises(TypeError, match="takes no `variables`"):
        jax.jvp(f, (X, X), (X, X))


def test_no_gradient_at_all():
    @custom_gradient
    def h(x):
        return jnp.round(x), lambda dy: None

    assert_same(jax.jvp(h, (X,), (X,)), (jnp.round(X), 0 * X))
    assert_same(jax.jacfwd(h)(X), jnp.zeros((3, 3)))


def test_methods_defaults_and_keywords():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @custom_gradient
        def f(self, x, power=2):
            return self.scale * x**power, lambda dy: (
                7 * dy * self.scale * power * x ** (power - 1),
            )

    model = Model(jnp.float32(3))
    assert_same(jax.jvp(model.f, (X,), (X,)), (3 * X**2, 42 * X**2))
    assert_same(jax.jvp(lambda x: model.f(x=x), (X,), (X,)), (3 * X**2, 42 * X**2))


def test_bfloat16_and_mixed_precision():
    x = X.astype(jnp.bfloat16)

    @custom_gradient
    def h(x):
        y = x.astype(jnp.float32) ** 2
        return y, lambda dy: 7 * dy * 2 * x.astype(jnp.float32)  # cast to bfloat16 by the library

    y, dy = jax.jvp(h, (x,), (jnp.ones_like(x),))
    assert y.dtype == dy.dtype == jnp.float32
    assert_same(dy, 14 * x.astype(jnp.float32), rtol=1e-2)
    assert jax.grad(lambda x: h(x).sum())(x).dtype == jnp.bfloat16


def test_inside_of_another_rule():
    @custom_gradient
    def outer(x):
        return jnp.cos(x), lambda dy: -dy * sine(x)

    # The second derivative of `outer` is that of `sine` by its own rule.
    assert_same(jax.jvp(outer, (X,), (X,))[1], -jnp.sin(X) * X)
    assert_same(
        jax.jvp(lambda x: jax.jvp(outer, (x,), (X,))[1], (X,), (X,))[1], -7 * jnp.cos(X) * X**2
    )
    assert_same(jax.hessian(lambda x: outer(x).sum())(X), jnp.diag(-7 * jnp.cos(X)))


def test_rule_that_calls_its_own_function():
    assert_same(jax.jvp(own_exp, (X,), (X,))[1], 7 * jnp.exp(X) * X)
    second = jax.jvp(lambda x: jax.jvp(own_exp, (x,), (X,))[1], (X,), (X,))[1]
    assert_same(second, 49 * jnp.exp(X) * X**2)
    assert_same(jax.hessian(lambda x: own_exp(x).sum())(X), jnp.diag(49 * jnp.exp(X)))


@custom_gradient
def own_exp(x):
    return jnp.exp(x), lambda dy: 7 * dy * own_exp(x)


def test_branches_on_values():
    @custom_gradient
    def h(x):
        if x > 0:  # in `f`
            return x**2, lambda dy: 14 * dy * x
        return -x, lambda dy: -7 * dy

    @custom_gradient
    def k(x):
        def grad(dy):
            if x > 0:  # in the rule
                return 14 * dy * x
            return -7 * dy

        return jnp.where(x > 0, x**2, -x), grad

    for f in (h, k):
        for x, dy in ((2.0, 28.0), (-2.0, -7.0)):
            assert_same(jax.jvp(f, (x,), (1.0,))[1], jnp.float32(dy))
            assert_same(jax.grad(f)(x), jnp.float32(dy))
            assert_same(jax.jacfwd(f)(jnp.float32(x)), jnp.float32(dy))


def test_a_branch_on_a_mapped_condition():
    """JAX makes of it a selection that stops gradients: those of the rule, not the rule."""

    @custom_gradient
    def h(x):
        return 3 * x, lambda dy: lax.cond(x > 0, lambda d: 7 * d, lambda d: -5 * d, dy)

    x = jnp.float32([2, -2])
    for mode in (lambda f: f, jax.jit):
        _, tangents = mode(lambda x: jax.jvp(jax.vmap(h), (x,), (x,)))(x)
        assert_same(tangents, jnp.float32([14, 10]))
        assert_same(mode(jax.vmap(jax.jacfwd(h)))(x), jnp.float32([7, -5]))
        assert_same(mode(jax.vmap(jax.grad(h)))(x), jnp.float32([7, -5]))


def test_a_stopped_upstream():
    """The rule is linear all the same; only its own derivative is stopped."""

    @custom_gradient
    def h(x):
        return 3 * x, lambda dy: 7 * lax.stop_gradient(dy) * x

    x = jnp.float32(2)
    for mode in (lambda f: f, jax.jit):
        assert_same(mode(jax.jacfwd(h))(x), jnp.float32(14))
        assert_same(mode(jax.grad(h))(x), jnp.float32(14))
