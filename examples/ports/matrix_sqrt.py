"""The square root of a symmetric positive definite matrix, differentiated implicitly.

S S = A, so dA = S dS + dS S, and the gradient X solves the Sylvester equation S X + X S = dL/dS.
In the eigenbasis of S that is a division by s_i + s_j, never by the s_i - s_j of eigh's own
gradient, which is NaN where eigenvalues repeat (at the identity, say).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    @tf.custom_gradient
    def matrix_sqrt(a):
        values, q = tf.linalg.eigh(a)
        s = tf.sqrt(values)
        root = tf.matmul(q * s, q, transpose_b=True)

        def grad(upstream):
            inner = tf.matmul(tf.matmul(q, upstream, transpose_a=True), q)
            inner = inner / (s[:, None] + s[None, :])
            return tf.matmul(tf.matmul(q, inner), q, transpose_b=True)

        return root, grad

    return matrix_sqrt


@custom_gradient
def matrix_sqrt(a):
    values, q = jnp.linalg.eigh(a)
    s = jnp.sqrt(values)

    def grad(upstream):
        inner = (q.T @ upstream @ q) / (s[:, None] + s[None, :])
        return q @ inner @ q.T

    return (q * s[None, :]) @ q.T, grad


if __name__ == "__main__":
    print(jax.grad(lambda a: jnp.trace(matrix_sqrt(a)))(jnp.eye(2)))
