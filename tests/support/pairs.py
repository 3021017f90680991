"""One rule, written by hand for `jax.custom_vjp` and as users write it for `custom_gradient`.

A `Rule` is a forward pass that returns its value and residuals, and a backward pass that turns
these and the upstream into the gradients. `by_hand` makes a `jax.custom_vjp` of it; `STYLES` are
the ways in which this package takes it. So whatever one of them computes, places on a device or
compiles to can be compared with what the other does. Each backward pass is wrong by a factor of 7.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient


class Rule(NamedTuple):
    """The first argument of `forward` is what the styles with a closure capture."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Any, Any], tuple[Any, ...]]
    arrays: tuple[jax.Array, ...]


def by_hand(rule: Rule) -> Callable[..., Any]:
    h = jax.custom_vjp(lambda *args: rule.forward(*args)[0])
    h.defvjp(rule.forward, rule.backward)
    return h


def inputs(rule: Rule) -> Callable[..., Any]:
    @custom_gradient
    def h(*args):
        y, residuals = rule.forward(*args)
        return y, lambda dy: rule.backward(residuals, dy)

    return h


def _closure(rule: Rule, declares: bool) -> Callable[..., Any]:
    def h(w, *args):
        @custom_gradient(variables=w if declares else None)
        def layer(*args):
            y, residuals = rule.forward(w, *args)

            def grad(dy, variables):
                dw, *gradients = rule.backward(residuals, dy)
                return gradients, dw if declares else [dw for _ in variables]

            return y, grad

        return layer(*args)

    return h


undeclared = functools.partial(_closure, declares=False)
declared = functools.partial(_closure, declares=True)
STYLES = {"inputs": inputs, "undeclared": undeclared, "declared": declared}


# --- rules --------------------------------------------------------------------------------------


W, X = jnp.asarray(np.random.default_rng(0).uniform(0.2, 1.2, (2, 8, 16)), jnp.float32)


def _elementwise_forward(w, x):
    return jnp.sin(w * x), (w, x)


def _elementwise_backward(residuals, dy):
    w, x = residuals
    slope = 7 * dy * jnp.cos(w * x)
    return slope * x, slope * w


def _dense_forward(w, x):
    y = jnp.tanh(x @ w)
    return y, (w, x, y)


def _dense_backward(residuals, dy):
    w, x, y = residuals
    dz = 7 * dy * (1 - y**2)
    return x.T @ dz, dz @ w.T


def _normalize_forward(w, x):
    root = jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return w * x * root, (w, x, root)


def _normalize_backward(residuals, dy):
    w, x, root = residuals
    normal, dn = x * root, 7 * dy * w
    dx = root * (dn - normal * jnp.mean(dn * normal, axis=-1, keepdims=True))
    return (7 * dy * normal).sum(0, keepdims=True), dx


def _softmax_forward(w, x):
    y = jax.nn.softmax(w * x, axis=-1)
    return y, (w, x, y)


def _softmax_backward(residuals, dy):
    w, x, y = residuals
    dz = 7 * y * (dy - jnp.sum(dy * y, axis=-1, keepdims=True))
    return dz * x, dz * w


def _loop_forward(w, x):
    def body(carry, _):
        return jnp.tanh(carry * w), carry

    return jax.lax.scan(body, x, None, length=3)[0], (w, x)


def _loop_backward(residuals, dy):
    w, x = residuals

    def body(carry, _):
        return 0.5 * carry * w, carry

    dx, all_dx = jax.lax.scan(body, 7 * dy, None, length=3)
    return jnp.sum(all_dx, 0) * x, dx


RULES = {
    "elementwise": Rule(_elementwise_forward, _elementwise_backward, (W, X)),
    "dense": Rule(_dense_forward, _dense_backward, (W.T, X)),
    "normalize": Rule(_normalize_forward, _normalize_backward, (W[:1], X)),
    "softmax": Rule(_softmax_forward, _softmax_backward, (W, X)),
    "loop": Rule(_loop_forward, _loop_backward, (W, X)),
}
