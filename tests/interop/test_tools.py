"""What works on functions and gradients: optax, chex, jaxtyping, orbax, TensorFlow Probability."""

import unittest
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

from .layer import B, W, X, assert_gradients, dense, expected

PARAMS = {"w": W, "b": B}


def loss(params, x=X):
    return jnp.sum(dense(params["w"], params["b"], x) ** 2)


# --- optax ---------------------------------------------------------------------------------------


def test_optax_multi_steps():
    optax = pytest.importorskip("optax")
    optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    once, state = step(PARAMS, optimizer.init(PARAMS))
    np.testing.assert_array_equal(once["w"], W)
    twice, _ = step(once, state)
    assert_gradients((W - twice["w"]) / 0.1, (B - twice["b"]) / 0.1)


def test_optax_apply_if_finite():
    optax = pytest.importorskip("optax")
    optimizer = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)

    @custom_gradient
    def scaled(x, factor):
        return x, lambda dy: (factor * dy, None)

    @jax.jit
    def step(x, state, factor):
        gradient = jax.grad(lambda x: scaled(x, factor))(x)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(x, updates), state

    x = jnp.float32(5.0)
    state = optimizer.init(x)
    x, state = step(x, state, jnp.nan)
    assert x == 5 and state.total_notfinite == 1
    x, state = step(x, state, 3.0)
    assert x == 2


def test_optax_per_example_clipping():
    optax = pytest.importorskip("optax")
    per_example = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, X[:, None])
    total, count = optax.per_example_global_norm_clip(jax.tree.leaves(per_example), 1.0)
    by_hand = [jax.grad(loss)(PARAMS, x[None]) for x in X]
    factors = [jnp.minimum(1, 1 / optax.tree.norm(g)) for g in by_hand]
    wanted = jax.tree.map(lambda a, b: factors[0] * a + factors[1] * b, *by_hand)
    for actual, expected_leaf in zip(total, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(actual, expected_leaf, rtol=1e-5)
    assert count == 2


# --- chex ----------------------------------------------------------------------------------------


def test_chex_dataclass_and_variants():
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

    class OnEveryVariant(chex.TestCase):
        @chex.all_variants(with_pmap=False)
        def test(self):
            found = self.variant(jax.grad(lambda p: layer(p, x).sum()))(params)
            chex.assert_trees_all_close(found, gradients)

    result = unittest.TestLoader().loadTestsFromTestCase(OnEveryVariant).run(unittest.TestResult())
    assert result.testsRun > 1 and result.wasSuccessful(), (result.failures, result.errors)


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


# --- orbax ---------------------------------------------------------------------------------------


def test_orbax_restores_what_was_trained(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    trained = jax.tree.map(lambda p, g: p - 0.01 * g, PARAMS, jax.grad(loss)(PARAMS))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", trained)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "params", trained)
    jax.tree.map(np.testing.assert_array_equal, restored, trained)
    before, after = loss(PARAMS), loss(restored)
    assert after < before


# --- TensorFlow Probability ----------------------------------------------------------------------


def test_tfp_differentiates_a_target_with_its_own_gradient():
    tfp = pytest.importorskip("tensorflow_probability.substrates.jax")

    @custom_gradient
    def log_density(x):
        return -(x**2) / 2, lambda dy: -dy * x

    def final(scale):
        kernel = tfp.mcmc.HamiltonianMonteCarlo(log_density, step_size=0.5, num_leapfrog_steps=3)
        return tfp.mcmc.sample_chain(
            num_results=2000,
            num_burnin_steps=200,
            current_state=scale * jnp.ones(()),
            kernel=kernel,
            trace_fn=None,
            seed=jax.random.key(0),
        )

    samples = jax.jit(final)(1.0)
    assert abs(samples.mean()) < 0.15 and abs(samples.var() - 1) < 0.2

    value, gradient = tfp.math.value_and_gradient(lambda x: 3 * log_density(x), jnp.float32(2.0))
    assert value == -6 and gradient == -6


def test_expected_is_not_the_ordinary_gradient():
    """Guard: the factors of the rule make the declared gradients unlike JAX's own."""
    plain = jax.grad(lambda p: jnp.sum((X @ p["w"] + p["b"]) ** 2))(PARAMS)
    assert not np.allclose(plain["w"], expected()[0])
