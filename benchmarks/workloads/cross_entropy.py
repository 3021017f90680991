"""A linear layer and softmax cross-entropy in one: the logits never exist all at once.

The tokens are taken in chunks, and the forward pass, which has the logits of a chunk at hand,
forms the gradients too. The backward pass multiplies them with the upstream.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results import CHECKPOINT, HAND, OURS, OURS_FORWARD, PLAIN
from benchmarks.workloads.common import Function, Workload, by_hand, normal
from tfgrad_jax import custom_gradient


def plain(x: Any, w: Any, labels: Any) -> Any:
    logits = (x @ w).astype(jnp.promote_types(x.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - chosen).mean()


def forward(x: Any, w: Any, labels: Any) -> Any:
    """Return the loss, and its gradients with respect to `x` and `w`."""
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
    return losses.sum() / tokens, (dx.reshape(x.shape), dw.astype(w.dtype))


def backward(residuals: Any, dy: Any) -> Any:
    dx, dw = residuals
    return (dy * dx).astype(dx.dtype), (dy * dw).astype(dw.dtype), None


def ours(forward_mode: bool = False) -> Function:
    """Return the loss as a function of the tokens that closes over the weights."""

    def loss(x: Any, w: Any, labels: Any) -> Any:
        @custom_gradient(variables=w, forward_mode=forward_mode)
        def of_tokens(x: Any) -> Any:
            y, residuals = forward(x, w, labels)

            def grad(dy: Any, variables: Any) -> Any:
                return backward(residuals, dy)[:2]

            return y, grad

        return of_tokens(x)

    return loss


def cross_entropy() -> Workload:
    shapes = {
        "tiny": (16, 8, 32),
        "full": (2048, 256, 16384),
        "gpu": (8192, 4096, 128256),  # a language model's head
    }

    def arguments(size: str, dtype: Any) -> Any:
        tokens, width, words = shapes[size]
        if size == "gpu":
            dtype = jnp.bfloat16
        labels = jnp.arange(tokens) * 7919 % words
        return (
            normal(0, (tokens, width), dtype),
            normal(1, (width, words), dtype, width**-0.5),
            labels,
        )

    return Workload(
        "linear + cross-entropy",
        arguments,
        {
            PLAIN: plain,
            CHECKPOINT: jax.checkpoint(plain),
            HAND: by_hand(forward, backward),
            OURS: ours(),
            OURS_FORWARD: ours(forward_mode=True),
        },
        (0, 1),
        work=lambda x, w, labels: 3 * 2 * x.size * w.shape[1],
        note="ours closes over the weights (variables=w)",
    )
