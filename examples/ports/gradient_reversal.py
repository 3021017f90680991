"""The identity with its gradient reversed, for domain-adversarial training."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    @tf.custom_gradient
    def reverse_gradient(x, strength):
        def grad(dy):
            return -strength * dy, None

        return tf.identity(x), grad

    return reverse_gradient


@custom_gradient
def reverse_gradient(x, strength):
    def grad(dy):
        return -strength * dy, None  # strength is an input without a gradient

    return x, grad


if __name__ == "__main__":
    features = jnp.array([1.0, -2.0])
    print(jax.grad(lambda x: jnp.sum(reverse_gradient(x, 0.5) ** 2))(features))
