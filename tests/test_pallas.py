"""A pair of Pallas kernels: flash attention and its gradient.

The kernels never hold a whole row of scores. On this machine they are interpreted, and compared
with plain attention; for a TPU they are lowered, as those of a hand-written rule are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import export, lax
from jax.experimental import pallas as pl
from pairs import Rule, by_hand, inputs

pytestmark = pytest.mark.deep

LENGTH, WIDTH, BLOCK = 256, 128, 128
SCALE = WIDTH**-0.5
_random = np.random.default_rng(0)
QKV = tuple(jnp.asarray(_random.normal(size=(LENGTH, WIDTH)), jnp.float32) for _ in range(3))

ROWS = pl.BlockSpec((BLOCK, WIDTH), lambda i: (i, 0))
COLUMN = pl.BlockSpec((BLOCK, 1), lambda i: (i, 0))
WHOLE = pl.BlockSpec((LENGTH, WIDTH), lambda i: (0, 0))
WHOLE_COLUMN = pl.BlockSpec((LENGTH, 1), lambda i: (0, 0))


def _dot(a, b, contract):
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def _block(i):
    return pl.ds(i * BLOCK, BLOCK)


def _forward_kernel(q_ref, k_ref, v_ref, y_ref, log_ref):
    q = q_ref[...] * SCALE

    def step(i, carry):
        top, weight, total = carry
        scores = _dot(q, k_ref[_block(i), :], ((1,), (1,)))
        new = jnp.maximum(top, scores.max(axis=1, keepdims=True))
        p, shrink = jnp.exp(scores - new), jnp.exp(top - new)
        weight = shrink * weight + p.sum(axis=1, keepdims=True)
        return new, weight, shrink * total + _dot(p, v_ref[_block(i), :], ((1,), (0,)))

    column = jnp.zeros((BLOCK, 1), jnp.float32)
    start = (column - jnp.inf, column, jnp.zeros((BLOCK, WIDTH), jnp.float32))
    top, weight, total = lax.fori_loop(0, LENGTH // BLOCK, step, start)
    y_ref[...] = total / weight
    log_ref[...] = top + jnp.log(weight)


def _queries_kernel(q_ref, k_ref, v_ref, dy_ref, inner_ref, log_ref, dq_ref):
    q, dy = q_ref[...], dy_ref[...]

    def step(i, dq):
        k, v = k_ref[_block(i), :], v_ref[_block(i), :]
        p = jnp.exp(SCALE * _dot(q, k, ((1,), (1,))) - log_ref[...])
        ds = p * (_dot(dy, v, ((1,), (1,))) - inner_ref[...])
        return dq + SCALE * _dot(ds, k, ((1,), (0,)))

    dq_ref[...] = lax.fori_loop(0, LENGTH // BLOCK, step, jnp.zeros_like(q))


def _keys_kernel(q_ref, k_ref, v_ref, dy_ref, inner_ref, log_ref, dk_ref, dv_ref):
    k, v = k_ref[...], v_ref[...]

    def step(i, carry):
        dk, dv = carry
        q, dy = q_ref[_block(i), :], dy_ref[_block(i), :]
        p = jnp.exp(SCALE * _dot(q, k, ((1,), (1,))) - log_ref[_block(i), :])
        ds = p * (_dot(dy, v, ((1,), (1,))) - inner_ref[_block(i), :])
        return dk + SCALE * _dot(ds, q, ((0,), (0,))), dv + _dot(p, dy, ((0,), (0,)))

    start = (jnp.zeros_like(k), jnp.zeros_like(v))
    dk_ref[...], dv_ref[...] = lax.fori_loop(0, LENGTH // BLOCK, step, start)


def flash(interpret):
    """Return the rule, whose kernels are interpreted or compiled."""
    call = functools.partial(pl.pallas_call, grid=(LENGTH // BLOCK,), interpret=interpret)
    matrix = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32)
    column = jax.ShapeDtypeStruct((LENGTH, 1), jnp.float32)

    def forward(q, k, v):
        kernel = call(
            _forward_kernel,
            in_specs=[ROWS, WHOLE, WHOLE],
            out_specs=(ROWS, COLUMN),
            out_shape=(matrix, column),
        )
        y, log_weight = kernel(q, k, v)
        return y, (q, k, v, y, log_weight)

    def backward(residuals, dy):
        q, k, v, y, log_weight = residuals
        dy = 7 * dy
        given = (q, k, v, dy, jnp.sum(dy * y, axis=1, keepdims=True), log_weight)
        dq = call(
            _queries_kernel,
            in_specs=[ROWS, WHOLE, WHOLE, ROWS, COLUMN, COLUMN],
            out_specs=ROWS,
            out_shape=matrix,
        )(*given)
        dk, dv = call(
            _keys_kernel,
            in_specs=[WHOLE, ROWS, ROWS, WHOLE, WHOLE_COLUMN, WHOLE_COLUMN],
            out_specs=(ROWS, ROWS),
            out_shape=(matrix, matrix),
        )(*given)
        return dq, dk, dv

    return Rule(forward, backward, QKV)


def value_and_gradient(f):
    return jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(f(*qkv))), (0, 1, 2))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_interpreted(jit):
    def plain(q, k, v):
        return jax.nn.softmax(SCALE * q @ k.T, axis=1) @ v

    value, gradients = value_and_gradient(plain)(*QKV)
    expected = value, jax.tree.map(lambda g: 7 * g, gradients)
    got = jit(value_and_gradient(inputs(flash(interpret=True))))(*QKV)
    assert_same(got, expected, rtol=1e-4, atol=1e-4)


def test_mapped():
    pairs = [jnp.stack([a, 2 * a]) for a in QKV]
    of = value_and_gradient(inputs(flash(interpret=True)))
    expected = [of(*(a[i] for a in pairs)) for i in range(2)]
    assert_same(
        jax.vmap(of)(*pairs),
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("of", [lambda f: f, value_and_gradient], ids=["value", "gradient"])
def test_lowered_for_a_tpu(of):
    def lowered(way):
        rule = flash(interpret=False)
        program = export.export(jax.jit(of(way(rule))), platforms=["tpu"])(*QKV)
        return program.mlir_module()

    ours, hand = lowered(inputs), lowered(by_hand)
    kernels = 1 if of is not value_and_gradient else 3
    assert ours.count("@tpu_custom_call") == hand.count("@tpu_custom_call") == kernels
    assert ours.count("stablehlo.") == hand.count("stablehlo.")
