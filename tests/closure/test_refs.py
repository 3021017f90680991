"""Refs (`jax.new_ref`) that a function or its rule closes over: state, which has no gradient."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

X = jnp.float32(2)
PROGRAMS = {}


def program(*expected):
    def register(f):
        PROGRAMS[f.__name__] = f, tuple(map(jnp.float32, expected))
        return f

    return register


def reading(r):
    """Return a function that reads a Ref, as its rule does in the forward pass."""

    def f(x):
        kept = r[...]
        return kept * x, lambda dy: 7 * dy * kept

    return custom_gradient(f)


@program(84, 7)
def written_by_f(r, x):
    @custom_gradient
    def f(x):
        r[...] += x
        kept = r[...]
        return kept * x, lambda dy: 7 * dy * kept

    return jax.grad(lambda x: f(x) + f(x))(x), r[...]


@program(154, 11)
def written_by_the_rule(r, x):
    """How a gradient is logged: the Ref has the upstream."""

    @custom_gradient
    def f(x):
        def grad(dy):
            r[...] = dy
            return 7 * dy * x

        return x**2, grad

    return jax.grad(lambda x: 11 * f(x))(x), r[...]


@program(42, 140, 3.0)
def read_by_the_rule(r, x):
    f = custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x * r[...]))
    first, kept = jax.grad(f)(x), r[...]
    r[...] = 5 * x
    return first, jax.grad(f)(x), kept


@program(63, 6)
def an_argument_in_a_scan(r, x):
    """A concrete Ref is an operand; the rule adds the upstreams to it."""

    @custom_gradient
    def f(r, x):
        def grad(dy):
            r[...] += dy
            return None, 7 * dy

        return 3 * x, grad

    loss = lambda x: lax.scan(lambda c, _: (c + 3 * f(r, x), 0), 0.0, None, 1)[0]  # noqa: E731
    return 3 * jax.grad(loss)(x), r[...]


@program(10, 21)
def ignored_by_y(_, x):
    """A counter made inside needs no gradient, though JAX takes it for differentiated."""

    def loss(w, x):
        count = jax.new_ref(jnp.float32(0))

        @custom_gradient(variables=[w])
        def f(x):
            count[...] += 1
            return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        return f(x) + 0 * count[...]

    return jax.grad(loss, (0, 1))(jnp.float32(3), x)


@program(20, 42)
def of_a_weight(_, x):
    """Written by `f` from its weight, in a loop and a `jit`, and read: as good as the weight."""

    def loss(w, x):
        @custom_gradient
        def f(x):
            first, second = jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros_like(x))
            lax.fori_loop(0, 4, lambda i, _: first.__setitem__(..., first[...] + w * x / 4), None)
            jax.jit(lambda a, b: a.__setitem__(..., b[...] * x))(second, first)
            return jax.freeze(second), lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

        return f(x)

    return jax.grad(loss, (0, 1))(jnp.float32(3), x)


@eager_and_jit
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_ref_is_state(name, mode):
    run, expected = PROGRAMS[name]
    assert_same(mode(lambda x: run(jax.new_ref(jnp.float32(3)), x))(X), expected)


@eager_and_jit
def test_a_gradient_that_reads_a_ref_is_differentiated_by_what_is_in_it(mode):
    def loss(w, x):
        f = custom_gradient(lambda r, x: (r[...] * x, lambda dy: (None, 7 * dy * r[...])))
        return f(jax.new_ref(w), x) ** 2

    # By x it is 14 w r x, where the first factor, of `f`, has no gradient by the Ref.
    assert_same(mode(jax.grad(jax.grad(loss, 1)))(jnp.float32(3), X), jnp.float32(14 * 3 * X))


def test_eagerly_forward_mode_takes_a_rule_that_reads_a_ref():
    r = jax.new_ref(jnp.float32(3))
    f = custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x * r[...]))
    assert_same(jax.jvp(f, (X,), (X,)), (jnp.float32(4), jnp.float32(84)))


@eager_and_jit
@pytest.mark.parametrize("variables", [None, "autodiff"])
def test_a_weight_in_a_captured_ref_is_an_error(variables, mode):
    """No gradient goes through it; zero would be wrong."""

    def loss(w, x):
        f = reading(jax.new_ref(w * 1.0)).__wrapped__
        return custom_gradient(f, variables=variables)(x)

    with pytest.raises(TypeError, match="closes over"):
        mode(jax.grad(loss, (0, 1)))(jnp.float32(3), X)


@eager_and_jit
@pytest.mark.parametrize("protocol", ["undeclared", "declared"])
def test_a_rule_with_variables_reads_a_ref(protocol, mode):
    def gradients(w, x):
        r = jax.new_ref(jnp.float32(1))

        def loss(w, x):
            @custom_gradient(variables=[w] if protocol == "declared" else None)
            def f(x):
                r[...] += 1.0
                return w * x, lambda dy, variables: (7 * dy * w * r[...], [5 * dy * x])

            return f(x)

        return *jax.grad(loss, (0, 1))(w, x), r[...]

    # Once: to find the variables, JAX traces the function, which writes nothing.
    assert_same(mode(gradients)(jnp.float32(3), X), (5 * X, jnp.float32(42), jnp.float32(2)))
