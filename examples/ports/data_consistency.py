"""The data consistency of images: a solve for each image of a batch, and again in the rule.

After hkaggarwal/modl, `model.py` (MoDL, Aggarwal et al., 2019). The operator A^H A + strength is
self-adjoint, so the gradient is the same solve of the upstream. The images are complex; the rule
does not change for that. `tf.map_fn` over the batch becomes `jax.vmap`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient

STEPS = 5  # of conjugate gradients


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code: each row is solved with its own mask."""

    def solve(mask, strength, b):
        def operator(x):
            return tf.signal.ifft(mask * tf.signal.fft(x)) + strength * x

        def dot(a, b):
            return tf.reduce_sum(tf.math.conj(a) * b)

        x, r, p = tf.zeros_like(b), b, b
        for _ in range(STEPS):
            q = operator(p)
            alpha = tf.math.divide_no_nan(dot(r, r), dot(p, q))
            new = r - alpha * q
            x, p = x + alpha * p, new + tf.math.divide_no_nan(dot(new, new), dot(r, r)) * p
            r = new
        return x

    def data_consistency(b, masks, strength):
        def all_rows(b):
            return tf.map_fn(
                lambda row: solve(row[0], strength, row[1]), (masks, b), fn_output_signature=b.dtype
            )

        @tf.custom_gradient
        def with_rule(b):
            return all_rows(b), all_rows

        return with_rule(b)

    return data_consistency


def divide_no_nan(a, b):
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def solve(mask, strength, b):
    def step(state, _):
        x, r, p = state
        q = jnp.fft.ifft(mask * jnp.fft.fft(p)) + strength * p
        alpha = divide_no_nan(jnp.vdot(r, r), jnp.vdot(p, q))
        new = r - alpha * q
        p = new + divide_no_nan(jnp.vdot(new, new), jnp.vdot(r, r)) * p
        return (x + alpha * state[2], new, p), None

    return jax.lax.scan(step, (jnp.zeros_like(b), b, b), None, STEPS)[0][0]


def data_consistency(b, masks, strength):
    def all_rows(b):
        return jax.vmap(solve, (0, None, 0))(masks, strength, b)

    @custom_gradient
    def with_rule(b):
        return all_rows(b), all_rows

    return with_rule(b)


if __name__ == "__main__":
    b = jnp.array([[1.0 + 1j, 2.0, 0.5j, -1.0]])
    masks = jnp.array([[1.0, 0.0, 1.0, 1.0]])
    print(jax.grad(lambda b: jnp.sum(jnp.abs(data_consistency(b, masks, 0.3)) ** 2))(b))
