"""The declared gradient at every order inside `scan` and `map`, in both modes."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from order_cases import AROUND, FUNCTIONS, closed_over, h, in_scan, third

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
