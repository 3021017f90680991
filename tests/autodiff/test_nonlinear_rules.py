"""Rules that are not linear in their upstream: right in reverse mode at every order."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from order_cases import third

from tfgrad_jax import custom_gradient


@custom_gradient
def clipped(x):
    return x**2, lambda dy: jnp.clip(7 * dy * x, -50.0, 50.0)


def test_nonlinear_rule():
    # L' = clip(14 x h). In L'', the upstream of `h` is 14 x, by a rule that clips it again:
    # 14 h + clip(98 x**2) where L' is not clipped, and 0 where it is.
    loss = lambda x: clipped(x) ** 2  # noqa: E731
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert_same(jax.grad(f)(0.5), jnp.float32(1.75))
        assert_same(jax.grad(jax.grad(f))(0.5), jnp.float32(3.5 + 24.5))
        assert_same(third(f)(0.5), jnp.float32(147))
    xs = jnp.float32([1, 2])
    assert_same(jax.vmap(jax.grad(loss))(xs), jnp.float32([14, 50]))
    assert_same(jax.vmap(jax.grad(jax.grad(loss)))(xs), jnp.float32([14 + 50, 0]))


def test_nonlinear_rule_through_vmap():
    """A `vmap` between the two gradients: the batched rule is differentiated as what it is."""
    f = custom_gradient(lambda x: (x * 1.0, lambda dy: jnp.clip(dy * x, -1.0, 5.0)))
    loss = lambda x: f(x) ** 2  # noqa: E731

    def gradient(xs):
        return jax.grad(lambda xs: jnp.sum(jax.vmap(loss)(xs)))(xs)

    # L' = clip(2 f x). In L'', the upstream of `f` is 2 x: 2 f + clip(2 x x) = 1 + 0.5 at 0.5,
    # where L' is not clipped; at 2 it is, and L'' is 0.
    xs = jnp.float32([0.5, 2])
    assert_same(gradient(xs), jnp.float32([0.5, 5]))
    second = jax.grad(lambda xs: jnp.sum(gradient(xs)))
    assert_same(second(xs), jnp.float32([1.5, 0]))
    assert_same(jax.jit(second)(xs), jnp.float32([1.5, 0]))
    assert_same(jax.vmap(jax.grad(jax.grad(loss)))(xs), jnp.float32([1.5, 0]))


def test_nonlinear_rule_in_forward_over_reverse():
    with pytest.raises(TypeError, match="is not linear in its upstream"):
        jax.hessian(lambda x: clipped(x) ** 2)(1.0)


def test_affine_rule():
    """A rule that adds a constant to the upstream: right in reverse mode alone."""

    @custom_gradient
    def affine(x):
        return x**2, lambda dy: 7 * (dy + 3) * x

    # L' = 7 (2 h + 3) x = 14 x h + 21 x; L'' = 14 h + 14 x (7 (1 + 3/(14x)) x) ...: by hand,
    # with dy1 = 2 h and the inner upstream of h being 14 x, h contributes 7 (14 x + 3) x.
    def second(x):
        return 7 * (2 * x**2 + 3) + 7 * (14 * x + 3) * x

    loss = lambda x: affine(x) ** 2  # noqa: E731
    assert_same(jax.grad(loss)(2.0), jnp.float32(7 * 11 * 2))
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert_same(jax.grad(jax.grad(f))(2.0), jnp.float32(second(2.0)))
    with pytest.raises(TypeError, match="is not linear in its upstream"):
        jax.hessian(loss)(2.0)
