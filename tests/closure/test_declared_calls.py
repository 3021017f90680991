"""Declared variables: `grad_fn` always gets them, in their structure, in every mode.

The value is `w x**2 + b`; the rule declares `7 w x` for the input, `5 x**2` and 3 for the
variables, where the ordinary derivatives are `2 w x`, `x**2` and 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from ways import FORWARD, REVERSE, SECOND, assert_derivative, by, hand_written

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

ARGS = jnp.float32(3), jnp.float32(0.5), jnp.float32(2)  # w, b, x
SOME = ("grad", "jit(grad)", "grad(vmap)", "grad(scan)", "jvp", "jacfwd(jit)")
SOME += ("grad of grad", "hessian")

declared = hand_written(
    lambda w, b, x: w * x**2 + b,
    lambda w, b, x: 5 * x**2,
    lambda w, b, x: 3.0 + 0 * b,
    lambda w, b, x: 7 * w * x,
)


class Model:
    def __init__(self, w, b):
        self.params = {"w": w, "b": [b]}

    @custom_gradient(variables=lambda self: self.params)
    def call(self, x):
        params = self.params

        def grad(dy, variables):
            assert jax.tree.structure(variables) == jax.tree.structure(params)
            assert variables["w"] is params["w"]
            return 7 * dy * variables["w"] * x, {"w": 5 * dy * x**2, "b": [3 * dy]}

        return params["w"] * x**2 + params["b"][0], grad

    @custom_gradient(variables=lambda self: self.params)
    def flat(self, x):
        params = self.params

        def grad(dy, *, variables):
            return 7 * dy * variables["w"] * x, [3 * dy, 5 * dy * x**2]

        return params["w"] * x**2 + params["b"][0], grad

    @custom_gradient(variables=lambda self: self.params)
    def __call__(self, x):
        def grad(dy, **keywords):
            return 7 * dy * self.params["w"] * x, {"w": 5 * dy * x**2, "b": [3 * dy]}

        return self.params["w"] * x**2 + self.params["b"][0], grad


def by_method(w, b, x):
    return Model(w, b).call(x)


def by_flat_list(w, b, x):
    return Model(w, b).flat(x)


def by_call(w, b, x):
    return Model(w, b)(x)


def by_class(w, b, x):
    return Model.call(Model(w, b), x)


def by_pytree(w, b, x):
    params = {"w": w, "b": (b,)}

    @custom_gradient(variables=params)
    def f(x):
        def grad(dy, variables):
            return 7 * dy * variables["w"] * x, {"w": 5 * dy * x**2, "b": (3 * dy,)}

        return params["w"] * x**2 + params["b"][0], grad

    return f(x)


def by_function(w, b, x):
    @custom_gradient(variables=lambda: (w, b))
    def f(x):
        return w * x**2 + b, lambda dy, variables: (7 * dy * w * x, (5 * dy * x**2, 3 * dy))

    return f(x)


@pytest.mark.parametrize("h", [by_method, by_flat_list, by_call, by_class, by_pytree, by_function])
@by({**REVERSE, **FORWARD, **SECOND}, SOME)
def test_declared(h, way):
    assert_derivative(
        way, lambda w, b, x: h(w, b, x) ** 2, lambda w, b, x: declared(w, b, x) ** 2, *ARGS
    )


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32])
@pytest.mark.parametrize("h", [by_method, by_pytree, by_function])
@by({**REVERSE, **FORWARD, **SECOND}, ("grad", "jit(grad)", "jvp", "hessian"))
def test_concrete_variables_are_passed_too(h, kind, way):
    """Of whatever type: the rule asserts that they come and unpacks them."""
    w, b, x = ARGS
    got = way(lambda x: h(kind(w), kind(b), x))(x)
    # h' = 7 w x, h'' = 7 w
    assert_same(jax.tree.leaves(got), [jnp.float32(21 if way in SECOND.values() else 42)])


@by({**REVERSE, **FORWARD}, ("grad", "jit(grad)", "jvp"))
def test_no_variables_at_all(way):
    """Declared as an empty structure: still passed."""

    @custom_gradient(variables={})
    def f(x):
        def grad(dy, variables):
            assert variables == {}
            return 7 * dy * x, {}

        return x**2, grad

    assert_same(way(f)(jnp.float32(2)), (jnp.float32(14),))


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_unused_variables_get_what_the_rule_says(mode):
    def loss(w, unused, x):
        @custom_gradient(variables=[w, unused])
        def f(x):
            return w * x**2, lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2, 3 * dy])

        return f(x)

    expected = jnp.float32(20), jnp.float32(3), jnp.float32(42)
    assert_same(mode(jax.grad(loss, (0, 1, 2)))(*ARGS), expected)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_variables_are_read_at_the_call(mode):
    """A model that changes between two calls has the variables of its time."""

    def loss(w, b, x):
        model = Model(w, b)
        first = model.call(x)
        model.params = {"w": 2 * w, "b": [b]}
        return first + 10 * model.call(x)

    # first: 5 x**2, 3, 7 w x; second: 2 * 5 x**2, 3, 7 * 2 w x
    expected = jnp.float32(20 + 10 * 40), jnp.float32(33), jnp.float32(42 + 10 * 84)
    assert_same(mode(jax.grad(loss, (0, 1, 2)))(*ARGS), expected)
