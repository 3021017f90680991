"""Messages about closed-over values without a gradient, raised when they are differentiated."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from messages import place

from tfgrad_jax import custom_gradient


class Layer:
    def __init__(self, w, b):
        self.w, self.b = w, b

    @custom_gradient(variables=lambda self: {"w": self.w})
    def forgets_b(self, x):
        def grad(dy, variables):
            return 7 * dy * self.w, {"w": 5 * dy * x}

        return self.w * x + self.b, grad


def test_error_for_a_captured_value_that_is_not_declared():
    def loss(w, b, x):
        return Layer(w, b).forgets_b(x)

    f = Layer.forgets_b
    with pytest.raises(TypeError) as caught:
        jax.grad(loss, 1)(3.0, 1.0, 2.0)
    assert str(caught.value) == (
        f"`Layer.forgets_b` ({place(f)}) is differentiated with respect to values that it closes "
        "over, that are not among its declared variables:\n"
        f"  float32[], first used at {place(f, 5)}\n"
        "Add them to `custom_gradient(variables=...)`, or pass them as arguments."
    )
    # Not when it is merely traced.
    assert_same(jax.jit(jax.grad(loss, 2))(3.0, 1.0, 2.0), jnp.float32(21))
    assert_same(jax.jit(jax.grad(loss, 0))(3.0, 1.0, 2.0), jnp.float32(10))


def test_error_also_where_the_declared_variables_are_concrete():
    def loss(b, x):
        return Layer(jnp.float32(3.0), b).forgets_b(x)

    with pytest.raises(TypeError, match="not among its declared variables"):
        jax.grad(loss)(1.0, 2.0)
    with pytest.raises(TypeError, match="not among its declared variables"):
        jax.grad(loss)(1.0, jnp.float32(2.0))

    def empty(w, x):
        @custom_gradient(variables={})
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w, variables)

        return f(x)

    assert_same(jax.grad(empty, 1)(3.0, 2.0), jnp.float32(21))
    with pytest.raises(TypeError, match="not among its declared variables"):
        jax.grad(empty)(3.0, 2.0)


def no_variables(w, b, mask, x):
    @custom_gradient
    def f(x):
        z = jnp.where(mask, x, 0)
        z = z @ w
        y = z + b
        unused = w.sum() * b.sum()

        def grad(dy):
            return 7 * dy @ w.T * unused

        return y, grad

    no_variables.f = f
    return f(x).sum()


ARGS = jnp.ones((3, 2)), jnp.ones(2), jnp.array([True, False, True]), jnp.ones(3)


def test_error_text_names_each_value_and_both_remedies():
    with pytest.raises(TypeError) as caught:
        jax.grad(no_variables, (0, 1))(*ARGS)
    f = no_variables.f
    assert str(caught.value) == (
        f"`no_variables.f` ({place(f)}) is differentiated with respect to values that it closes "
        "over, but its gradient function takes no `variables`:\n"
        f"  float32[3, 2], first used at {place(f, 3)}\n"
        f"  float32[2], first used at {place(f, 4)}\n"
        "Pass them as arguments; or let the gradient function take them, "
        "`def grad(dy, variables): ... return grad_xs, grad_vars`; or decorate with "
        '`custom_gradient(variables="autodiff")` to give them the ordinary gradient of the '
        "function."
    )


def test_error_lists_only_what_is_differentiated():
    for argnums, line in [(0, 3), (1, 4)]:
        with pytest.raises(TypeError) as caught:
            jax.jit(jax.grad(no_variables, argnums))(*ARGS)
        values = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
        assert len(values) == 1
        assert values[0].endswith(place(no_variables.f, line))


TRACED = {  # neither the weights nor the biases are differentiated in these
    "call": (lambda f, w, b, m, x: f(w, b, m, x), 6.0),
    "jit": (lambda f, *args: jax.jit(f)(*args), 6.0),
    "grad": (lambda f, *args: jax.grad(f, 3)(*args), np.full(3, 168.0)),
    "jit of grad": (lambda f, *args: jax.jit(jax.grad(f, 3))(*args), np.full(3, 168.0)),
    "vmap over inputs": (
        lambda f, w, b, m, x: jax.vmap(lambda x: jax.grad(f, 3)(w, b, m, x))(x[None]),
        np.full((1, 3), 168.0),
    ),
    "vmap over weights": (
        lambda f, w, b, m, x: jax.vmap(lambda w: jax.grad(f, 3)(w, b, m, x))(w[None]),
        np.full((1, 3), 168.0),
    ),
    "checkpoint": (
        lambda f, *args: jax.grad(jax.checkpoint(f), 3)(*args),
        np.full(3, 168.0),
    ),
    "scan": (
        lambda f, w, b, m, x: jax.lax.scan(
            lambda w, x: (w, jax.grad(f, 3)(w, b, m, x)), w, x[None]
        )[1],
        np.full((1, 3), 168.0),
    ),
}


@pytest.mark.parametrize("traced", TRACED)
def test_no_error_for_what_is_merely_traced(traced):
    run, expected = TRACED[traced]  # 168 = 7 * (dy @ w.T = 2) * (w.sum() * b.sum() = 12)
    assert_same(run(no_variables, *ARGS), jnp.asarray(expected, jnp.float32))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda loss: jax.grad(loss),
        lambda loss: jax.jit(jax.grad(loss)),
        lambda loss: jax.grad(jax.jit(loss)),
        lambda loss: lambda w, x: jax.vmap(jax.grad(loss))(w[None], x[None]),
        lambda loss: jax.grad(jax.checkpoint(loss)),
        lambda loss: jax.grad(lambda w, x: jax.lax.cond(x > 0, loss, loss, w, x)),
        lambda loss: jax.grad(
            lambda w, x: jax.lax.scan(lambda c, x: (c + loss(w, x), None), 0.0, x[None])[0]
        ),
        lambda loss: jax.grad(jax.grad(loss, 1)),
        lambda loss: jax.hessian(loss),
    ],
    ids=["eager", "jit", "grad jit", "vmap", "checkpoint", "cond", "scan", "order 2", "hessian"],
)
def test_error_under_every_transformation(differentiate):
    def loss(w, x):
        @custom_gradient
        def f(x):
            return w * x, lambda dy: 7 * dy * w

        return f(x) ** 2

    with pytest.raises(TypeError, match="is differentiated with respect to values that it closes"):
        differentiate(loss)(jnp.float32(3.0), jnp.float32(2.0))


def test_error_points_into_f_where_a_helper_uses_the_value():
    def loss(w, x):
        def helper(x):
            return w * x

        @custom_gradient
        def f(x):
            z = jnp.sin(x)
            y = helper(z)
            return y, lambda dy: 7 * dy * w

        loss.f = f
        return f(x)

    with pytest.raises(TypeError, match=re.escape(f"float32[], first used at {place(loss, 7)}\n")):
        jax.grad(loss)(3.0, 2.0)


def test_error_where_the_value_is_returned_as_it_is():
    def loss(w, x):
        @custom_gradient
        def f(x):
            return w, lambda dy: 7 * dy

        loss.f = f
        return f(x)

    assert_same(jax.grad(loss, 1)(3.0, 2.0), jnp.float32(7))
    with pytest.raises(TypeError) as caught:
        jax.grad(loss)(3.0, 2.0)
    assert f"float32[], first used at {place(loss.f)}" in str(caught.value)
