"""The compiled program is that of a hand-written rule, in every mode."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tfgrad_jax import custom_gradient

BOTH = (0, 1)


def costs(f: Any, *args: Any) -> tuple[Any, ...]:
    compiled = jax.jit(jax.grad(f, BOTH)).lower(*args).compile()
    analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return analysis["flops"], analysis["bytes accessed"], memory.temp_size_in_bytes


def dense(w, x):
    """A layer whose rule is that of the layer, with the weight closed over."""

    @custom_gradient
    def f(x):
        y = jnp.tanh(x @ w)

        def grad(dy, variables):
            dz = dy * (1 - y**2)
            return dz @ w.T, [x.T @ dz for _ in variables]

        return y, grad

    return f(x)


@jax.custom_vjp
def dense_by_hand(w, x):
    return jnp.tanh(x @ w)


def _forward(w, x):
    y = jnp.tanh(x @ w)
    return y, (w, x, y)


def _backward(residuals, dy):
    w, x, y = residuals
    dz = dy * (1 - y**2)
    return x.T @ dz, dz @ w.T


dense_by_hand.defvjp(_forward, _backward)


@pytest.mark.parametrize("steps", [1, 3], ids=["one call", "scan"])
def test_the_compiled_program_is_that_of_weights_passed_by_hand(steps):
    def loss(layer):
        def of(w, x):
            if steps == 1:
                return layer(w, layer(w, x)).sum()
            return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, steps)[0].sum()

        return of

    w, x = jnp.ones((32, 32)), jnp.ones((16, 32))
    assert costs(loss(dense), w, x) == costs(loss(dense_by_hand), w, x)
