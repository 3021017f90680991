"""Scaling for float8: the new scale and history come back as the gradients of the old ones.

After keras-team/keras, `keras/src/layers/core/dense.py`. A rule cannot assign a variable, under
`jit` least of all. It returns the new state as the gradient of the state; the training step stores
it instead of adding it. Use the function once per step: JAX would add the states of several uses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient

LARGEST = 448.0  # of float8_e4m3fn


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    @tf.custom_gradient
    def quantize_gradient(x, scale, history):
        def grad(dy):
            largest = tf.reduce_max(history)
            new_scale = tf.where(largest > 0, largest / LARGEST, scale)
            newest = tf.reduce_max(tf.abs(dy))
            new_history = tf.concat([newest[None], history[:-1]], axis=0)
            clipped = tf.clip_by_value(dy / new_scale, -LARGEST, LARGEST)
            return tf.round(clipped) * new_scale, new_scale, new_history

        return tf.identity(x), grad

    return quantize_gradient


@custom_gradient
def quantize_gradient(x, scale, history):
    def grad(dy):
        largest = jnp.max(history)
        new_scale = jnp.where(largest > 0, largest / LARGEST, scale)
        newest = jnp.max(jnp.abs(dy))
        new_history = jnp.concatenate([newest[None], history[:-1]])
        clipped = jnp.clip(dy / new_scale, -LARGEST, LARGEST)
        return jnp.round(clipped) * new_scale, new_scale, new_history

    return x, grad


if __name__ == "__main__":
    x, scale, history = jnp.array([1.0, -3.0]), jnp.float32(1.0), jnp.zeros(3)
    for _ in range(2):
        gradients = jax.grad(lambda *a: jnp.sum(quantize_gradient(*a) ** 2), (0, 1, 2))
        dx, scale, history = gradients(x, scale, history)  # the new state
    print(dx, scale, history)
