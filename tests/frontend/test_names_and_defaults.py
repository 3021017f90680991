"""Calling: arguments by name, defaults, positional-only and keyword-only parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


@custom_gradient
def scaled_power(x, y=4.0, *, power=2):
    return y * x**power, lambda dy: (7 * dy * x, 5 * dy * y)


@custom_gradient
def one_declared(x, y=4.0):
    # A default that is left out is no input: one gradient then, two otherwise.
    return x * y, lambda dy: 7 * dy * x


def test_inputs_by_name_are_the_same_inputs():
    expected = (jnp.float32(21), jnp.float32(25))
    for call in (
        lambda x, y: scaled_power(x, y),
        lambda x, y: scaled_power(x, y=y),
        lambda x, y: scaled_power(x=x, y=y),
        lambda x, y: scaled_power(y=y, x=x),
    ):
        for grad in (jax.grad(call, (0, 1)), jax.jit(jax.grad(call, (0, 1)))):
            assert_same(grad(3.0, 5.0), expected)


def test_declared_gradient_of_an_input_by_name():
    """TensorFlow silently uses the ordinary gradient here, which would be 4."""
    assert_same(jax.grad(lambda x: one_declared(x=x))(3.0), jnp.float32(21))
    assert_same(jax.jit(jax.grad(lambda x: one_declared(x=x)))(3.0), jnp.float32(21))


def test_a_default_left_out_is_no_input():
    assert_same(jax.value_and_grad(one_declared)(3.0), (jnp.float32(12), jnp.float32(21)))
    assert_same(one_declared(3.0, 5.0), 15.0)


def test_a_default_skipped_by_name():
    @custom_gradient
    def h(x, y=2.0, z=3.0):
        return x * y * z, lambda dy: (7 * dy, 5 * dy)  # of x and z: y is left out

    expected = (jnp.float32(7), jnp.float32(5))
    assert_same(jax.grad(lambda x, z: h(x, z=z), (0, 1))(1.0, 4.0), expected)
    assert_same(h(1.0, z=4.0), 8.0)


def test_positional_only_and_var_positional():
    @custom_gradient
    def h(x, /, *rest):
        return x * sum(rest), lambda dy: (7 * dy, *(5 * dy * (i + 1) for i in range(len(rest))))

    expected = (jnp.float32(7), jnp.float32(5), jnp.float32(10))
    assert_same(jax.grad(h, (0, 1, 2))(1.0, 2.0, 3.0), expected)
    assert_same(jax.grad(h)(1.0), jnp.float32(7))

    @custom_gradient
    def scaled(*xs, scale):
        return scale * xs[0] * xs[1], lambda dy: (7 * dy * scale, 5 * dy)

    grad = jax.grad(lambda x, y: scaled(x, y, scale=2.0), (0, 1))
    assert_same(grad(1.0, 1.0), (jnp.float32(14), jnp.float32(5)))


def test_keyword_only_reaches_f_unchanged():
    seen = []

    @custom_gradient
    def h(x, *, mode, scale=1.0, **options):
        seen.append((mode, scale, options))
        return x * scale, lambda dy: 7 * dy * scale

    def loss(x):
        return h(x, mode="fast", scale=3.0, extra=[1, "two"])

    for f in (loss, jax.grad(loss), jax.jit(jax.grad(loss))):
        f(1.0)
        assert seen.pop() == ("fast", 3.0, {"extra": [1, "two"]})
    assert_same(jax.grad(loss)(1.0), jnp.float32(21))


def test_keyword_only_is_closed_over():
    """Never silently without a gradient: differentiating one needs the `variables` protocol."""

    @custom_gradient
    def refusing(x, *, w):
        return x * w, lambda dy: 7 * dy * w

    with pytest.raises(TypeError, match="closes over"):
        jax.grad(lambda w: refusing(1.0, w=w))(2.0)
    assert_same(jax.grad(lambda x: refusing(x, w=2.0))(1.0), jnp.float32(14))

    @custom_gradient
    def taking(x, *, w):
        def grad(dy, variables):
            return 7 * dy * w, [5 * dy * x for _ in variables]

        return x * w, grad

    assert_same(jax.grad(lambda w: taking(3.0, w=w))(2.0), jnp.float32(15))


def test_f_receives_what_was_passed():
    """Eagerly, the very same objects; a default is Python's business."""
    seen = []

    @custom_gradient
    def h(x, y=None):
        seen.append((x, y))
        return 2 * x, lambda dy: 7 * dy

    x = np.float32(3.0)
    h(x)
    assert seen.pop() == (x, None)
    marker = object()
    h(x, marker)
    assert seen[0][0] is x
    assert seen[0][1] is marker


def test_no_inputs():
    h = custom_gradient(lambda: (jnp.float32(3.0), lambda dy: ()))
    assert_same(h(), jnp.float32(3))
    assert_same(jax.jit(h)(), jnp.float32(3))
    assert_same(jax.grad(lambda x: x * h())(2.0), jnp.float32(3))
