"""`log1pexp` and a fused RMSNorm, several times as large as the cache: memory traffic is all."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.common import Workload, four_ways, normal

EPSILON = 1e-6


def log1pexp() -> Workload:
    shapes = {"tiny": (256,), "full": (1 << 25,), "gpu": (1 << 28,)}

    def plain(x: Any) -> Any:
        return jnp.log(1 + jnp.exp(x))

    def forward(x: Any) -> Any:
        return jnp.log(1 + jnp.exp(x)), x

    def backward(x: Any, dy: Any) -> Any:
        return (dy / (1 + jnp.exp(-x)),)

    return Workload(
        "log1pexp",
        lambda size, dtype: (normal(0, shapes[size], dtype),),
        four_ways(plain, forward, backward, lambda h: lambda x: h(x).sum()),
        (0,),
        traffic=lambda x: 2 * x.nbytes,  # read x, write its gradient
    )


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON) * scale


def norm_forward(x: Any, scale: Any) -> Any:
    r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)
    return x * r * scale, (x, r, scale)


def norm_backward(residuals: Any, dy: Any) -> Any:
    # y = x r s with r = (mean x^2 + eps)^(-1/2), so dr/dx = -r^3 x / n.
    x, r, scale = residuals
    d = dy * scale
    dx = r * (d - x * r * r * jnp.mean(d * x, -1, keepdims=True))
    return dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)


def rmsnorm() -> Workload:
    shapes = {"tiny": (8, 32), "full": (1 << 14, 1024), "gpu": (1 << 16, 4096)}

    def arguments(size: str, dtype: Any) -> Any:
        rows, width = shapes[size]
        return (
            normal(0, (rows, width), dtype),
            normal(1, (width,), dtype),
            normal(2, (rows, width), dtype),
        )

    return Workload(
        "RMSNorm",
        arguments,
        four_ways(
            norm, norm_forward, norm_backward, lambda h: lambda x, scale, t: (h(x, scale) * t).sum()
        ),
        (0, 1),
        traffic=lambda x, scale, t: 3 * x.nbytes,  # read x and t, write the gradient of x
    )
