"""`vmap` over values that the rule uses and `y` ignores: every row has a gradient of its own.

The function is the identity on `x`; its rule is the upstream times some power of `k`, by which
the gradient of each mapped call is told from the others. It may run under its own `jit`,
`checkpoint`, `cond` or `scan`, which see that `y` does not depend on `k`.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

K = jnp.float32([1, 2, 3])
SCALE = jnp.float32([10, 100, 1000])
X = jnp.float32(2)


@custom_gradient
def linear(x, k):
    return x * 1.0, lambda dy: (7 * dy * k, None)


@custom_gradient
def nonlinear(x, k):
    return x * 1.0, lambda dy: (7 * dy * k * dy, None)


def captured(x, k):
    @custom_gradient
    def h(x):
        return x * 1.0, lambda dy: 7 * dy * k

    return h(x)


def captured_by_an_object(x, k):
    class Rule:
        def __init__(self, k):
            self.k = k

        def __call__(self, dy):
            return 7 * dy * self.k

    @custom_gradient
    def h(x):
        return x * 1.0, Rule(k)

    return h(x)


FUNCTIONS = {
    "linear": (linear, lambda dy, k: 7 * dy * k),
    "nonlinear": (nonlinear, lambda dy, k: 7 * dy * k * dy),
    "captured": (captured, lambda dy, k: 7 * dy * k),
    "captured by an object": (captured_by_an_object, lambda dy, k: 7 * dy * k),
}
OWN = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "jit of jit": lambda f: jax.jit(lambda *args: jax.jit(f)(*args)),
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x, k: lax.cond(x > 0, f, lambda x, k: x * 1.0, x, k),
    "scan": lambda f: lambda x, k: lax.scan(lambda x, k: (f(x, k), None), x, k[None])[0],
}
OUTSIDE = {"eager": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_k_alone(name, own, outside):
    h, rule = FUNCTIONS[name]
    f = OWN[own](h)

    def loss(x):
        return jnp.sum(jax.vmap(f, (None, 0))(x, K) * SCALE)

    assert_same(jax.grad(OUTSIDE[outside](loss))(X), jnp.sum(rule(SCALE, K)))


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_both(name, own):
    h, rule = FUNCTIONS[name]
    f = OWN[own](h)

    def loss(x):
        return jnp.sum(jax.vmap(f)(x, K) * SCALE)

    assert_same(jax.grad(loss)(jnp.full(3, 2, jnp.float32)), rule(SCALE, K))


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_of_the_gradient(name, own):
    h, rule = FUNCTIONS[name]
    got = jax.vmap(jax.grad(lambda x, k: 3 * OWN[own](h)(x, k)), (None, 0))(X, K)
    assert_same(got, rule(jnp.full(3, 3, jnp.float32), K))


@pytest.mark.parametrize("own", ["nothing", "jit", "cond", "checkpoint"])
@pytest.mark.parametrize("name", ["linear", "captured", "captured by an object"])
def test_forward_mode(name, own):
    h, rule = FUNCTIONS[name]
    f = OWN[own](h)

    def loss(x):
        return jnp.sum(jax.vmap(f, (None, 0))(x, K) * SCALE)

    expected = jnp.sum(rule(SCALE, K))
    assert_same(jax.jvp(loss, (X,), (jnp.float32(1),))[1], expected)
    assert_same(jax.jacfwd(loss)(X), expected)
    assert_same(jax.jit(lambda x: jax.linearize(loss, x)[1](jnp.float32(1)))(X), expected)


@pytest.mark.parametrize("own", ["nothing", "jit", "checkpoint"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_order(name, own):
    """`L = sum of scale h**2`: the rule at `2 scale x`, and again at its derivative."""
    h, rule = FUNCTIONS[name]
    f = OWN[own](h)

    def loss(x):
        return jnp.sum(jax.vmap(f, (None, 0))(x, K) ** 2 * SCALE)

    def first(y):
        return jnp.sum(rule(2 * y * SCALE, K))

    ys = jnp.full(3, X)
    assert_same(jax.grad(loss)(X), first(ys))
    assert_same(jax.grad(jax.grad(loss))(X), jnp.sum(rule(jax.grad(first)(ys), K)))


@pytest.mark.parametrize("own", ["nothing", "jit"])
def test_two_maps_in_each_other(own):
    @custom_gradient
    def h(x, k, m):
        return x * 1.0, lambda dy: (7 * dy * k + dy * m, None, None)

    f = OWN[own](h)
    over_m = jax.vmap(f, (None, None, 0))
    over_both = jax.vmap(over_m, (None, 0, None))

    def loss(x):
        return jnp.sum(over_both(x, K, 10 * K))

    expected = jnp.sum(7 * K[:, None] + 10 * K[None])
    assert_same(jax.grad(loss)(X), expected)
    assert_same(jax.grad(jax.jit(loss))(X), expected)


@pytest.mark.parametrize("own", ["nothing", "jit"])
def test_a_mapped_mask_and_a_mapped_index(own):
    """Integers and booleans have no gradient, and choose which row is used all the same."""

    @custom_gradient
    def h(x, mask, index):
        return x * 1.0, lambda dy: (jnp.where(mask, 7 * dy * K[index], 0), None, None)

    f = jax.vmap(OWN[own](h), (None, 0, 0))
    mask, index = jnp.array([True, False, True]), jnp.array([2, 1, 0])
    got = jax.grad(lambda x: jnp.sum(f(x, mask, index) * SCALE))(X)
    assert_same(got, jnp.float32(7 * (10 * 3 + 1000 * 1)))
