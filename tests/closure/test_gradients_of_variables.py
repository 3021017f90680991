"""How `variables` are passed, and their gradients: None, other dtypes, complex, both modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, eager_and_jit
from limits import values_of_closures

from tfgrad_jax import custom_gradient


@eager_and_jit
@pytest.mark.parametrize("none", [[None, None], (None, None), None])
def test_none_is_no_gradient(mode, none):
    def loss(w, b, x):
        @custom_gradient
        def f(x):
            return w * x + b, lambda dy, variables: (7 * dy * w, none)

        return f(x) + 11 * b

    got = mode(jax.grad(loss, (0, 1, 2)))(3.0, 1.0, 2.0)
    assert_same(got, (jnp.float32(0), jnp.float32(11), jnp.float32(21)))


def test_some_none():
    def loss(w, b, x):
        @custom_gradient
        def f(x):
            return w * x + b, lambda dy, variables: (None, [5 * dy * x, None])

        return f(x)

    got = jax.grad(loss, (0, 1, 2))(3.0, 1.0, 2.0)
    assert_same(got, (jnp.float32(10), jnp.float32(0), jnp.float32(0)))


@eager_and_jit
def test_positional_keyword_only_and_rest_parameters(mode):
    def loss(kind):
        def of(w, x):
            @custom_gradient
            def f(x):
                def positional(dy, variables):
                    return 7 * dy, [5 * dy for _ in variables]

                def keyword_only(dy, *, variables=None):
                    return 7 * dy, [5 * dy for _ in variables]

                def rest(*dys, **keywords):
                    return 7 * dys[0], [5 * dys[0] for _ in keywords["variables"]]

                partial = functools.partial(lambda scale, dy, variables: (7 * dy, [5 * dy]), 1)
                return w + x, [positional, keyword_only, rest, partial][kind]

            return f(x)

        return of

    for kind in range(4):
        assert_same(mode(jax.grad(loss(kind), (0, 1)))(1.0, 1.0), (jnp.float32(5), jnp.float32(7)))


@eager_and_jit
def test_bfloat16_variables_get_bfloat16_gradients(mode):
    def loss(w, b, x):
        @custom_gradient
        def f(x):
            wide = w.astype(jnp.float32)

            def grad(dy, variables):
                assert [v.dtype for v in variables] == [jnp.bfloat16, jnp.float32]
                return 7 * dy * wide, [5 * dy * x, 50 * dy.astype(jnp.bfloat16)]

            return wide * x + b, grad

        return f(x)

    got = mode(jax.grad(loss, (0, 1, 2)))(jnp.bfloat16(3), jnp.float32(1), jnp.float32(2))
    assert_same(got, (jnp.bfloat16(10), jnp.float32(50), jnp.float32(21)))


@eager_and_jit
def test_complex_variables_follow_the_convention_of_tensorflow(mode):
    def loss(h):
        return lambda w, x: h(w)(x).real ** 2 + h(w)(x).imag

    def with_rule(w):
        @custom_gradient
        def f(x):
            return w * x, lambda dy, variables: (dy * jnp.conj(w), [dy * jnp.conj(x)])

        return f

    def of_jax(w):
        @functools.partial(custom_gradient, convention="jax")
        def f(x):
            return w * x, lambda dy, variables: (dy * w, [dy * x])

        return f

    w, x = jnp.complex64(3 + 1j), jnp.complex64(2 - 5j)
    expected = jax.grad(loss(lambda w: lambda x: w * x), (0, 1))(w, x)
    for h in (with_rule, of_jax):
        got = mode(jax.grad(loss(h), (0, 1)))(w, x)
        np.testing.assert_allclose(np.stack(got), np.stack(expected), rtol=1e-5)


def test_convention_of_jax_gets_one_upstream_and_the_variables():
    def loss(w, x):
        @functools.partial(custom_gradient, convention="jax")
        def f(x):
            def grad(dys, variables):
                return 7 * dys["b"] * w + dys["a"], [5 * dys["b"] * x for _ in variables]

            return {"b": w * x, "a": x}, grad

        y = f(x)
        return y["a"] + 2 * y["b"]

    assert_same(jax.grad(loss, (0, 1))(3.0, 2.0), (jnp.float32(20), jnp.float32(43)))


@eager_and_jit
def test_forward_mode_transposes_the_gradients_of_variables(mode):
    def h(w, x):
        @custom_gradient
        def f(x):
            return w * x**2, lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

        return f(x)

    y, dy = mode(lambda *a: jax.jvp(h, a, (10.0, 100.0)))(3.0, 2.0)
    assert_same((y, dy), (jnp.float32(12), jnp.float32(5 * 4 * 10 + 7 * 6 * 100)))
    assert_same(mode(jax.grad(h, (0, 1)))(3.0, 2.0), (jnp.float32(20), jnp.float32(42)))
    by_jacfwd = mode(jax.jacfwd(jax.jacfwd(lambda w, x: h(w, x) ** 2, (0, 1)), (0, 1)))(3.0, 2.0)
    assert_same(jax.tree.leaves(by_jacfwd), [jnp.float32(v) for v in (800, 2160, 2016, 4032)])


@values_of_closures
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_eagerly_f_and_its_rule_see_values(argnums):
    seen = []

    def loss(w, x):
        @custom_gradient
        def f(x):
            y = w * x**2 if w > 0 and x > 0 else x

            def grad(dy, variables=()):
                seen.append(float(dy))
                dx = 7 * dy * w * x if dy > 0 else 0 * dy
                return (dx, [5 * dy * x**2]) if len(variables) else dx

            return y, grad

        return f(x)

    expected = {0: jnp.float32(20), 1: jnp.float32(42), (0, 1): (jnp.float32(20), jnp.float32(42))}
    assert_same(jax.grad(loss, argnums)(3.0, 2.0), expected[argnums])
    assert set(seen) == {1.0}


def weighted(variables):
    def loss(w, x):
        @custom_gradient(variables=variables and variables(w))
        def f(x):
            return w * x**2, lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

        return f(x) ** 2

    return loss


@eager_and_jit
@pytest.mark.parametrize("variables", [None, lambda w: [w]], ids=["undeclared", "declared"])
def test_the_declared_gradients_hold_at_second_order(mode, variables):
    expected = (800, 2160), (2016, 4032)
    loss = weighted(variables)
    got = mode(jax.hessian(loss, (0, 1)))(3.0, 2.0)
    assert_same(got, jax.tree.map(jnp.float32, expected))
    got = mode(jax.jacrev(jax.jacrev(loss, (0, 1)), (0, 1)))(3.0, 2.0)
    assert_same(got, jax.tree.map(jnp.float32, expected))


def test_a_weight_captured_at_each_level_of_differentiation():
    def outer(w2, x):
        def inner(w1):
            @custom_gradient
            def f(x):
                def grad(dy, variables):
                    gradients = {id(w1): 5 * dy * w2 * x, id(w2): 7 * dy * w1 * x}
                    return 3 * dy * w1 * w2, [gradients[id(v)] for v in variables]

                return w1 * w2 * x, grad

            return f(x) ** 2

        return jax.grad(inner)(11.0)  # 2 f * 5 w2 x

    w1, w2, x = 11.0, 3.0, 2.0
    expected = (
        2 * 7 * w1 * x * 5 * w2 * x + 2 * w1 * w2 * x * 5 * x,
        2 * 3 * w1 * w2 * 5 * w2 * x + 2 * w1 * w2 * x * 5 * w2,
    )
    for mode in (lambda f: f, jax.jit):
        assert_same(mode(outer)(w2, x), jnp.float32(10 * w1 * w2**2 * x**2))
        assert_same(mode(jax.grad(outer, (0, 1)))(w2, x), jax.tree.map(jnp.float32, expected))
