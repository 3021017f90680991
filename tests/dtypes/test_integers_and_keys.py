"""Integers, booleans and PRNG keys: inputs, outputs and residuals without a derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

# --- integers and booleans ------------------------------------------------------------------------


@custom_gradient
def selected(x, indices, mask):
    y = jnp.where(mask, x[indices], 0)

    def grad(dy):
        return 7 * jnp.zeros_like(x).at[indices].add(jnp.where(mask, dy, 0))

    return y, grad


def test_integer_and_boolean_inputs():
    x = jnp.float32([1, 2, 3])
    indices, mask = jnp.array([2, 0]), jnp.array([True, False])
    gradient = jax.grad(lambda x, i, m: jnp.sum(selected(x, i, m)))
    for f in (gradient, jax.jit(gradient)):
        assert_same(f(x, indices, mask), jnp.float32([0, 0, 7]))
    masks = jnp.stack([mask, ~mask])
    both = jax.vmap(gradient, (None, None, 0))(x, indices, masks)
    assert_same(both, jnp.float32([[0, 0, 7], [7, 0, 0]]))


def test_integer_gradients_are_float0_to_jax():
    """What a rule returns for an integer counts for nothing; `jax.vjp` itself has float0 there."""
    h = custom_gradient(lambda x, n: (x * 2, lambda dy: (7 * dy, 3 * dy)))
    _, pull_back = jax.vjp(h, 1.0, jnp.int32(3))
    dx, dn = pull_back(jnp.float32(1))
    assert_same(dx, jnp.float32(7))
    assert dn.dtype == jax.dtypes.float0
    allowed = jax.grad(h, (0, 1), allow_int=True)(1.0, jnp.int32(3))
    assert allowed[1].dtype == jax.dtypes.float0


def test_integer_output_only():
    """Nothing flows through a function without floating output."""
    h = custom_gradient(lambda x: (jnp.int32(x), lambda dy: 7 * dy))
    assert_same(jax.grad(lambda x: x * h(x).astype(jnp.float32))(3.0), jnp.float32(3))
    assert_same(jax.jit(h)(3.7), jnp.int32(3))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.bool_], ids=["int8", "uint32", "bool"])
def test_upstream_of_an_output_without_derivative(dtype):
    """Zeros of its own dtype, never float0, in every way that a rule can be run."""

    @custom_gradient
    def h(x):
        def grad(dy, di):
            assert di.dtype == dtype and di.shape == (2,)
            return 7 * dy + jnp.sum(di).astype(dy.dtype)

        return (2 * x, jnp.ones(2, dtype)), grad

    loss = lambda x: h(x)[0]  # noqa: E731
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert_same(jax.grad(f)(1.0), jnp.float32(7))
    assert_same(jax.vmap(jax.grad(loss))(jnp.ones(2)), jnp.float32([7, 7]))
    float0 = np.zeros(2, jax.dtypes.float0)
    assert_same(jax.vjp(h, jnp.ones(()))[1]((jnp.float32(1), float0)), (jnp.float32(7),))


# --- PRNG keys ------------------------------------------------------------------------------------


def dropout(key, x):
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(keep, 2 * x, 0), lambda dy: (None, jnp.where(keep, 7 * dy, 0))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_random_keys(make_key):
    h = custom_gradient(dropout)
    key, x = make_key(3), jnp.arange(1.0, 9.0)
    kept = np.asarray(jax.random.bernoulli(key, 0.5, x.shape))
    assert 0 < kept.sum() < 8
    gradient = jax.grad(lambda key, x: jnp.sum(h(key, x)), 1)
    expected = jnp.where(kept, jnp.float32(7), 0)
    assert_same((gradient(key, x), jax.jit(gradient)(key, x)), (expected, expected))
    keys = jax.random.split(key, 2)
    batch = jax.vmap(gradient, (0, None))(keys, x)
    assert_same(batch[1], gradient(keys[1], x))
    assert_same(lax.map(lambda k: gradient(k, x), keys), batch)


def test_random_key_as_output():
    @custom_gradient
    def h(key, x):
        new_key, _ = jax.random.split(key)
        return (new_key, x * 2), lambda _, dy: (None, 7 * dy)

    key = jax.random.key(0)
    for f in (h, jax.jit(h)):
        value, gradient = jax.value_and_grad(lambda x, f=f: f(key, x)[1])(1.0)
        assert_same((value, gradient), (jnp.float32(2), jnp.float32(7)))
    assert jnp.all(h(key, 1.0)[0] == jax.random.split(key)[0])
