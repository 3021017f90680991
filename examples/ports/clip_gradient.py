"""The identity with the norm of its gradient clipped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    @tf.custom_gradient
    def clip_gradient(x, limit):
        def grad(dy):
            return tf.clip_by_norm(dy, limit), None

        return tf.identity(x), grad

    return clip_gradient


@custom_gradient
def clip_gradient(x, limit):
    def grad(dy):
        norm = jnp.sqrt(jnp.sum(dy * dy))
        return dy * (limit / jnp.maximum(norm, limit)), None  # no division by a norm of zero

    return x, grad


if __name__ == "__main__":
    weights = jnp.array([3.0, 4.0])
    print(jax.grad(lambda w: jnp.sum(clip_gradient(w, 0.5) ** 3))(weights))
