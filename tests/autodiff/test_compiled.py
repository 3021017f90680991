"""The compiled program is that of a hand-written rule: as much work and as much memory."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep


def costs(f: Any, *args: Any) -> dict[str, float]:
    compiled = jax.jit(f).lower(*args).compile()
    analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    names = ("flops", "bytes accessed", "transcendentals")
    return {
        **{name: analysis.get(name, 0.0) for name in names},
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
    }


# --- a layer --------------------------------------------------------------------------------------


@custom_gradient
def dense(w, x):
    y = jnp.tanh(x @ w)

    def grad(dy):
        dz = dy * (1 - y**2)
        return x.T @ dz, dz @ w.T

    return y, grad


def closed_over(w, x):
    @custom_gradient
    def f(x):
        y = jnp.tanh(x @ w)

        def grad(dy, variables):
            dz = dy * (1 - y**2)
            return dz @ w.T, [x.T @ dz for _ in variables]

        return y, grad

    return f(x)


@jax.custom_vjp
def by_hand(w, x):
    return jnp.tanh(x @ w)


def _forward(w, x):
    y = jnp.tanh(x @ w)
    return y, (w, x, y)


def _backward(residuals, dy):
    w, x, y = residuals
    dz = dy * (1 - y**2)
    return x.T @ dz, dz @ w.T


by_hand.defvjp(_forward, _backward)


@pytest.mark.parametrize("layer", [dense, closed_over])
@pytest.mark.parametrize("steps", [1, 3], ids=["two calls", "scan"])
def test_gradient_of_a_network(layer, steps):
    def gradients(layer):
        def loss(w, x):
            if steps == 1:
                return layer(w, layer(w, x)).sum()
            return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, steps)[0].sum()

        return jax.value_and_grad(loss, (0, 1))

    w, x = jnp.ones((32, 32)), jnp.ones((16, 32))
    assert costs(gradients(layer), w, x) == costs(gradients(by_hand), w, x)


# --- both modes, and second derivatives -----------------------------------------------------------


@custom_gradient
def softmax(x, w):
    p = jax.nn.softmax(x @ w)

    def grad(dy):
        d = p * (dy - jnp.sum(dy * p, -1, keepdims=True))
        return d @ w.T, x.T @ d

    return p, grad


# The rule of `softmax` uses `f`'s own `p`; so do these, and their value is differentiated by the
# rule again, at every order.


@jax.custom_vjp
def softmax_in_reverse(x, w):
    return jax.nn.softmax(x @ w)


def _softmax_forward(x, w):
    p = jax.nn.softmax(x @ w)
    return softmax_in_reverse(x, w), (x, w, p)


def _softmax_backward(residuals, dy):
    x, w, p = residuals
    d = p * (dy - jnp.sum(dy * p, -1, keepdims=True))
    return d @ w.T, x.T @ d


softmax_in_reverse.defvjp(_softmax_forward, _softmax_backward)


@jax.custom_jvp
def softmax_forward(x, w):
    return jax.nn.softmax(x @ w)


@softmax_forward.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    p = jax.nn.softmax(x @ w)
    d = dx @ w + x @ dw
    return softmax_forward(x, w), p * (d - jnp.sum(d * p, -1, keepdims=True))


def _gradient(h):
    return jax.grad(lambda x, w: jnp.sum(h(x, w) ** 2), (0, 1))


DERIVATIVES = {
    "grad": (softmax_in_reverse, _gradient),
    "grad of grad": (
        softmax_in_reverse,
        lambda h: jax.grad(lambda x, w: sum(jnp.sum(d**2) for d in _gradient(h)(x, w)), (0, 1)),
    ),
    "jvp": (softmax_forward, lambda h: lambda x, w: jax.jvp(h, (x, w), (w, x))),
    "hessian-vector product": (
        softmax_forward,
        lambda h: lambda x, w: jax.jvp(_gradient(h), (x, w), (w, x))[1],
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_work_of_both_modes(name):
    hand_written, derivative = DERIVATIVES[name]
    x, w = jnp.ones((16, 16)) * 0.01, jnp.eye(16) * 0.5
    ours, hand = (costs(derivative(h), x, w) for h in (softmax, hand_written))
    for quantity in ("flops", "transcendentals"):
        assert ours[quantity] <= 1.02 * hand[quantity], (quantity, ours, hand)
