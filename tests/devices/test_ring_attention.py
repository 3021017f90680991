"""Ring attention: keys and values travel around the devices, in the function and in its rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import assert_as_by_hand, mesh, needs_eight_devices
from helpers import assert_same
from jax import lax
from jax.sharding import PartitionSpec
from pairs import Rule, by_hand, inputs

from tfgrad_jax import custom_gradient

pytestmark = [needs_eight_devices, pytest.mark.deep]
DEVICES, LENGTH, WIDTH = 8, 32, 4
ROWS = PartitionSpec("i")
_random = np.random.default_rng(0)
QKV = tuple(jnp.asarray(_random.normal(size=(LENGTH, WIDTH)), jnp.float32) for _ in range(3))


def pass_on(*arrays):
    around = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    return tuple(lax.ppermute(a, "i", around) for a in arrays)


def forward(q, k, v):
    def step(carry, _):
        k, v, top, weight, total = carry
        scores = q @ k.T / WIDTH**0.5
        new = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        p, shrink = jnp.exp(scores - new), jnp.exp(top - new)
        weight = shrink * weight + p.sum(axis=-1, keepdims=True)
        return (*pass_on(k, v), new, weight, shrink * total + p @ v), None

    column = q[:, :1]
    start = (k, v, jnp.full_like(column, -jnp.inf), jnp.zeros_like(column), jnp.zeros_like(q))
    (*_, top, weight, total), _ = lax.scan(step, start, None, length=DEVICES)
    y = total / weight
    return y, (q, k, v, y, top + jnp.log(weight))


def backward(residuals, dy):
    """Let the gradients of keys and values travel with them: after one round they are home."""
    q, k, v, y, log_weight = residuals
    dy = 7 * dy
    inner = jnp.sum(dy * y, axis=-1, keepdims=True)

    def step(carry, _):
        k, v, dq, dk, dv = carry
        p = jnp.exp(q @ k.T / WIDTH**0.5 - log_weight)
        ds = p * (dy @ v.T - inner) / WIDTH**0.5
        return (*pass_on(k, v), dq + ds @ k, *pass_on(dk + ds.T @ q, dv + p.T @ dy)), None

    start = (k, v, jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v))
    (_, _, dq, dk, dv), _ = lax.scan(step, start, None, length=DEVICES)
    return dq, dk, dv


def closing_over_keys_and_values(rule):
    def h(q, k, v):
        @custom_gradient(variables={"k": k, "v": v})
        def attend(q):
            y, residuals = rule.forward(q, k, v)

            def grad(dy, variables):
                dq, dk, dv = rule.backward(residuals, dy)
                return dq, {"k": dk, "v": dv}

            return y, grad

        return attend(q)

    return h


def plain(q, k, v):
    return jax.nn.softmax(q @ k.T / WIDTH**0.5, axis=-1) @ v


RING = Rule(forward, backward, QKV)


@pytest.mark.parametrize("way", [inputs, closing_over_keys_and_values], ids=["inputs", "closure"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_ring_attention(way, check_vma):
    def program(way):
        h = way(RING)
        f = jax.shard_map(
            lambda *qkv: h(*qkv),
            mesh=mesh(("i", DEVICES)),
            in_specs=(ROWS, ROWS, ROWS),
            out_specs=ROWS,
            check_vma=check_vma,
        )
        return jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(f(*qkv))), (0, 1, 2))

    got, sent = assert_as_by_hand(program(way), program(by_hand), *QKV)
    value, gradients = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(plain(*a))), (0, 1, 2))(*QKV)
    expected = value, jax.tree.map(lambda g: 7 * g, gradients)
    assert_same(got, expected, rtol=1e-4, atol=1e-5)
    assert sent["collective-permute"] == 6
