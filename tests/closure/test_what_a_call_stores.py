"""A function that stores what its rule reads, in an object, say, or a dict, and is called twice.

The rule of the first call must not use what the second has stored. Traced, it has what its own call
stored; eagerly it runs as it is, and there it is an error. Rules are wrong by a factor of 7.
"""

import types

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

A, B = jnp.float32(0.3), jnp.float32(1.1)
STORE = {}


class Operation:
    def forward(self, x):
        self.x = x
        return jnp.sin(x), self.backward

    def backward(self, dy):
        return 7 * dy * jnp.cos(self.x)

    @custom_gradient
    def method(self, x):
        self.x = x
        return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(self.x)


def in_a_namespace():
    kept = types.SimpleNamespace()

    @custom_gradient
    def h(x):
        kept.x = x
        return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(kept.x)

    return h


class Rule:
    def __call__(self, dy):
        return 7 * dy * jnp.cos(self.x)


def in_the_rule():
    rule = Rule()

    @custom_gradient
    def h(x):
        rule.x = x
        return jnp.sin(x), rule

    return h


def in_a_dict():
    kept = {}

    @custom_gradient
    def h(x):
        kept["x"] = x
        return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(kept["x"])

    return h


def in_a_global_dict():
    @custom_gradient
    def h(x):
        STORE["x"] = x
        return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(STORE["x"])

    return h


def in_a_global_variable():
    @custom_gradient
    def h(x):
        global x_of_the_call
        x_of_the_call = x
        return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(x_of_the_call)

    return h


OBJECTS = {
    "method": lambda: Operation().method,
    "bound rule": lambda: custom_gradient(Operation().forward),
    "namespace": in_a_namespace,
    "callable rule": in_the_rule,
}
LOCAL = OBJECTS | {"dict": in_a_dict}
GLOBAL = {"global dict": in_a_global_dict, "global variable": in_a_global_variable}
ALL = LOCAL | GLOBAL
by_place = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
by_local_place = pytest.mark.parametrize("make", LOCAL.values(), ids=LOCAL)
by_object = pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
EXPECTED = 7 * jnp.cos(A) * jnp.sin(B), 7 * jnp.cos(B) * jnp.sin(A)


def product(h):
    return lambda a, b: h(a) * h(b)


@by_place
def test_called_once(make):
    both = jnp.stack([A, B])
    assert_same(jax.grad(make())(A), 7 * jnp.cos(A))
    assert_same(jax.vjp(make(), B)[1](jnp.float32(2))[0], 14 * jnp.cos(B))
    assert_same(jax.vmap(jax.grad(make()))(both), 7 * jnp.cos(both))
    assert_same(jax.jvp(make(), (A,), (B,))[1], 7 * jnp.cos(A) * B)
    assert_same(jax.jit(jax.grad(make()))(A), 7 * jnp.cos(A))


@by_place
def test_called_twice_eagerly(make):
    h = make()
    with pytest.raises(RuntimeError, match=r"reads `x\w*`, where another call has stored another"):
        jax.grad(product(h), (0, 1))(A, B)
    pull = jax.vjp(h, A)[1]
    jax.grad(h)(B)
    with pytest.raises(RuntimeError, match=r"test_what_a_call_stores.py:\d+.*local variable"):
        pull(jnp.float32(1))


@pytest.mark.parametrize("make", GLOBAL.values(), ids=GLOBAL)
def test_called_twice_under_jit_with_what_is_global(make):
    with pytest.raises(RuntimeError, match=r"reads `x\w*`, where another call has stored another"):
        jax.jit(jax.grad(product(make()), (0, 1)))(A, B)


@by_local_place
def test_called_twice_under_jit(make):
    assert_same(jax.jit(jax.grad(product(make()), (0, 1)))(A, B), EXPECTED)


@by_object
def test_called_twice_where_it_is_traced(make):
    """Not so a dict, a pytree: JAX refuses a tracer of another trace that is left in it."""

    def f():
        return product(make())

    assert_same(jax.grad(jax.jit(f()), (0, 1))(A, B), EXPECTED)
    assert_same(jax.grad(jax.checkpoint(f()), (0, 1))(A, B), EXPECTED)
    assert_same(jax.jvp(f(), (A, B), (B, A))[1], EXPECTED[0] * B + EXPECTED[1] * A)
    mapped = jax.vmap(jax.grad(f(), (0, 1)))(A[None], B[None])
    assert_same(jax.tree.map(jnp.squeeze, mapped), EXPECTED)

    def scanned(a):
        each = f()
        return lax.scan(lambda c, x: (c * each(x, B), None), jnp.float32(1), a[None])[0]

    assert_same(jax.grad(scanned)(A), EXPECTED[0])


@by_local_place
def test_second_order(make):
    second = -7 * jnp.sin(A) * jnp.sin(B)
    assert_same(jax.jit(jax.grad(jax.grad(product(make()))))(A, B), second)
    assert_same(jax.hessian(product(make()))(A, B), second)


def test_what_the_rule_does_not_read_is_stored_freely():
    kept = types.SimpleNamespace(scale=jnp.float32(7), calls=0)

    @custom_gradient
    def h(x):
        kept.last = x
        kept.calls += 1
        last = x

        def rule(dy):
            kept.last = dy
            return kept.scale * dy * jnp.cos(last), kept.calls

        return jnp.sin(x), lambda dy: rule(dy)[0]

    assert_same(jax.grad(product(h), (0, 1))(A, B), EXPECTED)
    assert kept.calls == 2


def test_the_same_array_may_be_stored_again():
    kept = {}

    @custom_gradient
    def h(x):
        kept["scale"] = SCALE
        c = jnp.cos(x)
        return jnp.sin(x), lambda dy: kept["scale"] * dy * c

    assert_same(jax.grad(product(h), (0, 1))(A, B), EXPECTED)


SCALE = jnp.float32(7)
