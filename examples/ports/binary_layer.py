"""A layer with binary weights (Courbariaux et al., 2015), in Keras and in plain JAX.

The forward pass uses the signs of the kernel. Both weights are `variables`: the kernel gets the
gradient of its signs where it lies in [-1, 1], the bias its ordinary gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> type:
    """Return TensorFlow's code, a Keras layer."""

    class BinaryDense(tf.keras.layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
            self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

        def call(self, x):
            kernel, bias = self.kernel.value, self.bias.value  # the tf.Variables

            @tf.custom_gradient
            def forward(x):
                signs = tf.sign(kernel)

                def grad(dy, variables=None):
                    inside = tf.cast(tf.abs(kernel) <= 1.0, dy.dtype)
                    gradients = {
                        kernel.ref(): tf.matmul(x, dy, transpose_a=True) * inside,
                        bias.ref(): tf.reduce_sum(dy, axis=0),
                    }
                    dx = tf.matmul(dy, signs, transpose_b=True)
                    return dx, [gradients[v.ref()] for v in variables]

                return tf.matmul(x, signs) + bias, grad

            return forward(x)

    return BinaryDense


class BinaryDense:
    """A dense layer with binary weights. `params` is `{"kernel": ..., "bias": ...}`."""

    def __init__(self, params: dict[str, jax.Array]) -> None:
        self.params = params

    @custom_gradient(variables=lambda self: self.params)
    def __call__(self, x):
        signs = jnp.sign(self.params["kernel"])

        def grad(dy, variables):
            inside = jnp.abs(variables["kernel"]) <= 1.0
            kernel = jnp.where(inside, x.T @ dy, 0)
            return dy @ signs.T, {"kernel": kernel, "bias": dy.sum(axis=0)}

        return x @ signs + self.params["bias"][None, :], grad


if __name__ == "__main__":
    params = {"kernel": jnp.array([[0.5, -2.0], [-0.1, 0.7]]), "bias": jnp.zeros(2)}
    x = jnp.array([[1.0, 2.0]])
    print(jax.grad(lambda p: jnp.sum(BinaryDense(p)(x) ** 2))(params))
