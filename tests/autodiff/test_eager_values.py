"""Eagerly, `f` and `grad_fn` see concrete values: Python control flow, `print` and NumPy work."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


@custom_gradient
def sign(x):
    """TensorFlow's `differentiable_sign`: the derivative of a sigmoid on one side, by `if`."""
    y = 1.0 if x > 0 else -1.0

    def grad(dy):
        return dy * jnp.exp(-x) / (1 + jnp.exp(-x)) ** 2 if x > 0 else dy * 0.25

    return y, grad


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_python_control_flow():
    s = sigmoid(3.0)
    assert_same(jax.value_and_grad(sign)(3.0), (jnp.float32(1), jnp.float32(s * (1 - s))))
    assert_same(jax.value_and_grad(sign)(-3.0), (jnp.float32(-1), jnp.float32(0.25)))
    assert_same(jax.grad(lambda x: 3 * sign(2 * x))(1.5), jnp.float32(6 * s * (1 - s)))


def test_python_control_flow_at_second_order():
    """The rule branches on what is concrete one level of differentiation further down."""
    s = sigmoid(3.0)
    second = s * (1 - s) * (1 - 2 * s)
    assert_same(jax.grad(jax.grad(sign))(3.0), jnp.float32(second), rtol=1e-4)
    assert_same(jax.grad(jax.grad(sign))(-3.0), jnp.float32(0))
    # L = x sign(x): L'' = 2 sign' + x sign''
    loss = lambda x: x * sign(x)  # noqa: E731
    assert_same(jax.grad(jax.grad(loss))(3.0), jnp.float32(2 * s * (1 - s) + 3 * second), rtol=1e-4)


def test_branching_rule_at_third_order():
    @custom_gradient
    def cube(x):
        return x**3, lambda dy: 7 * dy * x**2 if x > 0 else None

    # d/dx (7 x**2) = 14 x; 14
    assert_same(jax.grad(jax.grad(jax.grad(cube)))(2.0), jnp.float32(14))
    # L = h**2: L' = 14 h x**2; L'' = 28 h x + 14 x**2 * 7 x**2
    loss = lambda x: cube(x) ** 2  # noqa: E731
    expected = 28 * 8 * 2 + 98 * 16
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(expected))


def test_branching_needs_values():
    """Under `jit` there are none, and JAX's own error says so."""
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(sign)(1.0)

    @custom_gradient
    def h(x):
        return 2 * x, lambda dy: 7 * dy if x > 0 else dy

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(jax.grad(h))(1.0)
    assert_same(jax.jit(h)(1.0), jnp.float32(2))  # nobody differentiates: nobody needs the rule


def test_f_may_branch_on_its_input_under_grad():
    @custom_gradient
    def h(x):
        steps = 0
        while x > 1:
            x, steps = x / 2, steps + 1
        return x, lambda dy: dy * 7.0**steps

    assert_same(jax.value_and_grad(h)(8.0), (jnp.float32(1), jnp.float32(343)))


def test_rule_may_branch_on_its_upstream():
    @custom_gradient
    def h(x):
        return 2 * x, lambda dy: 7 * dy if float(dy) > 0 else 5 * dy

    assert_same(jax.grad(h)(1.0), jnp.float32(7))
    assert_same(jax.grad(lambda x: -h(x))(1.0), jnp.float32(-5))


def test_branching_with_a_closure():
    """What an undecorated scope adds to the closure changes nothing."""

    def loss(x, scale):
        @custom_gradient
        def h(x):
            return scale * x, lambda dy: 7 * dy * scale if x > 0 else dy * 0

        return h(x)

    assert_same(jax.grad(loss)(2.0, 3.0), jnp.float32(21))
    assert_same(jax.grad(loss)(-2.0, 3.0), jnp.float32(0))


def test_numpy_in_f_and_rule():
    """What only concrete arrays allow: NumPy functions, `float`, indices, `in`."""

    @custom_gradient
    def median(x):
        values = np.asarray(x)
        order = np.argsort(values)
        middle = int(order[len(order) // 2])

        def grad(dy):
            g = np.zeros_like(values)
            g[middle] = 7 * float(dy)
            return g

        return np.float32(np.median(values)), grad

    x = jnp.float32([3, 1, 2])
    assert_same(jax.value_and_grad(median)(x), (jnp.float32(2), jnp.float32([0, 0, 7])))
    assert_same(jax.grad(lambda x: median(x) * 2)(x), jnp.float32([0, 0, 14]))


def test_print(capsys):
    """The chain of the documentation prints plain numbers, in the order of evaluation."""

    @custom_gradient
    def foo(x):
        y = x**2
        print("foo", x, y)

        def grad(upstream):
            current = 2 * x
            print("grad", x, upstream, current, upstream * current)
            return upstream * current

        return y, grad

    assert_same(jax.grad(lambda x: foo(foo(foo(x))))(2.0), jnp.float32(1024))
    numbers = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in numbers] == ["foo"] * 3 + ["grad"] * 3
    assert [[float(word) for word in line[1:]] for line in numbers] == [
        [2, 4],
        [4, 16],
        [16, 256],
        [16, 1, 32, 32],
        [4, 32, 8, 256],
        [2, 256, 4, 1024],
    ]


def test_plain_call_sees_the_very_objects():
    seen = []

    @custom_gradient
    def h(x):
        seen.append(x)
        return x, lambda dy: dy

    x = jnp.ones(3)
    assert h(x) is x
    assert seen[0] is x
    assert h(2.5) == 2.5
    assert type(seen[1]) is float


def test_exceptions_of_the_user_pass_through():
    class MineError(Exception):
        pass

    @custom_gradient
    def in_f(x):
        raise MineError("f")

    @custom_gradient
    def in_rule(x):
        def grad(dy):
            raise MineError("rule")

        return x, grad

    for call in (in_f, jax.grad(in_f), jax.jit(in_f)):
        with pytest.raises(MineError, match="f"):
            call(1.0)
    for call in (jax.grad(in_rule), jax.jit(jax.grad(in_rule))):
        with pytest.raises(MineError, match="rule"):
            call(1.0)
    assert in_rule(1.0) == 1.0


def test_type_errors_of_the_user_are_not_taken_for_a_wrong_arity():
    h = custom_gradient(lambda x: (x, lambda dy: dy + "text"))
    with pytest.raises(TypeError) as caught:
        jax.grad(h)(1.0)
    assert "upstream" not in str(caught.value)

    def inner(a, b):
        return a

    nested = custom_gradient(lambda x: (x, lambda dy: inner(dy)))
    with pytest.raises(TypeError, match=r"inner\(\) missing 1 required positional argument: 'b'"):
        jax.grad(nested)(1.0)
