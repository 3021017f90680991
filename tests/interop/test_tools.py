"""What works on functions: chex, jaxtyping, lineax, TensorFlow Probability."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

# --- chex ----------------------------------------------------------------------------------------


def test_chex_dataclass():
    chex = pytest.importorskip("chex")

    @chex.dataclass
    class Params:
        w: jax.Array
        b: jax.Array

    @custom_gradient
    def layer(params, x):
        def grad(dy):
            return Params(w=3 * jnp.sum(dy * x), b=5 * jnp.sum(dy)), None

        return params.w * x + params.b, grad

    params = Params(w=jnp.float32(2.0), b=jnp.float32(1.0))
    x = jnp.array([1.0, 2.0])
    gradients = jax.jit(jax.grad(lambda p: layer(p, x).sum()))(params)
    assert isinstance(gradients, Params)
    chex.assert_trees_all_close(gradients, Params(w=jnp.float32(9.0), b=jnp.float32(10.0)))


# --- jaxtyping and beartype ----------------------------------------------------------------------


@pytest.mark.parametrize("checker", ["jaxtyping above", "beartype above", "jaxtyping below"])
def test_annotations_are_checked_above_and_below_the_decorator(checker):
    """Above it, the decorated function shows the type of `y`, not the type of the pair."""
    jaxtyping = pytest.importorskip("jaxtyping")
    beartype = pytest.importorskip("beartype")
    vector = jaxtyping.Float[jax.Array, " n"]
    jaxtyped = jaxtyping.jaxtyped(typechecker=beartype.beartype)
    checked = {
        "jaxtyping above": lambda f: jaxtyped(custom_gradient(f)),
        "beartype above": lambda f: beartype.beartype(custom_gradient(f)),
        "jaxtyping below": lambda f: custom_gradient(jaxtyped(f)),
    }[checker]

    @checked
    def scale(x: vector) -> tuple[vector, Callable[..., Any]]:
        return x * 2, lambda dy: 3 * dy

    @checked
    def grows(x: vector) -> tuple[vector, Callable[..., Any]]:
        return jnp.outer(x, x), lambda dy: dy[0]

    x = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(scale(x), 2 * x)
    gradient = jax.jit(jax.grad(lambda x: scale(x).sum()))(x)
    np.testing.assert_allclose(gradient, [3.0, 3.0], rtol=1e-6)
    with pytest.raises(Exception, match="x"):
        scale(jnp.ones((2, 2)))
    with pytest.raises(Exception, match="return"):
        grows(x)


# --- lineax ---------------------------------------------------------------------------------------


def test_a_rule_with_a_solver_of_lineax_is_linear_in_both_modes():
    """The root of `a y = x`, declared seven times its derivative, at the first and second order."""
    lineax = pytest.importorskip("lineax")
    a = jnp.array([[2.0, 0.5], [-0.3, 1.5]])

    def solved(matrix, b):
        return lineax.linear_solve(lineax.MatrixLinearOperator(matrix), b).value

    f = custom_gradient(lambda x: (solved(a, x), lambda dy: 7 * solved(a.T, dy)))
    x, inverse = jnp.array([1.0, 2.0]), jnp.linalg.inv(a)
    for jacobian in (jax.jacrev, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(jacobian(f))(x), 7 * inverse, rtol=1e-5)
    second = jax.hessian(lambda x: jnp.sum(f(x) ** 2))(x)
    np.testing.assert_allclose(second, 98 * inverse.T @ inverse, rtol=1e-5)


# --- TensorFlow Probability ----------------------------------------------------------------------


def test_tfp_differentiates_a_target_with_its_own_gradient():
    tfp = pytest.importorskip("tensorflow_probability.substrates.jax")

    @custom_gradient
    def log_density(x):
        return -(x**2) / 2, lambda dy: -dy * x

    value, gradient = tfp.math.value_and_gradient(lambda x: 3 * log_density(x), jnp.float32(2.0))
    assert value == -6 and gradient == -6
