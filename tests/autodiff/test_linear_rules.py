"""Which rules have a forward mode, and what is said of the others."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from mode_cases import X, declared

from tfgrad_jax import custom_gradient


def _refused(rule):
    def named_function(x):
        return jnp.sin(x), rule

    return declared(named_function)


NOT_LINEAR = {
    "clip": (lambda dy: jnp.clip(dy, -1, 1), r"'(max|min|clamp)'|`(max|min|clamp)`"),
    "power": (lambda dy: dy**3, "integer_pow|mul"),
    "affine": (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    "mask": (lambda dy: jnp.where(dy > 0, dy, 0), "select_n|gt"),
    "normalized": (lambda dy: dy / jnp.linalg.norm(dy), "div|mul|sqrt|integer_pow|square"),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_refuses_what_is_not_linear(kind, jit):
    rule, operation = NOT_LINEAR[kind]
    h = _refused(rule)

    def pushed(x):
        return jax.jvp(h, (x,), (x,))

    with pytest.raises(TypeError, match=operation) as caught:
        (jax.jit(pushed) if jit else pushed)(X)
    message = str(caught.value)
    assert "named_function" in message and "test_forward_mode.py" in message  # whose rule
    assert "is not linear in its upstream gradients" in message
    assert "without `forward_mode=True`" in message and "jax.grad" in message  # the way out


def test_refuses_an_eager_branch_on_the_upstream():
    h = _refused(lambda dy: dy if dy[0] > 0 else 2 * dy)
    with pytest.raises(TypeError, match="is not linear in its upstream") as caught:
        jax.jvp(h, (X,), (X,))
    assert "named_function" in str(caught.value)


def test_reverse_mode_of_a_rule_that_is_not_linear():
    # With forward_mode=True reverse mode is the transpose of forward mode: refused as well.
    with pytest.raises(TypeError, match="is not linear in its upstream"):
        jax.grad(lambda x: _refused(NOT_LINEAR["clip"][0])(x).sum())(X)
    h = custom_gradient(lambda x: (jnp.sin(x), NOT_LINEAR["clip"][0]))
    assert_same(jax.grad(lambda x: (3 * h(x)).sum())(X), jnp.ones(3))


def test_default_mode_refuses_forward_mode():
    h = custom_gradient(lambda x: (jnp.sin(x), lambda dy: dy * jnp.cos(x)))
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(h, (X,), (X,))
