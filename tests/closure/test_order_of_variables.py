"""Undeclared variables come in the order of first use, in every mode, and nothing else comes.

`z` is used before `a`, though its name comes after; `k` is used by the rule alone. All have the
same shape, so that only the numbers show a wrong order: the rule returns `5 x` for the first
variable and `11 x**2` for the second, where the ordinary derivatives are `x` and `x**2`.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from ways import (
    AROUND,
    EAGER,
    EAGER_SECOND,
    FORWARD,
    REVERSE,
    SECOND,
    assert_derivative,
    by,
    every,
    hand_written,
)

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

ARRAYS = (3.0, 2.0, 0.5, 1.5)  # z, a, k, x


def value(z, a, k, x):
    return z * x + a * x**2 + 0 * k


oracle = hand_written(
    value,
    lambda z, a, k, x: 5 * x,
    lambda z, a, k, x: 11 * x**2,
    lambda z, a, k, x: 0 * k,
    lambda z, a, k, x: 7 * k * a,
)


def squared(h):
    return lambda *arrays: h(*arrays) ** 2


def straight(z, a, k, x):
    @custom_gradient
    def f(x):
        y = z * x + a * x**2
        slope = k * a

        def grad(dy, variables):
            first, second = variables
            assert first is z
            assert second is a
            return 7 * dy * slope, [5 * dy * x, 11 * dy * x**2]

        return y, grad

    return f(x)


def branching(z, a, k, x):
    """`f` needs the value of its input."""

    @custom_gradient
    def f(x):
        y = z * x if x > 0 else a * x
        y = y + a * x**2
        slope = k * a

        def grad(dy, variables):
            assert len(variables) == 2
            return 7 * dy * slope, [5 * dy * x, 11 * dy * x**2]

        return y, grad

    return f(x)


def branching_on_a_variable(z, a, k, x):
    """`f` needs the value of what it closes over."""

    @custom_gradient
    def f(x):
        y = z * x
        if a > 0:
            y = y + a * x**2

        def grad(dy, variables):
            assert len(variables) == 2
            return 7 * dy * k * a, [5 * dy * x, 11 * dy * x**2]

        return y, grad

    return f(x)


def branching_rule(z, a, k, x):
    """The rule needs values, of its residual and of its upstream."""

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            assert len(variables) == 2
            scale = 7 if k > 0 else 1
            if dy < -1000:
                raise AssertionError
            return scale * dy * k * a, [5 * dy * x, 11 * dy * x**2]

        return z * x + a * x**2, grad

    return f(x)


@by({**REVERSE, **FORWARD})
def test_first_order(way):
    assert_derivative(way, squared(straight), squared(oracle), *ARRAYS)


@by(SECOND, ("grad of grad", "hessian"))
def test_second_order(way):
    assert_derivative(way, squared(straight), squared(oracle), *ARRAYS)


@pytest.mark.parametrize("h", [branching, branching_on_a_variable])
@every({**EAGER, **EAGER_SECOND})
def test_where_f_branches_on_values(h, way):
    assert_derivative(way, squared(h), squared(oracle), *ARRAYS)


@every({"grad": EAGER["grad"], "grad of grad": EAGER_SECOND["grad of grad"]})
def test_where_the_rule_branches_on_values(way):
    assert_derivative(way, squared(branching_rule), squared(oracle), *ARRAYS)


@pytest.mark.parametrize("h", [branching, branching_on_a_variable])
@pytest.mark.parametrize("around", AROUND)
def test_a_branch_needs_a_value_that_can_be_seen(h, around):
    """As in plain JAX, where the same condition stands under a tracer without a value."""
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.grad(AROUND[around](h))(*ARRAYS)


@pytest.mark.parametrize("h", [straight, branching, branching_on_a_variable])
def test_a_swapped_pair_would_show(h):
    """By hand: `5 x` by the first, `11 x**2` by the second and `7 k a` by the input."""
    expected = jax.tree.map(jnp.float32, (7.5, 24.75, 0.0, 7.0))
    assert_same(jax.grad(h, (0, 1, 2, 3))(*ARRAYS), expected)


# --- what counts as a use ------------------------------------------------------------------------


def _late(z, a, x):
    """`a` is read first, but `z` is the first that an operation uses."""
    known = {"a": a}
    return z * x + known["a"] * x**2


def _twice(z, a, x):
    return z * x + a * x**2 + z * 0


def _in_jit(z, a, x):
    return jax.jit(lambda x: z * x)(x) + a * x**2


def _in_checkpoint(z, a, x):
    return jax.checkpoint(lambda x: z * x + a * x**2)(x)


def _in_cond(z, a, x):
    return jax.lax.cond(x > 0, lambda x: z * x + a * x**2, lambda x: z * x + a, x)


def _in_scan(z, a, x):
    return jax.lax.scan(lambda c, _: (c + z * x + a * x**2, None), 0 * x, None, length=1)[0]


def _in_a_helper(z, a, x):
    def linear(x):
        return z * x

    return linear(x) + a * x**2


@pytest.mark.parametrize(
    "use", [_late, _twice, _in_jit, _in_checkpoint, _in_cond, _in_scan, _in_a_helper]
)
@by({**REVERSE, **FORWARD}, ("grad", "jit(grad)", "jvp"))
def test_order_of_first_use(use, way):
    def h(z, a, k, x):
        @custom_gradient
        def f(x):
            def grad(dy, variables):
                first, second = variables
                assert first is z
                assert second is a
                return 7 * dy * k * a, [5 * dy * x, 11 * dy * x**2]

            return use(z, a, x), grad

        return f(x)

    assert_derivative(way, squared(h), squared(oracle), *ARRAYS)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_value_that_is_traced_but_not_differentiated_is_listed_in_its_place(mode):
    lengths = []

    def h(z, a, k, x):
        @custom_gradient
        def f(x):
            def grad(dy, variables):
                lengths.append(len(variables))
                return 7 * dy * k * a, [5 * dy * x, 11 * dy * x**2]

            return z * x + a * x**2, grad

        return f(x)

    z, a, k, x = (jnp.float32([v, 2 * v]) for v in ARRAYS)
    got = mode(jax.vmap(jax.grad(h, 1)))(z, a, k, x)
    assert_same(got, 11 * x**2)
    assert set(lengths) == {2}
