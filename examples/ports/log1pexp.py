"""log(1 + exp(x)), the example of TensorFlow's documentation, with the value fixed too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    @tf.custom_gradient
    def log1pexp(x):
        e = tf.exp(x)

        def grad(upstream):
            return upstream * (1 - 1 / (1 + e))

        return tf.math.log(1 + e), grad

    return log1pexp


@custom_gradient
def log1pexp(x):
    # exp overflows above 88: the original's gradient at 100 is right, its value inf, and its second
    # derivative NaN. These two forms are right everywhere.
    y = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))

    def grad(upstream):
        return upstream * jax.nn.sigmoid(x)

    return y, grad


if __name__ == "__main__":
    for x in (-100.0, 0.0, 100.0):
        print(x, *jax.value_and_grad(log1pexp)(x), jax.grad(jax.grad(log1pexp))(x))
