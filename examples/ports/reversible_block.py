"""A reversible residual block (Gomez et al., 2017): its inputs are recomputed from its outputs.

y1 = x1 + f(x2), y2 = x2 + g(y1). The backward pass needs only y1 and y2, however deep the
branches are. The weights are closed over and get their gradients as `variables`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code: a function of two `tf.Variable`s and the inputs."""

    def branch(weight, x):
        return tf.tanh(tf.matmul(x, weight))

    def reversible_block(wf, wg, x1, x2):
        @tf.custom_gradient
        def block(x1, x2):
            y1 = x1 + branch(wf, x2)
            y2 = x2 + branch(wg, y1)
            kept1, kept2 = tf.stop_gradient(y1), tf.stop_gradient(y2)

            def grad(dy1, dy2, variables=None):
                with tf.GradientTape() as tape:
                    tape.watch(kept1)
                    g = branch(wg, kept1)
                through, dwg = tape.gradient(g, [kept1, wg], output_gradients=dy2)
                dy1 = dy1 + through
                restored = tf.stop_gradient(kept2 - g)
                with tf.GradientTape() as tape:
                    tape.watch(restored)
                    f = branch(wf, restored)
                through, dwf = tape.gradient(f, [restored, wf], output_gradients=dy1)
                gradients = {wf.ref(): dwf, wg.ref(): dwg}  # the list has no order to rely on
                return (dy1, dy2 + through), [gradients[v.ref()] for v in variables]

            return (y1, y2), grad

        return block(x1, x2)

    return reversible_block


def branch(weight, x):
    return jnp.tanh(x @ weight)


def reversible_block(params, x1, x2):
    @custom_gradient(variables=params)
    def block(x1, x2):
        y1 = x1 + branch(params["f"], x2)
        y2 = x2 + branch(params["g"], y1)

        def grad(dy1, dy2, variables):
            g, pull_back = jax.vjp(branch, variables["g"], y1)
            dwg, through = pull_back(dy2)
            dy1 = dy1 + through
            _, pull_back = jax.vjp(branch, variables["f"], y2 - g)
            dwf, through = pull_back(dy1)
            return (dy1, dy2 + through), {"f": dwf, "g": dwg}

        return (y1, y2), grad

    return block(x1, x2)


if __name__ == "__main__":
    params = {"f": 0.5 * jnp.eye(2), "g": 0.3 * jnp.ones((2, 2))}
    x = jnp.array([[1.0, 2.0]])
    print(jax.grad(lambda p: sum(y.sum() for y in reversible_block(p, x, 2 * x)))(params))
