"""The rules of the workloads: what people write custom gradients for.

Each is a `Rule`: the forward pass with its residuals, the backward pass, and the same for plain
autodiff. `captured` counts the weights that ours closes over.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workload import CHECKPOINT, PLAIN, Function, Rule

EPSILON = 1e-6
ITERATIONS = 40


# --- elementwise ----------------------------------------------------------------------------------


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + jnp.tanh(0.79788456 * (x + 0.044715 * x**3)))


def _gelu_backward(x: Any, dy: Any) -> Any:
    t = jnp.tanh(0.79788456 * (x + 0.044715 * x**3))
    slope = 0.79788456 * (1 + 0.134145 * x * x)
    return (dy * 0.5 * (1 + t + x * (1 - t * t) * slope),)


GELU = Rule(lambda x: (_gelu(x), x), _gelu_backward, residuals=lambda y, x: x)

SPIKE = Rule(  # a step, with the gradient of x / (1 + 10 |x|)
    lambda x: ((x > 0).astype(x.dtype), x),
    lambda x, dy: (dy / (1 + 10 * jnp.abs(x)) ** 2,),
    plain=lambda x: _with_gradient_of(x / (1 + 10 * jnp.abs(x)), (x > 0).astype(x.dtype)),
    residuals=lambda y, x: x,
)


def _with_gradient_of(smooth: Any, value: Any) -> Any:
    return smooth + jax.lax.stop_gradient(value - smooth)


# --- RMSNorm: y = x r s with r = (mean x^2 + eps)^(-1/2), so dr/dx = -r^3 x / n -------------------


def _norm(scale: Any, x: Any) -> Any:
    r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)
    return x * r * scale, (scale, x, r)


def _norm_backward(residuals: Any, dy: Any) -> Any:
    scale, x, r = residuals
    d = dy * scale
    dx = r * (d - x * r * r * jnp.mean(d * x, -1, keepdims=True))
    return (dy * x * r).reshape(-1, x.shape[-1]).sum(0), dx


RMSNORM = Rule(_norm, _norm_backward, captured=1, how="undeclared")


# --- learned step size quantization: four bits, the step `s` is learned ---------------------------


def _quantize(s: Any, x: Any) -> Any:
    return jnp.clip(jnp.round(x / s), -8, 7) * s, (s, x)


def _quantize_backward(residuals: Any, dy: Any) -> Any:
    s, x = residuals
    v = x / s
    inside = (v > -8) & (v < 7)
    ds = jnp.where(inside, jnp.round(v) - v, jnp.clip(v, -8, 7))
    return (dy * ds).sum() * (x.size * 7) ** -0.5, jnp.where(inside, dy, 0)


def _quantize_plain(s: Any, x: Any) -> Any:
    s = _with_gradient_of(s * (x.size * 7) ** -0.5, s)
    v = jnp.clip(x / s, -8, 7)
    return _with_gradient_of(v, jnp.round(v)) * s


LSQ = Rule(_quantize, _quantize_backward, _quantize_plain, captured=1)


# --- a linear layer and softmax cross-entropy in one: the logits never exist all at once ----------


def logits_loss(w: Any, x: Any, labels: Any) -> Any:
    logits = (x @ w).astype(jnp.promote_types(x.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - chosen).mean()


def _cross_entropy(w: Any, x: Any, labels: Any) -> Any:
    """Form the gradients too, chunk by chunk, while the logits of a chunk are at hand."""
    tokens, wide = len(x), jnp.promote_types(x.dtype, jnp.float32)
    size = next(n for n in (256, 128, 64, 32, 16, 8, 4, 2, 1) if tokens % n == 0)

    def chunk(dw: Any, given: Any) -> Any:
        x, labels = given
        logits = jnp.matmul(x, w, preferred_element_type=wide)
        top = logits.max(1, keepdims=True)
        e = jnp.exp(logits - top)
        total = e.sum(1, keepdims=True)
        chosen = jnp.take_along_axis(logits, labels[:, None], 1)
        loss = (jnp.log(total) + top - chosen).sum()
        # The gradient of the mean: (softmax - one-hot) / tokens.
        here = labels[:, None] == jnp.arange(w.shape[1])
        dlogits = ((e / total - here) / tokens).astype(x.dtype)
        dw += jnp.matmul(x.T, dlogits, preferred_element_type=wide)
        return dw, (loss, dlogits @ w.T)

    chunks = (x.reshape(-1, size, x.shape[1]), labels.reshape(-1, size))
    dw, (losses, dx) = jax.lax.scan(chunk, jnp.zeros(w.shape, wide), chunks)
    return losses.sum() / tokens, (dw.astype(w.dtype), dx.reshape(x.shape))


def _cross_entropy_backward(residuals: Any, dy: Any) -> Any:
    return *((dy * g).astype(g.dtype) for g in residuals), None


CROSS_ENTROPY = Rule(_cross_entropy, _cross_entropy_backward, logits_loss, captured=1)


# --- causal attention, whose backward pass recomputes the scores, block by block ------------------


def _scores(q: Any, k: Any, positions: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    return jnp.where(positions[:, None] >= jnp.arange(k.shape[1]), scores, -1e9)


def _attention_plain(q: Any, k: Any, v: Any) -> Any:
    scores = _scores(q, k, jnp.arange(q.shape[1]))
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)


def _blocks(x: Any) -> Any:
    """Cut the queries into blocks, which come first: (blocks, heads, block, ...)."""
    heads, queries = x.shape[:2]
    size = min(128, queries)
    return jnp.moveaxis(x.reshape(heads, queries // size, size, *x.shape[2:]), 1, 0)


def _joined(blocks: Any) -> Any:
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _positions(q: Any) -> Any:
    return _blocks(jnp.arange(q.shape[1])[None])[:, 0]


def _attention(q: Any, k: Any, v: Any) -> Any:
    def block(given: Any) -> Any:
        scores = _scores(given[0], k, given[1])
        normalizer = jax.nn.logsumexp(scores, -1)
        weights = jnp.exp(scores - normalizer[..., None])
        return jnp.einsum("hqk,hkd->hqd", weights, v), normalizer

    y, normalizer = map(_joined, jax.lax.map(block, (_blocks(q), _positions(q))))
    return y, (q, k, v, y, normalizer)


def _attention_backward(residuals: Any, dy: Any) -> Any:
    q, k, v, y, normalizer = residuals

    def block(sums: Any, given: Any) -> Any:
        dk, dv = sums
        (q, dy, normalizer, inner), positions = given
        weights = jnp.exp(_scores(q, k, positions) - normalizer[..., None])
        dv = dv + jnp.einsum("hqk,hqd->hkd", weights, dy)
        dweights = jnp.einsum("hqd,hkd->hqk", dy, v)
        dscores = weights * (dweights - inner[..., None]) * q.shape[-1] ** -0.5
        dk = dk + jnp.einsum("hqk,hqd->hkd", dscores, q)
        return (dk, dv), jnp.einsum("hqk,hkd->hqd", dscores, k)

    given = jax.tree.map(_blocks, (q, dy, normalizer, (dy * y).sum(-1))), _positions(q)
    (dk, dv), dq = jax.lax.scan(block, (jnp.zeros_like(k), jnp.zeros_like(v)), given)
    return _joined(dq), dk, dv


ATTENTION = Rule(_attention, _attention_backward, _attention_plain)


# --- an implicit layer: z = g(z, w, x), differentiated where it holds, not on the way there -------


def _map(z: Any, w: Any, x: Any) -> Any:
    return jnp.tanh(z @ w + x)


def _iterate(step: Function, start: Any) -> Any:
    return jax.lax.fori_loop(0, ITERATIONS, lambda _, z: step(z), start)


def _solve(w: Any, x: Any) -> Any:
    z = _iterate(lambda z: _map(z, w, x), jnp.zeros_like(x))
    return z, (w, x, z)


def _solve_backward(residuals: Any, dy: Any) -> Any:
    # With u = dy + (dg/dz)^T u, the gradients are (dg/dw)^T u and (dg/dx)^T u.
    w, x, z = residuals
    pull = jax.vjp(lambda z: _map(z, w, x), z)[1]
    u = _iterate(lambda u: dy + pull(u)[0], dy)
    return jax.vjp(lambda w, x: _map(z, w, x), w, x)[1](u)


def _unrolled(step: Function) -> Function:
    def solve(w: Any, x: Any) -> Any:
        start = jnp.zeros_like(x)
        return jax.lax.scan(lambda z, _: (step(z, w, x), None), start, None, ITERATIONS)[0]

    return solve


IMPLICIT = Rule(
    _solve, _solve_backward, captured=1,
    written={PLAIN: _unrolled(_map), CHECKPOINT: _unrolled(jax.checkpoint(_map))},
)  # fmt: skip


# --- a pair of Pallas kernels: a gated activation -------------------------------------------------


def _gated(a: Any, b: Any) -> Any:
    return a * jax.nn.sigmoid(a) * b


def _gated_kernel(a: Any, b: Any, y: Any) -> None:
    y[...] = _gated(a[...], b[...])


def _gated_gradient_kernel(a: Any, b: Any, dy: Any, da: Any, db: Any) -> None:
    s = jax.nn.sigmoid(a[...])
    silu = a[...] * s
    da[...] = dy[...] * b[...] * (s + silu * (1 - s))
    db[...] = dy[...] * silu


def _kernel(kernel: Function, results: int, *operands: Any) -> Any:
    """Run a kernel on blocks of rows; interpreted where there is no compiler for it."""
    from jax.experimental import pallas as pl

    rows, width = operands[0].shape
    block = pl.BlockSpec((min(rows, 8), width), lambda i: (i, jnp.int32(0)))
    shape = jax.ShapeDtypeStruct((rows, width), operands[0].dtype)
    return pl.pallas_call(
        kernel,
        grid=(rows // min(rows, 8),),
        in_specs=[block] * len(operands),
        out_specs=[block] * results,
        out_shape=[shape] * results,
        interpret=jax.default_backend() == "cpu",
    )(*operands)


PALLAS = Rule(
    lambda a, b: (_kernel(_gated_kernel, 1, a, b)[0], (a, b)),
    lambda residuals, dy: tuple(_kernel(_gated_gradient_kernel, 2, *residuals, dy)),
    plain=_gated,
)
