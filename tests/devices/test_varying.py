"""Inside a checked `shard_map`, a gradient varies over the devices exactly where its input does.

A gradient for an input that all devices share is summed, as JAX does for its own operations. A pair
that was written for `check_vma=False` is refused, as by hand: its sums are done already.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import assert_as_by_hand, mesh, needs_eight_devices, squared
from helpers import assert_same
from jax import lax
from jax.sharding import PartitionSpec
from pairs import RULES, STYLES, Rule, by_hand, inputs

from tfgrad_jax import custom_gradient

pytestmark = needs_eight_devices
ALL, ROWS = PartitionSpec(), PartitionSpec("i")

_random = np.random.default_rng(0)
X, A, B = (
    jnp.asarray(_random.normal(size=shape), jnp.float32) for shape in ((4, 16), (16, 8), (8, 16))
)
PARALLEL = (PartitionSpec(None, "i"), PartitionSpec("i", None))


def megatron(way, typed):
    """Return a perceptron whose hidden layer is split: `enter` and `leave` are Megatron's f and g.

    The pair is written for a `shard_map` that checks nothing, or (`typed`) for one that does.
    """

    def vary(x):
        return lax.pcast(x, "i", to="varying") if typed else x

    enter = way(Rule(lambda x: (vary(x), None), lambda _, dy: (lax.psum(dy, "i"),), ()))
    leave = way(Rule(lambda x: (lax.psum(x, "i"), None), lambda _, dy: (vary(dy),), ()))

    return lambda x, weights: leave(jnp.tanh(enter(x) @ weights[0]) @ weights[1])


def gradients(way, typed, check_vma):
    local = megatron(way, typed)
    return jax.shard_map(
        jax.grad(lambda x, weights: jnp.sum(local(x, weights) ** 2), (0, 1)),
        mesh=mesh(("i", 8)),
        in_specs=(ALL, PARALLEL),
        out_specs=(ALL, PARALLEL),
        check_vma=check_vma,
    )


def expected():
    return jax.grad(lambda x, w: jnp.sum((jnp.tanh(x @ w[0]) @ w[1]) ** 2), (0, 1))(X, (A, B))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_megatron(checked):
    programs = [gradients(way, checked, checked) for way in (inputs, by_hand)]
    got, _ = assert_as_by_hand(*programs, X, (A, B))
    assert_same(got, expected(), rtol=1e-4, atol=1e-4)


def test_megatron_written_for_unchecked_is_refused():
    for way in (by_hand, inputs):
        with pytest.raises((TypeError, ValueError), match=r"manual axis types|var(y|ies|ying)"):
            jax.jit(gradients(way, False, True))(X, (A, B))


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("name", ["dense", "normalize"])
def test_a_gradient_that_varies_is_summed_for_an_input_that_does_not(name, style):
    """Each device has computed its part: it is summed, as JAX does for its own operations."""
    rule = RULES[name]

    def summing(*arrays):
        pair = rule.backward

        def backward(residuals, dy):
            dw, dx = pair(residuals, dy)
            return lax.psum(dw, "i"), dx

        return by_hand(rule._replace(backward=backward))(*arrays)

    def total(f):
        mapped = jax.shard_map(f, mesh=mesh(("i", 8)), in_specs=(ALL, ROWS), out_specs=ROWS)
        return jax.jit(squared(mapped))(*rule.arrays)

    assert_same(total(style(rule)), total(summing), rtol=1e-5)


def test_a_constant_gradient_says_what_to_do():
    """The gradient of an input that varies must vary: the message names the conversion."""

    def loss(gradient):
        h = custom_gradient(lambda x: (x * 1.0, lambda dy: gradient(jnp.ones(2))))
        local = jax.grad(lambda x: jnp.sum(h(x)))
        return jax.shard_map(local, mesh=mesh(("i", 8)), in_specs=ROWS, out_specs=ROWS)

    with pytest.raises(ValueError, match=r"input `x` .* axis 'i'.*pcast\(g, \('i',\)"):
        loss(lambda g: g)(jnp.zeros(16))
    if hasattr(lax, "pcast"):
        assert_same(loss(lambda g: lax.pcast(g, ("i",), to="varying"))(jnp.zeros(16)), jnp.ones(16))
