"""`vmap` over what `y` or the rule ignores, several in each other, and which axis is mapped."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import WAYS

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
    "shifted": (  # what is mapped is in `y`, and nothing that the rule reads
        lambda x, k: custom_gradient(lambda x: (x + k, lambda dy: 7 * dy * dy))(x),
        lambda dy, k: 7 * dy * dy,
    ),
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


CORE = [(n, own, "eager") for n in ("linear", "shifted") for own in OWN]
CORE += [(n, "jit", "jit") for n in FUNCTIONS]


@pytest.mark.sampled(15)
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
    if name not in ("nonlinear", "shifted"):
        assert_same(around(jax.jacfwd(loss))(X), total)

    def squares(x):
        return jnp.sum(jax.vmap(f, (None, 0))(x, K) ** 2 * SCALE)

    # The rule at `2 scale y`, and again at the derivative of that.
    y = X + K if name == "shifted" else jnp.full(3, X)
    by_row = jax.grad(lambda y: jnp.sum(rule(2 * y * SCALE, K)))(y)
    assert_same(jax.grad(jax.grad(around(squares)))(X), jnp.sum(rule(by_row, K)))


# --- the axis that is mapped ----------------------------------------------------------------------


def declared(v):
    return 2 * v, lambda dy: 7 * dy * v


@jax.custom_jvp
def by_hand(v):
    return 2 * v


by_hand.defjvp(lambda primals, tangents: (by_hand(*primals), 7 * primals[0] * tangents[0]))

OURS = {
    "function": {},
    "primal": {"primal": lambda v: v + v},
    "laid out otherwise": {"primal": lambda v: jnp.stack([2 * a for a in v])},  # along the second
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", OURS)
def test_an_axis_that_is_not_the_first(kind, axis):
    xs = jnp.float32([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])

    def derivatives(h):
        def total(xs):
            return jnp.sum(jnp.sin(jnp.sum(jax.vmap(jax.jit(h), axis, axis)(xs), 1 - axis)))

        first = jax.grad(total)
        return first(xs), jax.grad(lambda xs: jnp.sum(jnp.cos(first(xs))))(xs)

    ours = custom_gradient(declared, **OURS[kind])
    assert_same(derivatives(ours), derivatives(by_hand))


# --- a named axis ---------------------------------------------------------------------------------

DEVICES, UPSTREAM = jnp.arange(4.0) + 1, jnp.float32([0, 1, 3, 7])


def psum(v):
    return lax.psum(v, "d")


def summed(x, w):
    """All examples share the value, and each has an upstream of its own."""
    s = psum(x * w)
    return s * w, lambda dy: (7 * psum(dy * w) * w, 5 * psum(dy * w) * x + dy * s)


def numbered(x, w):
    number = lambda: lax.axis_index("d").astype(jnp.float32)  # noqa: E731
    return number() * w, lambda dy: (7 * dy * x, 5 * dy * number())


def in_rule(x, w):
    return x * w, lambda dy: (7 * psum(dy * w), 5 * psum(dy * x))


@jax.custom_batching.custom_vmap
def shared(v):
    return 1.0 * v


@shared.def_vmap
def _(size, batched, v):
    return jnp.sum(v), False


def by_its_own_vmap(x, w):
    return (shared(x * w) if jnp.ndim(x) == 0 else x), lambda dy: (7 * dy * w, 5 * dy * x)


COLLECTIVE = [summed, numbered, in_rule, by_its_own_vmap]
MAPPED = [(0, None), (None, 0), (0, 0)]
INSIDE = {
    **{name: OWN[name] for name in ("nothing", "jit", "checkpoint")},
    "scan": lambda f: lambda x, w: lax.scan(lambda c, x: (c, f(x, w)), 0.0, x[None])[1][0],
    "cond": lambda f: lambda *args: lax.cond(True, f, f, *args),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("f", "own", "mapped"),
    sample(
        itertools.product(COLLECTIVE, INSIDE, MAPPED), 20, [(summed, o, (0, None)) for o in INSIDE]
    ),
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_each_example_has_its_own_upstream(f, own, mapped):
    """As on devices in lockstep: the oracle maps `f` and its rule, at the upstream of each."""
    x, w = (DEVICES / (i + 2) if dim == 0 else jnp.float32(i + 2) for i, dim in enumerate(mapped))
    each = jax.vmap(lambda x, w, dy: f(x, w)[1](dy), (*mapped, 0), axis_name="d")(x, w, UPSTREAM)
    expected = [jnp.sum(g) if dim is None else g for g, dim in zip(each, mapped, strict=True)]
    h = INSIDE[own](custom_gradient(f))

    def loss(x, w):
        return jnp.sum(jax.vmap(h, mapped, axis_name="d")(x, w) * UPSTREAM)

    for derivative in (jax.grad, jax.jacfwd):
        assert_same(list(derivative(loss, (0, 1))(x, w)), expected)
        assert_same(list(jax.jit(derivative(loss, (0, 1)))(x, w)), expected)


@eager_and_jit
@pytest.mark.parametrize("own", ["nothing", "jit"])
def test_the_upstreams_of_two_axes(own, mode):
    def f(x, w):
        s = lax.psum(x * w, "a")

        def rule(dy):
            d = lax.psum(2 * s * lax.psum(dy, "b"), "a")
            return 7 * d * w, 7 * d * x

        return lax.psum(s * s, "b"), rule

    def loss(h, x):
        both = jax.vmap(jax.vmap(h, (0, None), axis_name="a"), (0, None), axis_name="b")
        return jnp.sum(both(x, jnp.float32(2)) * upstreams)

    x = jnp.arange(6.0).reshape(2, 3)
    upstreams = 1 + x**2
    expected = 7 * jax.grad(lambda x: loss(lambda *args: f(*args)[0], x))(x)
    h = INSIDE[own](custom_gradient(f))
    assert_same(mode(jax.grad(lambda x: loss(h, x)))(x), expected)


@pytest.mark.parametrize("own", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("way", ["grad", "jacfwd", "jit(grad)"])
def test_a_rule_that_names_an_axis_outside_of_the_vmap(way, own):
    """Nothing is mapped, so all examples share one call; with a mapped input, each has its own."""

    @custom_gradient
    def h(x, i):
        return x * 1.0, lambda dy: (7 * psum(dy), None)

    def derivative(i):
        rows = lambda x: jax.vmap(lambda k: own(h)(x, i()) * k, axis_name="d")(DEVICES)  # noqa: E731
        return WAYS[way](lambda x: jnp.sum(rows(x) * UPSTREAM))(X)[0]

    with pytest.raises((NameError, AssertionError)) as caught:
        derivative(lambda: 0)
    if way != "jacfwd":  # where JAX knows the name, and the `psum` fails in another way
        note = "\n".join(caught.value.__notes__)
        assert re.search(r"`.*h.* \(.*test_vmap.py.*names an axis that is not bound where", note)
    expected = 7 * 4 * jnp.sum(DEVICES * UPSTREAM)
    assert_same(derivative(lambda: lax.axis_index("d")), expected)
