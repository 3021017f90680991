"""Attention whose backward pass recomputes the scores, and a pair of Pallas kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.common import Workload, four_ways, normal

# --- attention ------------------------------------------------------------------------------------


def _plain(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)


def _blocks(x: Any) -> Any:
    """Cut the queries into blocks, which come first: (blocks, heads, block, ...)."""
    heads, queries = x.shape[:2]
    size = min(128, queries)
    return jnp.moveaxis(x.reshape(heads, queries // size, size, *x.shape[2:]), 1, 0)


def _joined(blocks: Any) -> Any:
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _scores(q: Any, k: Any) -> Any:
    return jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5


def _forward(q: Any, k: Any, v: Any) -> Any:
    def block(q: Any) -> Any:
        scores = _scores(q, k)
        normalizer = jax.nn.logsumexp(scores, -1)
        weights = jnp.exp(scores - normalizer[..., None])
        return jnp.einsum("hqk,hkd->hqd", weights, v), normalizer

    y, normalizer = jax.lax.map(block, _blocks(q))
    y = _joined(y)
    return y, (q, k, v, y, _joined(normalizer))


def _backward(residuals: Any, dy: Any) -> Any:
    q, k, v, y, normalizer = residuals

    def block(sums: Any, given: Any) -> Any:
        dk, dv = sums
        q, dy, normalizer, inner = given
        weights = jnp.exp(_scores(q, k) - normalizer[..., None])
        dv = dv + jnp.einsum("hqk,hqd->hkd", weights, dy)
        dweights = jnp.einsum("hqd,hkd->hqk", dy, v)
        dscores = weights * (dweights - inner[..., None]) * q.shape[-1] ** -0.5
        dk = dk + jnp.einsum("hqk,hqd->hkd", dscores, q)
        return (dk, dv), jnp.einsum("hqk,hkd->hqd", dscores, k)

    given = jax.tree.map(_blocks, (q, dy, normalizer, (dy * y).sum(-1)))
    (dk, dv), dq = jax.lax.scan(block, (jnp.zeros_like(k), jnp.zeros_like(v)), given)
    return _joined(dq), dk, dv


def attention() -> Workload:
    shapes = {"tiny": (2, 16, 4), "full": (4, 2048, 64), "gpu": (32, 8192, 128)}

    def arguments(size: str, dtype: Any) -> Any:
        return tuple(normal(seed, shapes[size], dtype) for seed in range(3))

    return Workload(
        "attention, recomputed",
        arguments,
        four_ways(_plain, _forward, _backward, lambda h: lambda *qkv: (h(*qkv) ** 2).mean()),
        (0, 1, 2),
        work=lambda q, k, v: 7 * 2 * q.size * k.shape[1],
    )


# --- a pair of Pallas kernels ---------------------------------------------------------------------


def _gated(a: Any, b: Any) -> Any:
    return a * jax.nn.sigmoid(a) * b


def _gated_kernel(a: Any, b: Any, y: Any) -> None:
    y[...] = _gated(a[...], b[...])


def _gated_gradient_kernel(a: Any, b: Any, dy: Any, da: Any, db: Any) -> None:
    s = jax.nn.sigmoid(a[...])
    silu = a[...] * s
    da[...] = dy[...] * b[...] * (s + silu * (1 - s))
    db[...] = dy[...] * silu


def _call(kernel: Any, results: int, *operands: Any) -> Any:
    """Run a kernel on blocks of rows; interpreted where there is no compiler for it."""
    from jax.experimental import pallas as pl

    rows, width = operands[0].shape
    block = pl.BlockSpec((min(rows, 64), width), lambda i: (i, jnp.int32(0)))
    shape = jax.ShapeDtypeStruct((rows, width), operands[0].dtype)
    return pl.pallas_call(
        kernel,
        grid=(rows // min(rows, 64),),
        in_specs=[block] * len(operands),
        out_specs=[block] * results,
        out_shape=[shape] * results,
        interpret=jax.default_backend() == "cpu",
    )(*operands)


def _pallas_forward(a: Any, b: Any) -> Any:
    return _call(_gated_kernel, 1, a, b)[0], (a, b)


def _pallas_backward(residuals: Any, dy: Any) -> Any:
    return tuple(_call(_gated_gradient_kernel, 2, *residuals, dy))


def pallas_pair() -> Workload:
    shapes = {"tiny": (8, 16), "full": (512, 256), "gpu": (1 << 15, 1024)}

    def arguments(size: str, dtype: Any) -> Any:
        return tuple(normal(seed, shapes[size], dtype) for seed in range(2))

    def loss(h: Any) -> Any:
        return lambda a, b: (h(a, b) ** 2).mean()

    return Workload(
        "Pallas kernel pair",
        arguments,
        four_ways(_gated, _pallas_forward, _pallas_backward, loss),
        (0, 1),
        note="interpreted on a CPU: its time says nothing about the kernels",
    )
