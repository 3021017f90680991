"""Rules that JAX does not give back when it transposes them twice; see `mode_cases.py`.

It stores what a loop computes, and makes `a - b` of an upstream `a + (-b)`. Reverse mode must run
the rule as it is written.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tfgrad_jax import custom_gradient


@custom_gradient
def loop(x, w):
    y = jnp.sin(x * w)

    def grad(dy):
        def body(dw, step):
            xi, dyi = step
            slope = jnp.cos(xi * w)  # recomputed
            return dw + dyi * slope * xi, 7 * dyi * slope * w

        dw, dx = lax.scan(body, jnp.float32(0), (x, dy))
        return dx, 7 * dw

    return y, grad


@custom_gradient
def masked_loop(x, mask):
    def grad(dy):
        def body(_, step):
            xi, dyi, keep = step
            return None, jnp.where(keep > 0, 7 * dyi * jnp.cos(xi), 0)

        return lax.scan(body, None, (x, dy, mask))[1], None

    return jnp.where(mask > 0, jnp.sin(x), 0), grad


@custom_gradient
def recomputed(x):
    def grad(dy):
        slope = jax.checkpoint(lambda x, dy: 7 * dy * jnp.cos(jnp.sin(x)) * jnp.cos(x))
        return slope(x, dy)

    return jnp.sin(jnp.sin(x)), grad


@custom_gradient
def chosen(x):
    def grad(dy):
        return lax.cond(
            jnp.sum(x) > 0, lambda dy: 7 * dy * jnp.cos(x), lambda dy: -7 * dy * jnp.sin(x), dy
        )

    return lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x), grad


@custom_gradient
def centered(x, w):
    def grad(dy):
        d = 7 * dy * w
        return d - jnp.mean(d), 7 * dy * (x - jnp.mean(x))

    return (x - jnp.mean(x)) * w, grad


@custom_gradient
def complex_loop(z, w):
    def grad(dy):
        def body(dw, step):
            zi, dyi = step
            return dw + dyi * jnp.conj(zi**2), 7 * dyi * jnp.conj(2 * zi * w)

        dw, dz = lax.scan(body, 0j * w, (z, dy))
        return dz, 7 * dw

    return w * z**2, grad


@custom_gradient
def half_precision_loop(x, w):
    def grad(dy):
        def body(dw, step):
            xi, dyi = step
            return dw + dyi * xi.astype(jnp.float32), (7 * dyi * w).astype(jnp.bfloat16)

        dw, dx = lax.scan(body, jnp.float32(0), (x, dy))
        return dx, 7 * dw

    return x.astype(jnp.float32) * w, grad


def loop_with_variables(w, x):
    @custom_gradient(variables=w)
    def h(x):
        def grad(dy, variables):
            def body(dx, step):
                row, dyi, yi = step
                da = 7 * dyi * (1 - yi**2)
                return dx + da * row, da * x

            dx, dw = lax.scan(body, jnp.zeros_like(x), (variables, dy, jnp.tanh(variables @ x)))
            return dx, dw

        return jnp.tanh(w @ x), grad

    return h(x)
