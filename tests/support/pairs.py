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


def squared(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradients of a loss whose derivative has the value of `f` in it."""
    return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1))


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


# --- rules ----------------------------------------------------------------------------------------


W, X = jnp.asarray(np.random.default_rng(0).uniform(0.2, 1.2, (2, 8, 16)), jnp.float32)


def _differentiated(value: Callable[..., Any]) -> Rule:
    """Return a rule that keeps its arguments, and differentiates the value."""
    keep = lambda *args: (value(*args), args)  # noqa: E731
    return Rule(keep, lambda args, dy: jax.vjp(value, *args)[1](7 * dy), (W, X))


def _dense(w, x):
    y = jnp.tanh(x @ w)
    return y, (w, x, y)


def _dense_backward(residuals, dy):
    w, x, y = residuals
    dz = 7 * dy * (1 - y**2)
    return x.T @ dz, dz @ w.T


def _normalize(w, x):
    root = jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return w * x * root, (w, x, root)


def _normalize_backward(residuals, dy):
    w, x, root = residuals
    normal, dn = x * root, 7 * dy * w
    dx = root * (dn - normal * jnp.mean(dn * normal, axis=-1, keepdims=True))
    return (7 * dy * normal).sum(0, keepdims=True), dx


def _loop(w, x):
    return jax.lax.scan(lambda carry, _: (jnp.tanh(carry * w), None), x, None, length=3)[0]


RULES = {
    "elementwise": _differentiated(lambda w, x: jnp.sin(w * x)),
    "softmax": _differentiated(lambda w, x: jax.nn.softmax(w * x, axis=-1)),
    "loop": _differentiated(_loop),
    # Their weight is on all devices: the gradient is written out, and says nothing of a sum.
    "dense": Rule(_dense, _dense_backward, (W.T, X)),
    "normalize": Rule(_normalize, _normalize_backward, (W[:1], X)),
}
