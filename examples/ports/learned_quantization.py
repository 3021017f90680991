"""Quantization with a learned step size (Esser et al., ICLR 2020).

The weights get the straight-through gradient inside the range. The step `s` gets, per weight,
round(x / s) - x / s inside the range and the bound outside, scaled by 1 / sqrt(size * bound).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    def quantize(x, step, bits=4):
        low, high = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1

        @tf.custom_gradient
        def with_rule(x, step):
            scaled = x / step
            rounded = tf.round(tf.clip_by_value(scaled, low, high))

            def grad(dy):
                inside = tf.logical_and(scaled > low, scaled < high)
                per_weight = tf.where(inside, rounded - scaled, rounded)
                scale = 1.0 / tf.sqrt(tf.cast(tf.size(x), x.dtype) * high)
                dx = tf.where(inside, dy, tf.zeros_like(dy))
                return dx, scale * tf.reduce_sum(dy * per_weight)

            return rounded * step, grad

        return with_rule(x, step)

    return quantize


@custom_gradient
def quantize(x, step, *, bits=4):
    # `bits` is a Python int, under jit too, so this needs no wrapper function.
    low, high = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    scaled = x / step
    rounded = jnp.round(jnp.clip(scaled, low, high))

    def grad(dy):
        inside = (scaled > low) & (scaled < high)
        per_weight = jnp.where(inside, rounded - scaled, rounded)
        scale = 1.0 / jnp.sqrt(x.size * high)
        return jnp.where(inside, dy, 0), scale * jnp.sum(dy * per_weight)

    return rounded * step, grad


if __name__ == "__main__":
    weights, step = jnp.linspace(-2, 2, 9), jnp.float32(0.2)
    print(quantize(weights, step, bits=3))
    print(jax.grad(lambda w, s: jnp.sum(quantize(w, s, bits=3) ** 2), (0, 1))(weights, step))
