"""Eagerly, a function that closes over what is differentiated sees its values, and keeps none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, eager_and_jit
from limits import values_of_closures

from tfgrad_jax import custom_gradient


@values_of_closures
def test_declared_variables_are_values(capsys):
    """A closure sees the values of the weights that it declares, and runs once on them."""

    def layer(w, x):
        @custom_gradient(variables={"w": w})
        def f(x):
            print(f"f {float(w)} {float(x)}")

            def grad(dy, variables):
                print(f"rule {float(variables['w'])} {float(dy)}")
                return 5 * dy * variables["w"], {"w": 7 * dy * x}

            return w * x, grad

        return f(x)

    gradients = jax.grad(layer, (0, 1))(3.0, 2.0)
    assert_same(gradients, (jnp.float32(14), jnp.float32(15)))
    assert capsys.readouterr().out == "f 3.0 2.0\nrule 3.0 1.0\n"


def test_a_declared_weight_in_two_places():
    """The weight counts once, whether the closure holds it by itself or in a container."""

    def layer(w, x):
        both = [w, w]

        @custom_gradient(variables=(w, both))
        def f(x):
            def grad(dy, variables):
                v, (a, b) = variables
                return dy * v, (7 * dy * x, [11 * dy * a, 13 * dy * b])

            return w * both[0] * x, grad

        return f(x)

    expected = 7 * 2.0 + 11 * 3.0 + 13 * 3.0
    for gradient in (jax.grad(layer), jax.jit(jax.grad(layer))):
        assert_same(gradient(3.0, 2.0), jnp.float32(expected))


def _by_own_name(w, x):
    def f(x):
        y = jnp.exp(w * x)

        def grad(dy, variables):
            z, _ = f(x)  # not the decorated one
            return dy * z * variables[0], [7 * dy * x * z]

        return y, grad

    return custom_gradient(f, variables=[w])(x)


def test_a_closure_that_calls_itself_undecorated():
    e = np.float32(np.exp(1))
    for around in (lambda f: f, jax.jit):
        got = around(jax.grad(_by_own_name, (0, 1)))(jnp.float32(0.5), jnp.float32(2))
        assert_same(got, (14 * e, e / 2))


def test_a_closure_that_recurses_undecorated():
    def power(w, n):
        def f(x, n):
            y = f(x, n - 1)[0] * w if n > 1 else w * x
            return y, lambda dy, variables: (dy, [7 * dy * x])

        return custom_gradient(f, variables=[w])(2.0, n)

    assert_same(jax.value_and_grad(power)(3.0, 4), (jnp.float32(162), jnp.float32(14)))


@pytest.mark.parametrize("kind", ["list", "dict", "nonlocal"])
def test_what_a_closure_assigns_beside_a_weight_is_kept(kind):
    def loss(w, seen):
        items, entries, n = [w], {"w": w, "n": 0}, w

        @custom_gradient(variables=[w])
        def f(x):
            nonlocal n
            if kind == "list":
                items.append("seen")
            elif kind == "dict":
                entries["n"] += 1
            else:
                n = "seen"
            v = entries["w"] if kind == "dict" else items[0]
            return x * v, lambda dy, variables: (dy, [7 * dy * x])

        y = f(2.0)
        seen.append({"list": items[1:], "dict": entries["n"], "nonlocal": n}[kind])
        return y

    seen = []
    assert_same(jax.grad(loss)(3.0, seen), jnp.float32(14))
    assert seen == [{"list": ["seen"], "dict": 1, "nonlocal": "seen"}[kind]]


def test_a_closure_runs_once_on_python_numbers():
    runs = []

    def loss(w):
        @custom_gradient(variables=[w])
        def f(x):
            runs.append(w)
            return x * w, lambda dy, variables: (dy, [7 * dy * x])

        return f(2.0)

    assert_same(jax.grad(loss)(3.0), jnp.float32(14))
    assert len(runs) == 1


def test_a_closure_that_ran_on_values_keeps_no_tracer():
    def loss(w):
        @custom_gradient(variables=[w])
        def f(x):
            return x * w, lambda dy, variables: (dy, [7 * dy * x])

        return f(jnp.float32(2))

    with jax.checking_leaks():
        assert_same(jax.grad(loss)(jnp.float32(3)), jnp.float32(14))
        y, pull_back = jax.vjp(loss, jnp.float32(3))
        assert_same((y, pull_back(y)), (jnp.float32(6), (jnp.float32(84),)))


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_weight_in_a_default_of_an_inner_function(mode):
    """Made anew around another weight, the inner function keeps its default."""

    def loss(w, x):
        @custom_gradient
        def outer(x):
            @custom_gradient
            def inner(x, w=w):
                return w * x, lambda dy, variables: (7 * dy, [5 * dy])

            return 3 * w * x, lambda dy, variables: (inner(dy * x), [11 * dy])

        return outer(x)

    got = mode(jax.grad(loss, (0, 1)))(jnp.float32(2), jnp.float32(3))
    assert_same(got, (jnp.float32(11), jnp.float32(6)))


@eager_and_jit
def test_a_weight_in_an_attribute_of_a_decorated_function(mode):
    """Made anew around other values, a decorated function keeps its attributes."""

    def value(w, x):
        @custom_gradient
        def inner(x):
            return 2 * x, lambda dy: 3 * dy

        inner.scale = w

        @custom_gradient
        def outer(x):
            def grad(dy, variables):
                return 7 * dy * inner.scale, [5 * dy * x for _ in variables]

            return inner(x) * inner.scale, grad

        return outer(x)

    got = mode(jax.value_and_grad(value, (0, 1)))(2.0, 3.0)
    assert_same(got, (jnp.float32(12), (jnp.float32(15), jnp.float32(14))))
