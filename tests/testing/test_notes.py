"""Mistakes are named: a factor, a sign, a transpose, a place."""

import jax
import jax.numpy as jnp
import pytest
from checking import X, declare, note, quick

from tfgrad_jax import custom_gradient

SQUARE = 4 * jnp.eye(3) + jnp.arange(9.0).reshape(3, 3)
COMPLEX = jax.lax.complex(X, X[::-1])


def _cube(a, dy):
    return jax.vjp(lambda a: a @ a @ a, a)[1](dy)[0]


@pytest.mark.parametrize(
    ("f", "rule", "x", "expected"),
    [
        (jnp.sin, lambda x, dy: (None,), X, "declared no gradient, expected one"),
        (lambda a: a @ a @ a, lambda a, dy: _cube(a, dy).T, SQUARE,
         "declared = transpose of expected"),
        (jnp.round, lambda x, dy: dy, X, "expected no gradient"),
        (jnp.mean, lambda x, dy: jnp.full_like(x, dy), X, "declared = 3 x expected"),
        (lambda z: z**3, lambda z, dy: dy * 3 * z**2, COMPLEX, "declared = conjugate of expected"),
    ],
)  # fmt: skip
def test_names_the_mistake(f, rule, x, expected):
    assert note(declare(f, rule), x) == expected


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


def test_full_jacobian_finds_the_entry():
    matrix = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    h = declare(lambda x: x**3, lambda x, dy: (dy * 3 * x**2).at[1, 0].add(dy[1, 0]))
    assert note(h, matrix, full=True) == "declared 28, expected 27 at [1, 0]"
    assert quick(declare(lambda x: x**3, lambda x, dy: dy * 3 * x**2), matrix, full=True).ok
    assert quick(declare(jnp.square, lambda z, dy: dy * jnp.conj(2 * z)), COMPLEX, full=True).ok
