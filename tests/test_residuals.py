"""What a call keeps for the backward pass, against sizes worked out on paper."""

import jax
import jax.numpy as jnp
import pytest

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad

X, W, STOP = jnp.ones((4, 8)), jnp.full((8, 8), 0.5), jax.lax.stop_gradient


@custom_gradient
def careful(x):
    y = jnp.tanh(x)
    return {"a": y, "b": 2.0}, lambda dy, _: dy * (1 - y**2)


@custom_gradient
def careless(x):
    y = jnp.tanh(x)
    slope = (1 - y**2).astype(jnp.bfloat16)
    return 2 * y, lambda dy: dy * slope.astype(dy.dtype) * 2


class Box:
    """A rule that reads it is recorded."""

    def __init__(self, x):
        self.x = x

    @custom_gradient
    def scaled(self, y):
        return jnp.sin(y), lambda dy: dy * self.x


KEPT = {
    "what it reads in an object": (lambda x: Box(STOP(x)).scaled(x), [("float32", (4, 8))]),
    "an output": (careful, [("float32", (4, 8))]),
    "what it computes": (careless, [("bfloat16", (4, 8))]),
    "nothing": (grad_pass_through(jnp.round), []),
    "its input": (custom_gradient(lambda x: (x * x, lambda d: 2 * x * d)), [("float32", (4, 8))]),
    "to compute again": (recompute_grad(lambda x: jnp.sin(jnp.sin(x))), [("float32", (4, 8))]),
    "a constant": (custom_gradient(lambda x: (x @ W, lambda dy: dy @ W.T)), []),
}


@pytest.mark.parametrize("kind", KEPT)
def test_types_of_what_is_kept(kind):
    h, expected = KEPT[kind]
    _, pull_back = jax.eval_shape(lambda x: jax.vjp(h, x), X)
    assert [(v.dtype.name, v.shape) for v in jax.tree.leaves(pull_back)] == expected
