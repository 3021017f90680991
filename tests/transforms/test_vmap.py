"""`vmap` over some inputs, over none that `y` depends on, and several in each other."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit, total

from tfgrad_jax import custom_gradient


def test_vmap_over_some_inputs_sums_the_gradient_of_the_others():
    @custom_gradient
    def product(w, x):
        return w * x, lambda dy: (7 * dy * x, 5 * dy * w)

    w, xs = jnp.float32(2.0), jnp.float32([1.0, 2.0, 3.0])
    per_example = jax.vmap(jax.grad(product, (0, 1)), in_axes=(None, 0))(w, xs)
    assert_same(per_example, (7 * xs, jnp.float32([10.0, 10.0, 10.0])))
    batch = jax.grad(lambda w, xs: jax.vmap(product, (None, 0))(w, xs).sum(), (0, 1))(w, xs)
    assert_same(batch, (jnp.float32(42.0), jnp.float32([10.0, 10.0, 10.0])))


@custom_gradient
def _scaled_gradient(x, z):
    return x**2, lambda dy: (dy * z, None)


@custom_gradient
def _one_output_ignores(x, z):
    return (x**2, x * z), lambda d1, d2: (d1 * z + d2, None)


@eager_and_jit
@pytest.mark.parametrize("first", [0, 1], ids=["x outside", "z outside"])
def test_vmaps_in_each_other_over_what_only_the_rule_uses(first, mode):
    axes = ((None, 0), (0, None)) if first == 0 else ((0, None), (None, 0))
    xs, zs = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([1.0, 10.0])

    def total_of(h):
        def f(xs):
            return total(jax.vmap(jax.vmap(h, axes[0]), axes[1])(xs, zs))

        return mode(jax.grad(f))(xs)

    assert_same(total_of(_scaled_gradient), jnp.full(3, 11.0))
    assert_same(total_of(_one_output_ignores), jnp.full(3, 11.0 + 2))


def test_three_vmaps_in_each_other_over_what_only_the_rule_uses():
    xs, zs = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([1.0, 10.0])

    def f(xs):
        h = jax.vmap(_scaled_gradient, (None, 0))
        for axes in ((0, None), (0, None)):
            h = jax.vmap(h, axes)
        return total(h(jnp.stack([xs, xs, xs]), zs))

    assert_same(jax.grad(f)(xs), jnp.full(3, 33.0))


@eager_and_jit
@pytest.mark.parametrize(
    "own", [lambda h: h, jax.jit, jax.checkpoint], ids=["", "jit", "checkpoint"]
)
def test_vmap_over_what_only_the_rule_uses(own, mode):
    """Also of a function under its own `jit`: what `y` ignores is mapped all the same."""
    zs = jnp.float32([1, 2, 3])

    def loss(x):
        return jnp.sum(zs * jax.vmap(own(quadratic), (None, 0))(x, zs))

    # The upstream of each copy is z, and its rule gives z * z * z.
    assert_same(mode(jax.grad(loss))(2.0), jnp.float32(36))
    assert_same(mode(loss)(2.0), jnp.float32(12))


@custom_gradient
def quadratic(x, z):
    """A rule that is not linear."""
    return x * 1.0, lambda dy: (dy * z * dy, None)


@eager_and_jit
@pytest.mark.parametrize("own", [lambda h: h, jax.jit], ids=["", "jit"])
def test_second_order_of_vmap_over_what_only_the_rule_uses(own, mode):
    xs, zs = jnp.float32([1, 2, 3]), jnp.float32([1, 10, 100])

    def loss(x):
        return total(jax.vmap(own(_scaled_gradient), (None, 0))(x, zs) ** 2)

    # L' = sum 2 h z, where h, of value x**2, has the gradient z again: L'' = sum 2 z z.
    x = xs[1]
    assert_same(mode(jax.grad(loss))(x), jnp.sum(2 * x**2 * zs))
    assert_same(mode(jax.grad(jax.grad(loss)))(x), jnp.sum(2 * zs * zs))
    assert_same(mode(jax.hessian(loss))(x), jnp.sum(2 * zs * zs))
