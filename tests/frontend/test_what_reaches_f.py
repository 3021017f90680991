"""What JAX is not tracing at the call reaches `f` exactly as it is, in every mode."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient


class Mode(enum.Enum):
    FAST = 1


class Opaque:
    """An object that JAX knows nothing of."""


UNTRACED = {
    "bool": True,
    "int": 3,
    "float": 2.5,
    "complex": 1 + 2j,
    "str": "same",
    "None": None,
    "callable": jnp.sin,
    "lambda": lambda x: x,
    "dtype": jnp.dtype("bfloat16"),
    "scalar type": jnp.float16,
    "enum": Mode.FAST,
    "object": Opaque(),
    "bytes": b"raw",
    "slice": slice(1, None),
    "array": jnp.arange(3.0),
    "weakly typed array": jnp.asarray(2.0),
    "array of integers": jnp.arange(3),
    "key": jax.random.key(0),
    "NumPy array": np.arange(3.0),
    "NumPy scalar": np.float32(2),
    "NumPy integer": np.int64(2),
    "NumPy bool": np.bool_(True),
    "array of strings": np.array(["a"]),
    "tree": {"mode": "a", "n": (1, None)},
}

TRANSFORMATIONS = {
    "eager": lambda f: lambda xs: jnp.stack([f(x) for x in xs]),
    "jit": lambda f: jax.jit(lambda xs: jnp.stack([f(x) for x in xs])),
    "vmap": jax.vmap,
    "scan": lambda f: lambda xs: lax.scan(lambda c, x: (c, f(x)), 0, xs)[1],
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
}


@pytest.mark.parametrize("kind", UNTRACED)
def test_an_argument_that_is_not_traced_stays_what_it_is(kind):
    given = UNTRACED[kind]

    @custom_gradient
    def h(x, value, more):
        leaves = jax.tree.leaves((value, more["value"]), is_leaf=lambda v: v is None)
        wanted = jax.tree.leaves((given, given), is_leaf=lambda v: v is None)
        assert all(a is b for a, b in zip(leaves, wanted, strict=True))
        return 2 * x, lambda dy: (7 * dy, None, None)

    def loss(x):
        return h(x, given, more={"value": given})

    assert_same(loss(1.0), 2.0)
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        assert_same(grad(1.0), jnp.float32(7))
    assert_same(jax.jvp(loss, (1.0,), (3.0,)), (jnp.float32(2), jnp.float32(21)))
    if kind in ("float", "array"):
        assert_same(jax.vmap(jax.grad(loss))(jnp.ones(2)), jnp.float32([7, 7]))
        assert_same(jax.hessian(lambda x: loss(x) ** 2)(1.0), jnp.float32(98))


@custom_gradient
def branching(x, flag, mode, n, function, y=None):
    """Use each static argument for what only a Python value can do."""
    if flag:
        x = x + 0
    value = {"plain": 1.0, "double": 2.0}[mode] * jnp.ones((n,), x.dtype).sum() * function(x)

    def grad(dy):
        return [7 * n * dy * jnp.cos(x) if flag else dy]

    return value, grad


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_static_arguments_under(name):
    xs = jnp.float32([0.0, 0.5])

    def f(x):
        return branching(x, True, "double", 3, jnp.sin, y=None)

    transformed = TRANSFORMATIONS[name]
    assert_same(transformed(f)(xs), 6 * jnp.sin(xs))
    assert_same(transformed(jax.grad(f))(xs), 21 * jnp.cos(xs))
    assert_same(jax.grad(lambda xs: transformed(f)(xs).sum())(xs), 21 * jnp.cos(xs))


def test_integers_that_are_traced_and_not():
    @custom_gradient
    def h(x, i):
        return x[i], lambda dy: (7 * jnp.zeros_like(x).at[i].set(dy), None)

    x = jnp.float32([1, 2, 3])
    expected = jnp.float32([0, 7, 0])
    assert_same(jax.grad(h)(x, 1), expected)
    assert_same(jax.grad(h)(x, jnp.int32(1)), expected)
    assert_same(jax.jit(jax.grad(h))(x, 1), expected)
    assert_same(jax.grad(h)(x, np.int64(1)), expected)
