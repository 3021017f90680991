"""The declared gradient at every order inside `scan` and `map`, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from order_cases import AROUND, FUNCTIONS, closed_over, h, in_scan, third

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("loop", [in_scan, AROUND["map"]])
def test_scan_in_reverse_mode(loop):
    loss = loop(lambda x: h(x) ** 2)
    assert_same(jax.grad(loss)(2.0), jnp.float32(112))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))
    assert_same(jax.jit(jax.grad(jax.grad(loss)))(2.0), jnp.float32(448))
    assert_same(third(loss)(2.0), jnp.float32(588))


def test_scan_with_a_closure():
    loss = in_scan(lambda x: closed_over(x) ** 2)
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


@pytest.mark.parametrize("loop", [in_scan, AROUND["map"]])
def test_scan_forward_over_reverse(loop):
    loss = loop(lambda x: h(x) ** 2)
    assert_same(jax.hessian(loss)(2.0), jnp.float32(448))
    assert_same(jax.jacfwd(jax.jacfwd(loss))(2.0), jnp.float32(448))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoint_of_scan(function):
    """Where `jax.checkpoint` evaluates the scan in part, the rule must stay in it."""
    loss = jax.checkpoint(in_scan(lambda x: FUNCTIONS[function](x) ** 2))
    assert_same(jax.grad(loss)(2.0), jnp.float32(112))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


def test_scan_of_checkpoint():
    loss = in_scan(jax.checkpoint(lambda x: h(x) ** 2))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_map_of_a_vmap_of_what_only_the_rule_uses(shape):
    """Before 0.12, JAX takes a constant of the body for a residual that is an input."""
    inner = custom_gradient(lambda v: (jnp.float32(0.5), lambda dy: 7 * dy * v))

    def outer(v):
        y = jnp.tanh(2 * inner(v))
        return y, lambda dy: 5 * v * dy * y

    def example(x):
        v = jnp.sin(x) * jnp.arange(1.0, 4.0)[: 3 if shape else 1].reshape(shape)
        return jnp.sin(jnp.sum(jax.vmap(custom_gradient(outer))(jnp.stack([v, v / 2]))))

    def by_map(x):
        return jnp.sum(jax.lax.map(example, jnp.stack([x, x / 2])))

    def second(x):
        """For `inner`, 1/2 with the derivative `7 v`, and `outer`, with `5 v tanh(2 inner)`."""
        y, slope = np.tanh(1), 2 * (1 - np.tanh(1) ** 2)
        first, more = 0.0, 0.0
        for scale in (1, 0.5):
            v = scale * np.sin(x) * np.arange(1.0, 4.0)[: 3 if shape else 1]
            dv = v / np.tan(x)
            first += 5 * y * np.sum(v * dv)
            more += 5 * y * np.sum(dv * dv - v * v) + 5 * 7 * slope * np.sum(v * dv) ** 2
        return np.cos(2 * y) * more - np.sin(2 * y) * first**2

    expected = jnp.float32(second(0.7) + second(0.35) / 4)
    assert_same(jax.grad(jax.grad(by_map))(0.7), expected, rtol=1e-4)
