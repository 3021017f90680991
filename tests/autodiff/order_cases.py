"""The declared gradient is the derivative at every order, and in both modes.

The running example has the value `x**2` and declares the gradient `7 x`. With `L = h(x)**2`,

    L'   = 2 h * 7 x                = 14 x h
    L''  = 14 h + 14 x * 7 x        = 14 h + 98 x**2
    L''' = 14 * 7 x + 196 x         = 294 x

which at `x = 2` is 112, 448 and 588. Where `f`'s own derivative takes the place of the rule after
the first order, as in `jax.custom_gradient`, `L''` is 14 * 4 + 14 x * 2 x = 168.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tfgrad_jax import custom_gradient


@custom_gradient
def h(x):
    return x**2, lambda dy: 7 * dy * x


def closed_over(x):
    """The same, but declared in a closure over something that is traced wherever `x` is."""
    two = lax.stop_gradient(2 + 0 * x)

    @custom_gradient
    def h(x):
        return x**two, lambda dy: 7 * dy * x * two / 2

    return h(x)


class Rule:
    def __init__(self, x):
        self.x = x

    def __call__(self, dy):
        return 7 * dy * self.x


@custom_gradient
def traced(x):
    return x**2, Rule(x)


FUNCTIONS = {"lifted": h, "hoisted": closed_over, "traced": traced}


def in_scan(loss):
    return lambda x: lax.scan(lambda c, k: (c + loss(k), None), 0.0, jnp.stack([x]))[0]


AROUND = {
    "nothing": lambda loss: loss,
    "jit": jax.jit,
    "vmap": lambda loss: lambda x: jnp.sum(jax.vmap(loss)(jnp.stack([x]))),
    "cond": lambda loss: lambda x: lax.cond(x > 0, loss, lambda x: x, x),
    "switch": lambda loss: lambda x: lax.switch(1, [lambda x: x, loss], x),
    "checkpoint": jax.checkpoint,
    "map": lambda loss: lambda x: jnp.sum(lax.map(loss, jnp.stack([x]))),
}


def crossed(rows, columns, row):
    """Pair rows with columns: in full for one row, elsewhere with two columns; the rest is slow."""
    return [
        pytest.param(r, c, marks=() if r == row or c in columns[:2] else pytest.mark.slow)
        for r in rows
        for c in columns
    ]


def third(loss):
    return jax.grad(jax.grad(jax.grad(loss)))
