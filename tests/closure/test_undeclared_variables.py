"""Undeclared variables, TensorFlow's own protocol: the list of what `y` depends on."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient


@eager_and_jit
def test_listed_once_each_in_the_order_of_first_use(mode):
    seen = []

    def loss(a, b, c, x):
        @custom_gradient
        def f(x):
            y = (b * x).sum() + (a * x[:2]).sum() * b[0] + (b * c).sum()

            def grad(dy, variables):
                seen.append([v.shape for v in variables])
                assert [v is w for v, w in zip(variables, (b, a, c), strict=True)] == [True] * 3
                return 7 * dy * x, [5 * dy * x, 50 * dy * x[:2], 500 * dy * x]

            return y, grad

        return f(x)

    a, b, c, x = jnp.ones(2), jnp.ones(3), jnp.ones(3), jnp.arange(3.0)
    got = mode(jax.grad(loss, (0, 1, 2, 3)))(a, b, c, x)
    assert_same(got, (50 * x[:2], 5 * x, 500 * x, 7 * x))
    assert seen[0] == [(3,), (2,), (3,)]


@eager_and_jit
def test_identity_holds_in_containers_and_in_rules_that_are_no_functions(mode):
    class Rule:
        def __init__(self, params, x):
            self.params, self.x = params, x

        def __call__(self, dy, variables):
            assert len(variables) == 1
            assert variables[0] is self.params["w"]
            return 7 * dy * self.params["w"], [5 * dy * self.x]

    def loss(w, x):
        params = {"w": w}

        def of_rule(x):
            return params["w"] * x, Rule(params, x)

        def of_function(x):
            def grad(dy, *, variables):
                assert variables[0] is params["w"]
                return 7 * dy * params["w"], [5 * dy * x]

            return params["w"] * x, grad

        return custom_gradient(of_rule)(x) + custom_gradient(of_function)(x)

    assert_same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(20), jnp.float32(42)))


@eager_and_jit
def test_gradients_accumulate_over_calls(mode):
    def loss(w, x):
        @custom_gradient
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        @custom_gradient
        def g(x):
            return w + x, lambda dy, variables: (7 * dy, [50 * dy])

        return f(x) + 2 * f(f(x)) + g(x) + w  # `w` is used outside as well

    # f(f(x)): the inner call gets 2 * 7 w; the outer gives 2 * 5 (w x) to w.
    w, x = 3.0, 2.0
    by_w = 5 * x + 2 * (5 * w * x + 7 * w * 5 * x) + 50 + 1
    by_x = 7 * w + 2 * 7 * w * 7 * w + 7
    assert_same(mode(jax.grad(loss, (0, 1)))(w, x), (jnp.float32(by_w), jnp.float32(by_x)))


@eager_and_jit
def test_only_values_that_y_depends_on(mode):
    def loss(w, residual, mask, x):
        @custom_gradient
        def f(x):
            slope = residual * x  # for the rule alone

            def grad(dy, variables):
                (v,) = variables
                assert v is w
                return jnp.where(mask, 7 * dy * slope, 0), [5 * dy * x]

            return jnp.where(mask, w * x, 0), grad

        return f(x)

    got = mode(jax.grad(lambda w, r, x: loss(w, r, x > 0, x), (0, 1, 2)))(3.0, 11.0, 2.0)
    assert_same(got, (jnp.float32(10), jnp.float32(0), jnp.float32(7 * 22)))


def _by_jit(w, x):
    return jax.jit(lambda x: (x * 2, w * x))(x)


def _by_checkpoint(w, x):
    return jax.checkpoint(lambda x: (x * 2, w * x))(x)


def _by_cond(w, x):
    return jax.lax.cond(x > 0, lambda x: (x * 2, w * x), lambda x: (x * 3, x), x)


def _by_scan(w, x):
    y, slopes = jax.lax.scan(lambda x, _: (x * 2, w * x), x, None, length=1)
    return y, slopes[0]


@eager_and_jit
@pytest.mark.parametrize("compute", [_by_jit, _by_checkpoint, _by_cond, _by_scan])
def test_a_value_for_the_rule_alone_from_one_operation_with_y(mode, compute):
    """`y` and the residual come from the same `jit` or `scan`; `y` does not depend on `w`."""

    def loss(w, x):
        @custom_gradient
        def f(x):
            y, slope = compute(w, x)
            return y, lambda dy: 7 * dy * slope

        return f(x)

    assert_same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(0), jnp.float32(42)))


@custom_gradient
def captures_nothing(x):
    def grad(dy, variables=None):
        assert variables is None
        return 7 * dy * x

    return x**2, grad


@custom_gradient
def captures_nothing_rest(x):
    def grad(dy, **keywords):
        assert not keywords
        return 7 * dy * x

    return x**2, grad


@custom_gradient
def captures_nothing_required(x):
    def grad(dy, variables):
        assert variables == []
        return 7 * dy * x, []

    return x**2, grad


@custom_gradient
def captures_nothing_and_returns_a_pair(x):
    def grad(dy, **keywords):
        assert not keywords
        return 7 * dy * x, [1000.0]

    return x**2, grad


@eager_and_jit
@pytest.mark.parametrize(
    "f",
    [
        captures_nothing,
        captures_nothing_rest,
        captures_nothing_required,
        captures_nothing_and_returns_a_pair,
    ],
    ids=lambda f: f.__name__,
)
def test_without_captured_values_no_variables(mode, f):
    assert_same(mode(jax.grad(f))(2.0), jnp.float32(14))


@pytest.mark.parametrize("required", [True, False])
def test_concrete_captured_values_are_no_variables(required):
    w = jnp.float32(3.0)

    @custom_gradient
    def f(x):
        if required:
            return w * x, lambda dy, variables: (7 * dy * w + len(variables), variables)
        return w * x, lambda dy, **keywords: 7 * dy * w + len(keywords)

    assert_same(jax.grad(f)(2.0), jnp.float32(21))
    assert_same(jax.jit(jax.grad(f))(2.0), jnp.float32(21))


def test_traced_but_not_differentiated_values_are_listed():
    seen = []

    def loss(w, x):
        @custom_gradient
        def f(x):
            def grad(dy, **keywords):
                seen.append(len(keywords["variables"]))
                return 7 * dy * w, [1000 * dy]

            return w * x, grad

        return f(x)

    assert_same(jax.jit(jax.grad(loss, 1))(3.0, 2.0), jnp.float32(21))
    assert_same(jax.vmap(jax.grad(loss, 1))(jnp.ones(2), jnp.ones(2)), jnp.full(2, 7.0))
    assert set(seen) == {1}
