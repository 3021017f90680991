"""The focal loss (Lin et al., 2017) of logits, with a gradient that stays finite.

With z the logit of the true class and p = sigmoid(z): loss = -(1 - p)^gamma log p, and
dloss/dz = (1 - p)^gamma (gamma p log p - (1 - p)).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    def focal_loss(logits, labels, gamma=2.0):
        @tf.custom_gradient
        def with_rule(logits):
            sign = 2.0 * labels - 1.0
            z = logits * sign
            log_p, p = tf.math.log_sigmoid(z), tf.sigmoid(z)
            weight = tf.sigmoid(-z) ** gamma

            def grad(upstream):
                return upstream * sign * weight * (gamma * p * log_p - tf.sigmoid(-z))

            return -weight * log_p, grad

        return with_rule(logits)

    return focal_loss


@custom_gradient
def focal_loss(logits, labels, *, gamma=2.0):
    sign = 2.0 * labels - 1.0
    z = logits * sign
    log_p, p, miss = jax.nn.log_sigmoid(z), jax.nn.sigmoid(z), jax.nn.sigmoid(-z)
    weight = miss**gamma

    def grad(upstream):
        return upstream * sign * weight * (gamma * p * log_p - miss), None

    return -weight * log_p, grad


if __name__ == "__main__":
    logits, labels = jnp.array([-200.0, -1.0, 0.0, 3.0]), jnp.array([1.0, 0.0, 1.0, 0.0])
    print(focal_loss(logits, labels, gamma=1.5))
    print(jax.grad(lambda z: focal_loss(z, labels, gamma=1.5).sum())(logits))
