"""The layer of these tests: dense, with upstreams clipped to one; and what its gradients are."""

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient

X = jnp.array([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])
W = jnp.arange(6.0).reshape(3, 2) / 10
B = jnp.array([0.5, -2.0])


def rule(w, x, dy):
    """Return the declared gradients: of x, of the weights, of the bias."""
    dy = jnp.clip(dy, -1, 1)
    return dy @ w.T, 3 * x.T @ dy, 5 * dy.sum(0)  # 3 and 5: to see that the rule ran


def dense(w, b, x):
    """Apply the layer, its weights captured and declared."""

    @custom_gradient(variables={"w": w, "b": b})
    def layer(x):
        def grad(dy, variables):
            dx, dw, db = rule(variables["w"], x, dy)
            return dx, {"w": dw, "b": db}

        return x @ w + b, grad

    return layer(x)


def expected():
    """Return the gradients by w and b of the sum of squares of the layer, worked out in NumPy."""
    x, w, b = (np.asarray(a, np.float64) for a in (X, W, B))
    dy = np.clip(2 * (x @ w + b), -1, 1)
    return 3 * x.T @ dy, 5 * dy.sum(0)


def assert_gradients(dw, db):
    for actual, wanted in zip((dw, db), expected(), strict=True):
        assert jnp.asarray(actual).dtype == jnp.float32
        np.testing.assert_allclose(jax.device_get(actual), wanted, rtol=1e-5)
