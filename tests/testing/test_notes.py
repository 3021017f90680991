"""Mistakes are named: a factor, a sign, a swapped pair, a transpose, a conjugate."""

import jax
import jax.numpy as jnp
import pytest
from checking import X, declare, fact, note, notes, quick
from right_rules import rule

SQUARE = 4 * jnp.eye(3) + jnp.arange(9.0).reshape(3, 3)
COMPLEX = jax.lax.complex(X, X[::-1])


def _cube(a, dy):
    return jax.vjp(lambda a: a @ a @ a, a)[1](dy)[0]


@pytest.mark.parametrize(
    ("f", "rule", "x", "expected"),
    [
        (jnp.sin, lambda x, dy: (None,), X, "declared no gradient, expected one"),
        (jnp.cos, lambda x, dy: dy * jnp.sin(x), X, "wrong sign: declared = -1 x expected"),
        (lambda a: a @ a @ a, lambda a, dy: _cube(a, dy).T, SQUARE,
         "declared = transpose of expected"),
        (jnp.round, lambda x, dy: dy, X, "expected no gradient"),
        (jnp.mean, lambda x, dy: jnp.full_like(x, dy), X, "declared = 3 x expected"),
        (lambda z: z**3, lambda z, dy: dy * 3 * z**2, COMPLEX, "declared = conjugate of expected"),
        (jnp.square, lambda z, dy: dy * z.conj(), COMPLEX, "declared = 0.5 x expected"),
    ],
)  # fmt: skip
def test_names_the_mistake(f, rule, x, expected):
    assert note(declare(f, rule), x) == expected


def test_names_a_swapped_pair_and_a_gradient_in_the_wrong_place():
    swapped = rule(jnp.multiply, lambda dz, z, x, y: (dz * x, dz * y))
    expected = {"xs[0]": "swapped with `xs[1]`?", "xs[1]": "swapped with `xs[0]`?"}
    assert notes(quick(swapped, X, X[::-1])) == expected
    twice = rule(lambda x, y: x * jnp.exp(y), lambda dz, z, x, y: (dz * jnp.exp(y),) * 2)
    assert notes(quick(twice, X, X[::-1])) == {"xs[0]": "", "xs[1]": "declared that of `xs[0]`"}


def test_a_bias_that_is_not_summed_over_the_batch():
    h = rule(lambda x, b: x + jnp.broadcast_to(b, x.shape), lambda dy, y, x, b: (dy, dy))
    report = quick(h, jnp.ones((4, 3)), X)
    assert not report and "did you forget to sum over axis 0" in fact(report, "rule").text


def test_one_wrong_entry_is_found():
    x = jnp.linspace(0.1, 2, 1000)
    h = declare(jnp.sin, lambda x, dy: (dy * jnp.cos(x)).at[617].multiply(1.01))
    assert note(h, x).startswith("differs by ")
    assert quick(declare(jnp.sin, lambda x, dy: dy * jnp.cos(x)), x).ok
