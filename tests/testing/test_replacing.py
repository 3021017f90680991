"""Operations take other values for arrays that code holds; `check_gradient` rests on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient
from tfgrad_jax._jax.watching import replacing

OLD, NEW, X = jnp.float32(1.5), jnp.float32(0.7), jnp.float32(2.0)
S, C = np.sin(0.7), np.cos(0.7)


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient(variables=lambda self: self.w)
    def __call__(self, x):  # 7 times too much of `w`; the rule reads it when it runs
        y = jnp.sin(self.w) * x
        return y, lambda dy, variables: (dy * jnp.sin(self.w), 7 * dy * x * jnp.cos(self.w))


def scan(x):
    return jax.lax.scan(lambda y, _: (y * jnp.sin(OLD), None), x, None, length=1)[0]


def nested(x):
    return jax.grad(lambda x: jnp.sin(OLD) * x**2 / 2)(x)


CODE = {
    "an operation": lambda x: jnp.sin(OLD) * x,
    "a layer": Layer(OLD),
    "vmap": lambda x: jax.vmap(Layer(OLD))(x[None])[0],
    "jit of an argument": lambda x: jax.jit(lambda w, x: jnp.sin(w) * x)(OLD, x),
    "a scan": scan,
    "a derivative": nested,
    "a custom_jvp": lambda x: jax.nn.relu(jnp.sin(OLD)) * x,
}


@pytest.mark.parametrize("name", CODE)
def test_code_runs_as_if_it_held_other_values(name):
    f = CODE[name]
    with replacing([OLD], [NEW]):
        np.testing.assert_allclose(f(X), S * 2, rtol=1e-6)
    np.testing.assert_allclose(f(X), np.sin(1.5) * 2, rtol=1e-6)  # and then as before


def gradients(w, x, dy=1.0):
    def f(w, x):
        with replacing([OLD], [w]):
            return Layer(OLD)(x)

    _, pull = jax.vjp(f, w, x)
    with replacing([OLD], [w]):  # the rule runs here
        return pull(jnp.float32(dy))


def test_declared_variables_are_differentiated_by_their_rule_to_any_order():
    np.testing.assert_allclose(gradients(NEW, X), [7 * 2 * C, S], rtol=1e-6)
    of_dw, pull = jax.vjp(lambda w, x: gradients(w, x)[0], NEW, X)
    with replacing([OLD], [NEW]):
        np.testing.assert_allclose(pull(of_dw / of_dw), [-7 * 2 * S, 7 * C], rtol=1e-6)


def test_code_can_be_told_apart_by_what_it_takes():
    taken = []
    with replacing([OLD], [NEW], lambda values, params, results: taken.append((values, results))):
        y = jax.lax.sin(OLD)
    assert taken[0][0][0] is OLD and taken[-1][1][0] is y
