"""Closures are read at the call: layers made in a Python loop keep their own weights.

The product of the weights 2, 3 and 5 is 30; 125 is what a rule gives that reads the loop's
variable when it runs, after the loop. Each rule declares 7 times its weight.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from ways import FORWARD, REVERSE, by, every, hand_written, nested_gradient

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

WEIGHTS = (2.0, 3.0, 5.0)
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
SOME = ("grad", "jit(grad)", "grad(vmap)", "grad(checkpoint)", "jvp", "jacfwd(jit)")


def in_f_and_rule(weights, x):
    for w in weights:

        @custom_gradient
        def layer(x):
            return w * x, lambda dy: 7 * dy * w  # noqa: B023

        x = layer(x)
    return x


def in_the_rule_alone(weights, x):
    for w in weights:

        @custom_gradient
        def layer(x):
            return x * 1.0, lambda dy: 7 * dy * w  # noqa: B023

        x = layer(x)
    return x


def through_a_helper(weights, x):
    for w in weights:

        def scale(x):
            return w * x  # noqa: B023

        @custom_gradient
        def layer(x):
            return scale(x), lambda dy: 7 * scale(dy)

        x = layer(x)
    return x


def in_an_object(weights, x):
    class Scale:
        pass

    for w in weights:
        scale = Scale()
        scale.w = w

        @custom_gradient
        def layer(x):
            return scale.w * x, lambda dy: 7 * dy * scale.w  # noqa: B023

        x = layer(x)
    return x


def by_a_loop_in_the_rule(weights, x):
    """The rule's own loop variable is its own."""
    for w in weights:

        @custom_gradient
        def layer(x):
            def grad(dy):
                for factor in (7.0,):
                    dy = dy * factor * w  # noqa: B023
                return dy

            return w * x, grad  # noqa: B023

        x = layer(x)
    return x


def with_variables(weights, x):
    for w in weights:

        @custom_gradient
        def layer(x):
            def grad(dy, variables=()):
                return 7 * dy * w, [5 * dy * x for _ in variables]  # noqa: B023

            def plain(dy, variables=()):
                gx, gv = grad(dy, variables)
                return (gx, gv) if variables else gx

            return w * x, plain  # noqa: B023

        x = layer(x)
    return x


def declared(weights, x):
    for w in weights:

        @custom_gradient(variables=lambda: [w])
        def layer(x):
            def grad(dy, variables):
                return 7 * dy * w, [5 * dy * x]  # noqa: B023

            return w * x, grad  # noqa: B023

        x = layer(x)
    return x


LOOPS = [in_f_and_rule, in_the_rule_alone, through_a_helper, in_an_object, by_a_loop_in_the_rule]
LOOPS += [with_variables, declared]


@pytest.mark.parametrize("loop", LOOPS)
@by({**REVERSE, **FORWARD}, SOME)
def test_concrete_weights(loop, way):
    gradients = way(functools.partial(loop, WEIGHTS))(jnp.float32(1.5))
    assert_same(gradients, (jnp.float32(7**3 * 30),))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("weights", [WEIGHTS, tuple(jnp.float32(w) for w in WEIGHTS)])
@MODES
def test_python_numbers_and_arrays(loop, weights, mode):
    assert_same(mode(jax.grad(functools.partial(loop, weights)))(1.5), jnp.float32(7**3 * 30))


@pytest.mark.parametrize("loop", [in_f_and_rule, through_a_helper, in_an_object, with_variables])
@MODES
def test_traced_weights(loop, mode):
    """Merely traced: by `x` alone."""
    got = mode(jax.grad(lambda x, ws: loop(ws, x)))(jnp.float32(1.5), WEIGHTS)
    assert_same(got, jnp.float32(7**3 * 30))


@pytest.mark.parametrize("loop", [with_variables, declared])
@by({**REVERSE, **FORWARD}, SOME)
def test_differentiated_weights(loop, way):
    def oracle(a, b, c, x):
        layer = hand_written(lambda w, x: w * x, lambda w, x: 5 * x, lambda w, x: 7 * w)
        return layer(c, layer(b, layer(a, x)))

    args = (*map(jnp.float32, WEIGHTS), jnp.float32(1.5))
    expected = jax.grad(oracle, (0, 1, 2, 3))(*args)
    assert float(expected[3]) == 7**3 * 30
    assert_same(way(lambda a, b, c, x: loop((a, b, c), x))(*args), expected)


@pytest.mark.parametrize("loop", [with_variables, declared])
@every({"grad of grad": nested_gradient, "hessian": jax.hessian})
def test_second_order(loop, way):
    """Of the square of the product, by `x`: `L' = 2 h g`, `L'' = 2 g**2` with `g = 7**3 30`."""
    got = way(lambda x: loop(WEIGHTS, x) ** 2)(jnp.float32(1.5))
    assert_same(jax.tree.leaves(got), [jnp.float32(2 * (7**3 * 30) ** 2)])


@MODES
def test_layers_that_are_kept_and_called_later(mode):
    """As any Python function: what the closure holds when it is called, not when it is made."""

    def loss(x):
        layers = []
        for w in WEIGHTS:

            @custom_gradient
            def layer(x):
                return w * x, lambda dy: 7 * dy * w  # noqa: B023

            layers.append(layer)
        y = layers[0](x)  # `w` is 5 here
        w = 11.0  # of no effect on the call above
        return y + 0 * w

    assert_same(mode(jax.value_and_grad(loss))(1.5), (jnp.float32(7.5), jnp.float32(35)))


def test_a_cell_that_the_rule_assigns_stays_shared():
    runs = 0

    @custom_gradient
    def f(x):
        def grad(dy):
            nonlocal runs
            runs += 1
            return 7 * dy * x

        return x**2, grad

    for expected in (1, 2):
        assert_same(jax.grad(f)(2.0), jnp.float32(14))
        assert runs == expected


def test_a_cell_that_the_rule_assigns_beside_one_of_a_loop():
    runs = []

    def loss(x):
        count = 0
        for w in WEIGHTS:

            @custom_gradient
            def layer(x):
                def grad(dy):
                    nonlocal count
                    count += 1
                    runs.append(count)
                    return 7 * dy * w  # noqa: B023

                return w * x, grad  # noqa: B023

            x = layer(x)
        return x

    assert_same(jax.grad(loss)(1.5), jnp.float32(7**3 * 30))
    assert runs == [1, 2, 3]
