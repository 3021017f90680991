"""A function that stores what its rule reads, in an object, say, or a dict, and is called twice.

The rule of the first call must not use what the second has stored. Traced, it has what its own call
stored; eagerly it runs as it is, and there it is an error. What is stored and never read is in
nobody's way. Rules are wrong by a factor of 7.
"""

import types

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

A, B = jnp.float32(0.3), jnp.float32(1.1)
SCALE = jnp.float32(7)
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


LOCAL = {
    "method": lambda: Operation().method,
    "bound rule": lambda: custom_gradient(Operation().forward),
    "namespace": in_a_namespace,
    "callable rule": in_the_rule,
    "dict": in_a_dict,
}
GLOBAL = {"global dict": in_a_global_dict, "global variable": in_a_global_variable}
ALL = LOCAL | GLOBAL
by_place = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
by_local_place = pytest.mark.parametrize("make", LOCAL.values(), ids=LOCAL)
EXPECTED = 7 * jnp.cos(A) * jnp.sin(B), 7 * jnp.cos(B) * jnp.sin(A)


def product(h):
    return lambda a, b: h(a) * h(b)


@by_place
def test_called_once(make):
    both, h = jnp.stack([A, B]), make()
    assert_same(jax.grad(h)(A), 7 * jnp.cos(A))
    assert_same(jax.vjp(h, B)[1](jnp.float32(2))[0], 14 * jnp.cos(B))
    assert_same(jax.vmap(jax.grad(h))(both), 7 * jnp.cos(both))
    assert_same(jax.jvp(h, (A,), (B,))[1], 7 * jnp.cos(A) * B)
    assert_same(jax.jit(jax.grad(h))(A), 7 * jnp.cos(A))


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
def test_called_twice_where_it_is_traced(make):
    f = product(make())
    assert_same(jax.jit(jax.grad(f, (0, 1)))(A, B), EXPECTED)
    assert_same(jax.grad(jax.jit(f), (0, 1))(A, B), EXPECTED)
    assert_same(jax.grad(jax.checkpoint(f), (0, 1))(A, B), EXPECTED)
    assert_same(jax.jvp(f, (A, B), (B, A))[1], EXPECTED[0] * B + EXPECTED[1] * A)
    mapped = jax.vmap(jax.grad(f, (0, 1)))(A[None], B[None])
    assert_same(jax.tree.map(jnp.squeeze, mapped), EXPECTED)

    def scanned(a):
        return lax.scan(lambda c, x: (c * f(x, B), None), jnp.float32(1), a[None])[0]

    assert_same(jax.grad(scanned)(A), EXPECTED[0])


@by_local_place
def test_second_order(make):
    second, f = -7 * jnp.sin(A) * jnp.sin(B), product(make())
    assert_same(jax.jit(jax.grad(jax.grad(f)))(A, B), second)
    assert_same(jax.hessian(f)(A, B), second)


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
    assert kept.calls >= 2


def test_the_same_array_may_be_stored_again():
    kept = {}

    @custom_gradient
    def h(x):
        kept["scale"] = SCALE
        c = jnp.cos(x)
        return jnp.sin(x), lambda dy: kept["scale"] * dy * c

    assert_same(jax.grad(product(h), (0, 1))(A, B), EXPECTED)


# --- what is stored and never read --------------------------------------------------------------


def appended():
    log = []

    @custom_gradient
    def h(x):
        c = jnp.cos(x)
        log.append(c)

        def rule(dy):
            log.append(dy)
            return 7 * dy * c

        return jnp.sin(x), rule

    return h, log


def filling(log, put):
    """The same, by a function that puts a value into the log."""

    @custom_gradient
    def h(x):
        c = jnp.cos(x)
        put("c", c)

        def rule(dy):
            put("dy", dy)
            return 7 * dy * c

        return jnp.sin(x), rule

    return h, log


def set_by_key():
    log = {}

    def put(key, value):
        log[key] = value

    return filling(log, put)


def updated():
    log = {}
    return filling(log, lambda key, value: log.update({key: value}))


PROGRAMS = {
    "eager": jax.grad,
    "jit": lambda h: jax.jit(jax.grad(lambda x: h(x))),
    "grad of jit": lambda h: jax.grad(jax.jit(lambda x: h(x))),
    "vmap": lambda h: lambda x: jax.vmap(jax.grad(h))(x[None])[0],
    "jvp": lambda h: lambda x: jax.jvp(h, (x,), (jnp.ones_like(x),))[1],
    "scan": lambda h: jax.grad(lambda x: lax.map(h, x[None])[0]),
    "checkpoint": lambda h: jax.grad(jax.checkpoint(h)),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(a, b, marks=() if {a, b} == {"jit", "eager"} else pytest.mark.slow)
        for a in PROGRAMS
        for b in PROGRAMS
    ],
)
@pytest.mark.parametrize("make", [appended, set_by_key, updated])
def test_a_log_with_tracers_of_an_earlier_call(make, first, second):
    h, log = make()
    assert_same(PROGRAMS[first](h)(A), 7 * jnp.cos(A))
    assert_same(PROGRAMS[second](h)(B), 7 * jnp.cos(B))
    assert_same(jax.jit(jax.hessian(h))(A), -7 * jnp.sin(A))
    assert log
