"""Mistakes are named: a factor, a sign, a transpose, a place."""

import jax
import jax.numpy as jnp
import pytest
from checking import X, declare, note, quick

from tfgrad_jax import custom_gradient


def test_names_other_mistakes():
    square = 4 * jnp.eye(3) + jnp.arange(9.0).reshape(3, 3)
    zero = declare(jnp.sin, lambda x, dy: None)
    assert note(zero, X) == "declared no gradient, expected one"
    transposed = declare(lambda a: a @ a @ a, lambda a, dy: _cube(a, dy).T)
    assert note(transposed, square) == "declared = transpose of expected"
    rounding = declare(jnp.round, lambda x, dy: dy)
    assert note(rounding, X) == "expected no gradient"
    doubled = declare(jnp.mean, lambda x, dy: jnp.full_like(x, dy))
    summed = "declared = 3 x expected: a sum in place of a mean over an axis of 3?"
    assert note(doubled, X) == summed
    other = declare(jnp.sin, lambda x, dy: dy * jnp.exp(x))
    assert note(other, X).startswith("declared ")
    conjugated = declare(lambda z: z**3, lambda z, dy: dy * jnp.conj(3 * z**2), convention="jax")
    assert note(conjugated, jax.lax.complex(X, X[::-1])) == "declared = conjugate of expected"


def _cube(a, dy):
    return jax.vjp(lambda a: a @ a @ a, a)[1](dy)[0]


def test_names_a_gradient_in_the_wrong_place():
    @custom_gradient
    def h(x, y):
        return x * jnp.exp(y), lambda dy: (dy * jnp.exp(y), dy * jnp.exp(y))

    first, second = quick(h, X, X[::-1]).rows
    assert first.ok and second.note == "declared that of `x`"


def test_one_wrong_entry_is_found():
    x = jnp.linspace(0.1, 2, 1000)
    h = declare(jnp.sin, lambda x, dy: (dy * jnp.cos(x)).at[617].multiply(1.01))
    assert not quick(h, x).ok
    assert quick(declare(jnp.sin, lambda x, dy: dy * jnp.cos(x)), x).ok


@pytest.mark.slow
def test_full_jacobian_finds_the_entry():
    matrix = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    h = declare(lambda x: x**3, lambda x, dy: (dy * 3 * x**2).at[1, 0].add(dy[1, 0]))
    assert note(h, matrix, full=True) == "declared 28, expected 27 at [1, 0]"
    assert quick(declare(lambda x: x**3, lambda x, dy: dy * 3 * x**2), matrix, full=True).ok
    z = jax.lax.complex(X, X[::-1])
    assert quick(declare(jnp.square, lambda z, dy: dy * jnp.conj(2 * z)), z, full=True).ok
