"""Refs (`jax.new_ref`) that a function or its rule closes over: state, which has no gradient."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit
from jax import lax

from tfgrad_jax import custom_gradient

X = jnp.float32(2)


def three():
    return jax.new_ref(jnp.float32(3))


def read_by_f(x):
    r = three()

    @custom_gradient
    def f(x):
        kept = r[...]
        return kept * x, lambda dy: 7 * dy * kept

    return jax.grad(f)(x)


def read_by_the_rule(x):
    r = three()
    f = custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x * r[...]))
    first = jax.grad(f)(x)
    r[...] = 5 * x
    return first, jax.grad(f)(x)


def written_by_f(x):
    r = three()

    @custom_gradient
    def f(x):
        r[...] += x
        kept = r[...]
        return kept * x, lambda dy: 7 * dy * kept

    return jax.grad(lambda x: f(x) + f(x))(x), r[...]


def written_by_the_rule(x):
    """How a gradient is logged: the Ref has the upstream."""
    r = three()

    @custom_gradient
    def f(x):
        def grad(dy):
            r[...] = dy
            return 7 * dy * x

        return x**2, grad

    return jax.grad(lambda x: 11 * f(x))(x), r[...]


def not_differentiated(x):
    r = three()

    @custom_gradient
    def f(x):
        r[...] += x
        return x**2, lambda dy: 7 * dy * x

    return f(x) + f(x), r[...]


def of_an_inner_function(x):
    r = three()
    inner = custom_gradient(lambda x: (r[...] * x, lambda dy: 7 * dy * r[...]))

    @custom_gradient
    def outer(x):
        y, pull = jax.vjp(inner, x)
        return y, lambda dy: 11 * pull(dy)[0]

    return jax.grad(outer)(x)


def read_by_the_rule_in_a_scan(x):
    def loss(x):
        r = three()
        f = custom_gradient(lambda x: (3 * x, lambda dy: 7 * dy * r[...]))
        return lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=3)[0]

    return jax.grad(loss)(x)


def an_argument_in_a_scan(x):
    """A concrete Ref is an operand; the rule adds the upstreams to it."""
    r = three()

    @custom_gradient
    def f(r, x):
        def grad(dy):
            r[...] += dy
            return None, 7 * dy

        return 3 * x, grad

    def loss(x):
        return lax.scan(lambda c, _: (c + f(r, x), None), 0.0, None, length=3)[0]

    return jax.grad(loss)(x), r[...]


def beside_a_weight(x):
    r = three()

    def loss(w, x):
        @custom_gradient
        def f(x):
            kept = r[...]

            def grad(dy, variables):
                return 7 * dy * kept * w, [5 * dy * x if v is w else None for v in variables]

            return w * kept * x, grad

        return f(x)

    return jax.grad(loss, (0, 1))(jnp.float32(1.5), x)


def ignored_by_y(x):
    """A counter made inside needs no gradient, though JAX takes it for differentiated."""

    def loss(w, x):
        count = jax.new_ref(jnp.float32(0))

        @custom_gradient(variables=[w])
        def f(x):
            count[...] += 1
            return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        return f(x) + 0 * count[...]

    return jax.grad(loss, (0, 1))(jnp.float32(3), x)


def of_a_weight(x):
    """Written by `f` from its weight and read again: as good as the weight."""

    def loss(w, x):
        @custom_gradient
        def f(x):
            first, second = jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros_like(x))
            lax.fori_loop(0, 4, lambda i, _: first.__setitem__(..., first[...] + w * x / 4), None)
            jax.jit(lambda a, b: a.__setitem__(..., b[...] * x))(second, first)
            return jax.freeze(second), lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

        return f(x)

    return jax.grad(loss, (0, 1))(jnp.float32(3), x)


EXPECTED = {
    read_by_f: 21,
    read_by_the_rule: (42, 140),
    written_by_f: (84, 7),
    written_by_the_rule: (154, 11),
    not_differentiated: (8, 7),
    of_an_inner_function: 11 * 21,
    read_by_the_rule_in_a_scan: 63,
    an_argument_in_a_scan: (21, 6),
    beside_a_weight: (10, 31.5),
    ignored_by_y: (10, 21),
    of_a_weight: (20, 42),
}


@eager_and_jit
@pytest.mark.parametrize("program", EXPECTED)
def test_a_ref_is_state(program, mode):
    assert_same(mode(program)(X), jax.tree.map(jnp.float32, EXPECTED[program]))


def test_eagerly_forward_mode_takes_a_rule_that_reads_a_ref():
    r = three()
    f = custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x * r[...]))
    assert_same(jax.jvp(f, (X,), (X,)), (jnp.float32(4), jnp.float32(84)))


@eager_and_jit
@pytest.mark.parametrize("variables", [None, "autodiff"])
def test_a_weight_in_a_captured_ref_is_an_error(variables, mode):
    """No gradient goes through it; zero would be wrong."""

    def loss(w, x):
        ref = jax.new_ref(w * 1.0)

        @custom_gradient(variables=variables)
        def f(x):
            kept = ref[...]
            return kept * x**2, lambda dy: 7 * dy * kept * x

        return f(x)

    with pytest.raises(TypeError, match="closes over"):
        mode(jax.grad(loss, (0, 1)))(jnp.float32(3), X)
