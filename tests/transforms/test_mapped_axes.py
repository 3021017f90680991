"""The axis that `vmap` maps stays where it is, in values and under derivatives alike.

JAX takes the type of a value that it staged for that of the value that it differentiates. Under a
`vmap` of a `vmap` the outer axis is not the first one, and as long as sizes agree nothing raises.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

X = jnp.float32(0.4)
SCALES = jnp.float32([1, 0.5])  # as many as in the inner axis
THREE = jnp.float32([1, 0.5, 0.25])


def declared(v):
    return 2 * v, lambda dy: 7 * dy * v


def ours(primal):
    return custom_gradient(declared, primal=primal)


@jax.custom_jvp
def by_hand(v):
    return 2 * v


by_hand.defjvp(lambda primals, tangents: (by_hand(*primals), 7 * primals[0] * tangents[0]))

OURS = {"function": ours(None), "primal": ours(lambda v: v + v)}
STAGED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "map": lambda f: lambda x: lax.map(f, x[None])[0],
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c + f(x), None), 0 * x, x[None])[0],
    "cond": lambda f: lambda x: lax.cond(x > 0, f, lambda x: x, x),
    "switch": lambda f: lambda x: lax.switch(jnp.int32(x > 0), [lambda x: x, f], x),
}


def loss(h, outer):
    """Return a function in which each of the outer examples is squared by itself."""

    def example(x):
        y = jnp.sin(x)
        return jnp.sin(jnp.sum(jax.vmap(h)(jnp.stack([y, y / 2]))))

    return lambda x: jnp.sum(jax.vmap(example)(outer * x))


ORDERS = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "grad of grad": lambda f: jax.grad(jax.grad(f)),
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("outer", [SCALES, THREE], ids=["equal", "unequal"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "staged", [pytest.param(s, marks=() if s == "map" else pytest.mark.slow) for s in STAGED]
)
@pytest.mark.parametrize("h", OURS)
def test_the_axis_of_a_vmap_around_a_vmap(h, staged, order, outer):
    expected = ORDERS[order](loss(by_hand, outer))(X)
    assert_same(ORDERS[order](STAGED[staged](loss(OURS[h], outer)))(X), expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("order", ["grad", "grad of grad"])
@pytest.mark.parametrize("h", OURS)
def test_an_axis_that_is_not_the_first(h, order, axis):
    """Each example along either axis has the derivative that it has alone."""
    xs = jnp.float32([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])

    def total(h):
        def of(xs):
            ys = jax.vmap(jax.jit(h), axis, axis)(xs)
            return jnp.sum(jnp.sin(jnp.sum(ys, 1 - axis)))

        return of

    def derivative(f):
        first = jax.grad(f)
        return first if order == "grad" else jax.grad(lambda xs: jnp.sum(jnp.cos(first(xs))))

    assert_same(derivative(total(OURS[h]))(xs), derivative(total(by_hand))(xs), rtol=1e-5)


def test_a_primal_that_lays_out_its_axes_otherwise():
    """The mapped axis of its value is the second one, where that of the function is the first."""
    h = custom_gradient(declared, primal=lambda v: jnp.stack([2 * v[0], 2 * v[1]]))
    xs = jnp.float32([[0.1, 0.2], [0.3, 0.4]])

    def total(h):
        return lambda xs: jnp.sum(jnp.sin(jnp.sum(jax.vmap(jax.jit(h))(xs), 1)))

    assert_same(jax.grad(total(h))(xs), jax.grad(total(by_hand))(xs), rtol=1e-5)
