"""REMOVE"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

# --- the same as the default mode ----------------------------------------------------------------


def _by_hand():
    @jax.custom_vjp
    def f(w, x):
        return jnp.tanh(w @ x)

    f.defvjp(
        lambda w, x: (f(w, x), (w, x, jnp.tanh(w @ x))),
        lambda r, dy: (
            jnp.outer(7 * dy * (1 - r[2] ** 2), r[1]),
            r[0].T @ (7 * dy * (1 - r[2] ** 2)),
        ),
    )
    return f


def _dense(forward_mode):
    @custom_gradient(forward_mode=forward_mode)
    def h(w, x):
        y = jnp.tanh(w @ x)

        def grad(dy):
            da = 7 * dy * (1 - y**2)
            return jnp.outer(da, x), w.T @ da

        return y, grad

    return h


def _network(layer):
    def value(ws, x):
        for w in ws:
            x = layer(w, x)
        return jnp.sum(x**2)

    return value


def _compiled(layer, ws, x):
    return jax.jit(jax.value_and_grad(_network(layer), (0, 1))).lower(ws, x).compile()


def test_same_numbers_as_the_default_mode():
    rng = np.random.default_rng(0)
    ws = [jnp.asarray(rng.standard_normal((8, 8)) / 3, jnp.float32) for _ in range(3)]
    x = jnp.asarray(rng.standard_normal(8), jnp.float32)
    for transform in (lambda f: f, jax.jit):
        default, forward = (
            transform(jax.grad(_network(_dense(mode)), (0, 1)))(ws, x) for mode in (False, True)
        )
        jax.tree.map(np.testing.assert_array_equal, forward, default)


def test_same_program_as_custom_vjp():
    ws, x = [jnp.eye(16) for _ in range(3)], jnp.ones(16)
    by_hand = _compiled(_by_hand(), ws, x)
    for mode in (True, False):
        ours = _compiled(_dense(mode), ws, x)
        for quantity in ("flops", "bytes accessed", "transcendentals"):
            assert _cost(ours)[quantity] <= _cost(by_hand)[quantity], (mode, quantity)
        memory, expected = ours.memory_analysis(), by_hand.memory_analysis()
        assert memory.temp_size_in_bytes <= expected.temp_size_in_bytes
        assert memory.output_size_in_bytes == expected.output_size_in_bytes


def _cost(compiled):
    cost = compiled.cost_analysis()
    return cost[0] if isinstance(cost, list) else cost


# --- what it costs -------------------------------------------------------------------------------


def _softmax(forward_mode):
    @custom_gradient(forward_mode=forward_mode)
    def h(x, w):
        p = jax.nn.softmax(x @ w)

        def grad(dy):
            d = p * (dy - jnp.sum(dy * p, -1, keepdims=True))
            return d @ w.T, x.T @ d

        return p, grad

    return h


@pytest.mark.parametrize("order", ["grad", "hessian-vector product", "grad of grad"])
def test_compiled_derivatives_cost_what_they_cost_in_the_default_mode(order):
    x, w = jnp.ones((16, 16)) * 0.01, jnp.eye(16) * 0.5

    def derivative(h):
        g = jax.grad(lambda x, w: jnp.sum(h(x, w) ** 2), (0, 1))
        if order == "grad":
            return g
        if order == "grad of grad":
            return jax.grad(lambda x, w: sum(jnp.sum(d**2) for d in g(x, w)), (0, 1))
        return lambda x, w: jax.jvp(g, (x, w), (x, w))[1]

    default, forward = (
        jax.jit(derivative(_softmax(mode))).lower(x, w).compile().cost_analysis()["flops"]
        for mode in (False, True)
    )
    assert forward <= 1.02 * default
