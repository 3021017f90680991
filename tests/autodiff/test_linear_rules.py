"""Which rules have a forward mode, and what is said of the others."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, eager_and_jit
from mode_cases import X

from tfgrad_jax import custom_gradient


def declared_by(rule):
    def named_function(x):
        return jnp.sin(x), rule

    return custom_gradient(named_function)


NOT_LINEAR = {
    "clip": (lambda dy: jnp.clip(dy, -1, 1), r"'(max|min|clamp)'|`(max|min|clamp)`"),
    "power": (lambda dy: dy**3, "integer_pow|mul"),
    "affine": (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    "mask": (lambda dy: jnp.where(dy > 0, dy, 0), "select_n|gt"),
    "normalized": (lambda dy: dy / jnp.linalg.norm(dy), "div|mul|sqrt|integer_pow|square"),
}


@eager_and_jit
@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_what_is_not_linear_has_no_forward_mode(kind, mode):
    rule, operation = NOT_LINEAR[kind]
    h = declared_by(rule)
    with pytest.raises(TypeError, match=operation) as caught:
        mode(lambda x: jax.jvp(h, (x,), (x,)))(X)
    message = str(caught.value)
    assert "named_function" in message and "test_linear_rules.py" in message  # whose rule
    assert "is not linear in its upstream gradients" in message
    assert "reverse mode" in message and "jax.grad" in message  # the way out


@eager_and_jit
@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_what_is_not_linear_has_reverse_mode(kind, mode):
    rule, _ = NOT_LINEAR[kind]
    y, pull_back = jax.vjp(declared_by(rule), X)
    assert_same((y, mode(pull_back)(2 * X)), (jnp.sin(X), (rule(2 * X),)))


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda h: jax.jacfwd(h)(X),
        lambda h: jax.linearize(h, X)[1](X),
        lambda h: jax.hessian(lambda x: jnp.sum(h(x) ** 2))(X),
        lambda h: jax.vmap(lambda t: jax.jvp(h, (X,), (t,))[1])(jnp.eye(3)),
        lambda h: jax.lax.scan(lambda c, x: (c, jax.jvp(h, (x,), (x,))[1]), 0, X),
    ],
    ids=["jacfwd", "linearize", "hessian", "vmap", "scan"],
)
def test_refused_wherever_forward_mode_is_evaluated(evaluate):
    with pytest.raises(TypeError, match="is not linear in its upstream"):
        evaluate(declared_by(NOT_LINEAR["clip"][0]))


def test_a_branch_on_the_upstream_has_no_forward_mode():
    h = declared_by(lambda dy: dy if dy[0] > 0 else 2 * dy)
    with pytest.raises(TypeError, match="is not linear in its upstream") as caught:
        jax.jvp(h, (X,), (X,))
    assert "named_function" in str(caught.value)
    assert_same(jax.vjp(h, X)[1](-X), (-2 * X,))
