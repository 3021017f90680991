"""`vmap` over what `y` or the rule ignores, several in each other, and which axis is mapped."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import along

from tfgrad_jax import custom_gradient

K, SCALE = jnp.float32([1, 2, 3]), jnp.float32([10, 100, 1000])
X = jnp.float32(2)


@custom_gradient
def linear(x, k):
    return x * 1.0, lambda dy: (7 * dy * k, None)


@custom_gradient
def nonlinear(x, k):
    return x * 1.0, lambda dy: (7 * dy * k * dy, None)


@custom_gradient
def unused(x, k):
    return x * 1.0, lambda dy: (7 * dy, None)


def masked(x, k):
    """Integers and booleans have no gradient, and choose which row is used all the same."""

    @custom_gradient
    def h(x, mask, index):
        return x * 1.0, lambda dy: (jnp.where(mask, 7 * dy * K[index], 0), None, None)

    return h(x, k > 0, k.astype(int) - 1)


FUNCTIONS = {
    "linear": (linear, lambda dy, k: 7 * dy * k),
    "nonlinear": (nonlinear, lambda dy, k: 7 * dy * k * dy),
    "captured": (
        lambda x, k: custom_gradient(lambda x: (x * 1.0, lambda dy: 7 * dy * k))(x),
        lambda dy, k: 7 * dy * k,
    ),
    "masked": (masked, lambda dy, k: 7 * dy * k),
    "an integer that nothing uses": (lambda x, k: unused(x, k.astype(int)), lambda dy, k: 7 * dy),
}
OWN = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x, *k: lax.cond(x > 0, f, lambda x, *_: x * 1.0, x, *k),
    "scan": lambda f: (
        lambda x, *k: lax.scan(lambda x, k: (f(x, *k), None), x, [v[None] for v in k], length=1)[0]
    ),
}
AROUND = {"eager": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}


CORE = [("linear", own, "eager") for own in OWN] + [(n, "jit", "jit") for n in FUNCTIONS]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "own", "around"), sample(itertools.product(FUNCTIONS, OWN, AROUND), 15, CORE)
)
def test_every_row_has_its_own_gradient(name, own, around):
    """By what is unmapped, the sum; by all rows; of each row; in forward mode; at second order."""
    h, rule = FUNCTIONS[name]
    f, around = OWN[own](h), AROUND[around]

    def loss(x):
        return jnp.sum(jax.vmap(f, (None if jnp.ndim(x) == 0 else 0, 0))(x, K) * SCALE)

    total = jnp.sum(rule(SCALE, K))
    assert_same(jax.grad(around(loss))(X), total)
    assert_same(jax.grad(around(loss))(jnp.full(3, X)), rule(SCALE, K))
    each = jax.vmap(jax.grad(lambda x, k: 3 * f(x, k)), (None, 0))
    assert_same(around(each)(X, K), rule(jnp.full(3, 3.0), K))
    if name != "nonlinear":
        assert_same(around(jax.jacfwd(loss))(X), total)

    def squares(x):
        return jnp.sum(jax.vmap(f, (None, 0))(x, K) ** 2 * SCALE)

    # The rule at `2 scale x`, and again at the derivative of that.
    by_row = jax.grad(lambda y: jnp.sum(rule(2 * y * SCALE, K)))(jnp.full(3, X))
    assert_same(jax.grad(jax.grad(around(squares)))(X), jnp.sum(rule(by_row, K)))


@eager_and_jit
@pytest.mark.parametrize("own", ["nothing", "jit"])
def test_two_maps_in_each_other(own, mode):
    h = custom_gradient(lambda x, k, m: (x * 1.0, lambda dy: (7 * dy * k + dy * m, None, None)))
    over_k, over_m = (None, 0, None), (None, None, 0)
    expected = jnp.sum(7 * K[:, None] + 10 * K[None])
    for outer, inner in ((over_k, over_m), (over_m, over_k)):
        both = jax.vmap(jax.vmap(OWN[own](h), inner), outer)
        loss = lambda x, both=both: jnp.sum(both(x, K, 10 * K))  # noqa: E731
        assert_same(mode(jax.grad(loss))(X), expected)


# --- the axis that is mapped ----------------------------------------------------------------------


def declared(v):
    return 2 * v, lambda dy: 7 * dy * v


@jax.custom_jvp
def by_hand(v):
    return 2 * v


by_hand.defjvp(lambda primals, tangents: (by_hand(*primals), 7 * primals[0] * tangents[0]))

OURS = {
    "function": custom_gradient(declared),
    "primal": custom_gradient(declared, primal=lambda v: v + v),
}
ORDERS = {
    "grad": jax.grad,
    "jvp": along,
    "grad of grad": lambda f: jax.grad(jax.grad(f)),
    "hessian": jax.hessian,
}
# As many as in the inner axis: JAX takes the type of a staged value for that of the differentiated
# one, so a wrong axis would not be noticed by its size.
OUTER = {"equal": jnp.float32([1, 0.5]), "unequal": jnp.float32([1, 0.5, 0.25])}


def in_two_maps(h, outer):
    """Return a function in which each of the outer examples is squared by itself."""

    def example(x):
        y = jnp.sin(x)
        return jnp.sin(jnp.sum(jax.vmap(h)(jnp.stack([y, y / 2]))))

    return lambda x: jnp.sum(jax.vmap(example)(outer * x))


@pytest.mark.parametrize(
    ("h", "own", "order", "outer"), sample(itertools.product(OURS, OWN, ORDERS, OUTER), 12)
)
def test_the_axis_of_a_vmap_around_a_vmap(h, own, order, outer):
    x, outer = jnp.float32(0.4), OUTER[outer]
    expected = ORDERS[order](in_two_maps(by_hand, outer))(x)
    assert_same(ORDERS[order](OWN[own](in_two_maps(OURS[h], outer)))(x), expected)


@custom_gradient(primal=lambda v: jnp.stack([2 * a for a in v]))  # mapped along its second axis
def laid_out_otherwise(v):
    return declared(v)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("h", [*OURS.values(), laid_out_otherwise], ids=[*OURS, "laid out"])
def test_an_axis_that_is_not_the_first(h, axis):
    xs = jnp.float32([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])

    def derivatives(h):
        def total(xs):
            return jnp.sum(jnp.sin(jnp.sum(jax.vmap(jax.jit(h), axis, axis)(xs), 1 - axis)))

        first = jax.grad(total)
        return first(xs), jax.grad(lambda xs: jnp.sum(jnp.cos(first(xs))))(xs)

    assert_same(derivatives(h), derivatives(by_hand))
