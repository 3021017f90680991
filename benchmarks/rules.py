"""What people write custom gradients for: each a `Rule`, and a `Workload` that is about it alone.

`WORKLOADS` are measured by `workload.measure`, as the tiny ones are. `captured` counts the weights
that ours closes over.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ways import Function, Rule
from benchmarks.workload import Workload, normal, of

ITERATIONS = 40  # of the implicit layer


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
        "implicit layer",
        of(
            Rule(_solve, _solve_backward, captured=1),
            lambda h: lambda params: (h(*params) ** 2).mean(),
        ),
        _implicit_arguments,
        sizes=((4, 8), (1024, 256), (8192, 2048)),
    ),
)
