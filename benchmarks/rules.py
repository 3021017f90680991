"""What people write custom gradients for: each a `Rule`, and a `Workload` that is about it alone.

`WORKLOADS` are measured by `workload.measure`, as the tiny ones are; `networks.py` has those that
are made of several rules. `captured` counts the weights that ours closes over.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.tiny import LOG1PEXP
from benchmarks.ways import OPTAX, Function, Rule
from benchmarks.workload import COPY, PRODUCT, Workload, normal, of

RUN = ("run grad", "program grad")
ITERATIONS = 40  # of the implicit layer


def _normals(count: int) -> Callable[[Any, Any], Any]:
    """Return the arguments of a loss whose parameters are so many arrays of the same shape."""
    return lambda shape, dtype: (tuple(normal(seed, shape, dtype) for seed in range(count)),)


def _mean_square(h: Function) -> Function:
    return lambda params: (h(*params) ** 2).mean()


# --- RMSNorm: y = x r s with r = (mean x^2 + eps)^(-1/2), so dr/dx = -r^3 x / n -------------------


def _norm(scale: Any, x: Any) -> Any:
    r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x * r * scale, (scale, x, r)


def _norm_backward(residuals: Any, dy: Any) -> Any:
    scale, x, r = residuals
    d = dy * scale
    dx = r * (d - x * r * r * jnp.mean(d * x, -1, keepdims=True))
    return (dy * x * r).reshape(-1, x.shape[-1]).sum(0), dx


def _norm_arguments(shape: Any, dtype: Any) -> Any:
    return (normal(1, shape[-1:], dtype), normal(0, shape, dtype)), normal(2, shape, dtype)


RMSNORM = Rule(_norm, _norm_backward, captured=1, how="undeclared")


# --- a linear layer and softmax cross-entropy in one: the logits never exist all at once ----------


def _logits(w: Any, x: Any) -> Any:
    return (x @ w).astype(jnp.promote_types(x.dtype, jnp.float32))


def logits_loss(w: Any, x: Any, labels: Any) -> Any:
    logits = _logits(w, x)
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - chosen).mean()


def _optax_loss(w: Any, x: Any, labels: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(_logits(w, x), labels).mean()


def _cross_entropy(w: Any, x: Any, labels: Any) -> Any:
    """Form the gradients too, chunk by chunk, while the logits of a chunk are at hand."""
    tokens, wide = len(x), jnp.promote_types(x.dtype, jnp.float32)
    size = math.gcd(tokens, 256)

    def chunk(dw: Any, given: Any) -> Any:
        loss, more = jax.value_and_grad(logits_loss, (0, 1))(w, *given)
        return dw + more[0].astype(wide), (loss, more[1])

    chunks = (x.reshape(-1, size, x.shape[1]), labels.reshape(-1, size))
    dw, (losses, dx) = jax.lax.scan(chunk, jnp.zeros(w.shape, wide), chunks)
    share = size / tokens  # of a chunk in the mean
    return losses.mean(), ((dw * share).astype(w.dtype), dx.reshape(x.shape) * share)


def _cross_entropy_backward(residuals: Any, dy: Any) -> Any:
    return *((dy * g).astype(g.dtype) for g in residuals), None


def _tokens(shape: Any, dtype: Any) -> Any:
    tokens, width, words, *given = shape
    dtype = given[0] if given and dtype == jnp.float32 else dtype
    params = normal(1, (width, words), dtype, width**-0.5), normal(0, (tokens, width), dtype)
    return params, jnp.arange(tokens) * 7919 % words


CROSS_ENTROPY = Rule(
    _cross_entropy, _cross_entropy_backward, logits_loss, captured=1, written={OPTAX: _optax_loss}
)


# --- causal attention, whose backward pass recomputes the scores, block by block ------------------


def _attend(k: Any, v: Any, q: Any, positions: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(positions[:, None] >= jnp.arange(k.shape[1]), scores, -1e9)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)


def _blocks(x: Any) -> Any:
    """Cut the queries into blocks, which come first: (blocks, heads, block, ...)."""
    heads, queries, width = x.shape
    return jnp.moveaxis(x.reshape(heads, -1, min(128, queries), width), 1, 0)


def _joined(blocks: Any) -> Any:
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(len(x), -1, x.shape[-1])


def _attention(q: Any, k: Any, v: Any) -> Any:
    positions = jnp.arange(q.shape[1]).reshape(-1, min(128, q.shape[1]))
    y = jax.lax.map(lambda given: _attend(k, v, *given), (_blocks(q), positions))
    return _joined(y), (q, k, v, positions)


def _attention_backward(residuals: Any, dy: Any) -> Any:
    q, k, v, positions = residuals

    def block(sums: Any, given: Any) -> Any:
        q, positions, dy = given
        pull = jax.vjp(lambda k, v, q: _attend(k, v, q, positions), k, v, q)[1]
        *more, dq = pull(dy)
        return tuple(map(jnp.add, sums, more)), dq

    start = jnp.zeros_like(k), jnp.zeros_like(v)
    (dk, dv), dq = jax.lax.scan(block, start, (_blocks(q), positions, _blocks(dy)))
    return _joined(dq), dk, dv


ATTENTION = Rule(
    _attention, _attention_backward, lambda q, k, v: _attend(k, v, q, jnp.arange(q.shape[1]))
)


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


def _implicit_arguments(shape: Any, dtype: Any) -> Any:
    # Norm about 0.4: the iteration has converged to float64 precision after 40 steps.
    width = shape[1]
    return ((normal(0, (width, width), dtype, 0.2 * width**-0.5), normal(1, shape, dtype)),)


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


def _run(kernel: Function, results: int, *operands: Any) -> Any:
    """Run a kernel on blocks of rows, on a GPU by Triton; interpreted on a CPU."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    platform = jax.default_backend()
    rows, width = operands[0].shape
    block = pl.BlockSpec((min(rows, 8), width), lambda i: (i, jnp.int32(0)))
    return pl.pallas_call(
        kernel,
        grid=(rows // min(rows, 8),),
        in_specs=[block] * len(operands),
        out_specs=[block] * results,
        out_shape=[jax.ShapeDtypeStruct((rows, width), operands[0].dtype)] * results,
        interpret=platform == "cpu",
        compiler_params=triton.CompilerParams() if platform == "gpu" else None,
    )(*operands)


PALLAS = Rule(
    lambda a, b: (_run(_gated_kernel, 1, a, b)[0], (a, b)),
    lambda residuals, dy: tuple(_run(_gated_gradient_kernel, 2, *residuals, dy)),
    plain=_gated,
)


# --- the workloads --------------------------------------------------------------------------------

_CROSS_ENTROPY = of(CROSS_ENTROPY, lambda h: lambda params, labels: h(*params, labels))
_LARGE = (8192, 4096, 128256, jnp.bfloat16)
WORKLOADS = (
    Workload(
        "log1pexp", of(LOG1PEXP, lambda h: lambda x: h(x).sum()),
        lambda shape, dtype: (normal(0, shape, dtype),), ((256,), (1 << 25,), (1 << 28,)),
        limit=(COPY, lambda x: 2 * x.nbytes),  # read x, write its gradient
    ),
    Workload(
        "RMSNorm", of(RMSNORM, lambda h: lambda params, t: (h(*params) * t).sum()),
        _norm_arguments, ((8, 32), (1 << 14, 1024), (1 << 16, 4096)),
        limit=(COPY, lambda params, t: 3 * t.nbytes),  # read x and t, write the gradient of x
    ),
    Workload(
        "attention, recomputed", of(ATTENTION, _mean_square),
        _normals(3), ((2, 256, 4), (4, 2048, 64), (32, 8192, 128)),
        limit=(PRODUCT, lambda qkv: 7 * 2 * qkv[0].size * qkv[0].shape[1]),
    ),
    Workload(
        "cross-entropy", _CROSS_ENTROPY,
        _tokens, ((512, 8, 32), (2048, 256, 16384), (8192, 1024, 50257)),
        limit=(PRODUCT, lambda params, labels: 3 * 2 * params[0].size * len(labels)),
    ),
    Workload(
        "cross-entropy of a large model", _CROSS_ENTROPY,
        _tokens, ((512, 8, 32), _LARGE, _LARGE), RUN, large=True,
    ),
    Workload(
        "implicit layer", of(Rule(_solve, _solve_backward, captured=1), _mean_square),
        _implicit_arguments, ((4, 8), (1024, 256), (8192, 2048)),
    ),
    Workload(
        "Pallas kernel pair", of(PALLAS, _mean_square),
        _normals(2), ((8, 16), (512, 256), (1 << 15, 1024)), RUN,
    ),
)  # fmt: skip
