"""What people write custom gradients for: each a `Rule`, and a `Workload` that is about it alone.

`WORKLOADS` are measured by `workload.measure`, as the tiny ones are. `captured` counts the weights
that ours closes over.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ways import Function, Rule
from benchmarks.workload import Workload, normal, of

ITERATIONS = 40  # of the implicit layer


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


def _logits_loss(w: Any, x: Any, labels: Any) -> Any:
    logits = (x @ w).astype(jnp.promote_types(x.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - chosen).mean()


def _cross_entropy(w: Any, x: Any, labels: Any) -> Any:
    """Form the gradients too, chunk by chunk, while the logits of a chunk are at hand."""
    tokens, wide = len(x), jnp.promote_types(x.dtype, jnp.float32)
    size = math.gcd(tokens, 256)

    def chunk(dw: Any, given: Any) -> Any:
        loss, more = jax.value_and_grad(_logits_loss, (0, 1))(w, *given)
        return dw + more[0].astype(wide), (loss, more[1])

    chunks = (x.reshape(-1, size, x.shape[1]), labels.reshape(-1, size))
    dw, (losses, dx) = jax.lax.scan(chunk, jnp.zeros(w.shape, wide), chunks)
    share = size / tokens  # of a chunk in the mean
    return losses.mean(), ((dw * share).astype(w.dtype), dx.reshape(x.shape) * share)


def _cross_entropy_backward(residuals: Any, dy: Any) -> Any:
    return *((dy * g).astype(g.dtype) for g in residuals), None


def _tokens(shape: Any, dtype: Any) -> Any:
    tokens, width, words = shape
    params = normal(1, (width, words), dtype, width**-0.5), normal(0, (tokens, width), dtype)
    return params, jnp.arange(tokens) * 7919 % words


CROSS_ENTROPY = Rule(_cross_entropy, _cross_entropy_backward, _logits_loss, captured=1)


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


# --- the workloads --------------------------------------------------------------------------------

WORKLOADS = (
    Workload(
        "RMSNorm",
        of(RMSNORM, lambda h: lambda params, t: (h(*params) * t).sum()),
        _norm_arguments,
        sizes=((8, 32), (1 << 14, 1024), (1 << 16, 4096)),
    ),
    Workload(
        "cross-entropy",
        of(CROSS_ENTROPY, lambda h: lambda params, labels: h(*params, labels)),
        _tokens,
        sizes=((512, 8, 32), (2048, 256, 16384), (8192, 1024, 50257)),
    ),
    Workload(
        "implicit layer",
        of(Rule(_solve, _solve_backward, captured=1), _mean_square),
        _implicit_arguments,
        sizes=((4, 8), (1024, 256), (8192, 2048)),
    ),
)
