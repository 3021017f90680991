"""Random points, and planted mistakes: wrong rules, each with what must be noted of it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient

PRECISIONS = ("float32", "float64")


def precision(name):
    if name == "float32":
        return contextlib.nullcontext()
    return jax.enable_x64(True)


class Draw:
    """Random arrays of one precision."""

    def __init__(self, seed, dtype):
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def __call__(self, *shape, scale=1.0):
        return jnp.asarray(scale * self.rng.standard_normal(shape), self.dtype)

    def complex(self, *shape):
        return jax.lax.complex(self(*shape), self(*shape))


MISTAKES = {}


def mistake(*notes):
    def register(build):
        MISTAKES[build.__name__] = build, notes
        return build

    return register


@mistake("declared = 0.5 x expected")
def forgotten_factor(draw):
    @custom_gradient
    def h(x):
        return x**2, lambda dy: dy * x

    return h, (draw(3),)


@mistake()
def unsummed_bias(draw):
    @custom_gradient
    def h(x, b):
        return x + jnp.broadcast_to(b, x.shape), lambda dy: (dy, dy)

    return h, (draw(4, 3), draw(3))


@mistake("wrong sign: declared = -1 x expected")
def wrong_sign(draw):
    @custom_gradient
    def h(x):
        return jnp.cos(x), lambda dy: dy * jnp.sin(x)

    return h, (draw(3),)


@mistake("swapped with `y`?", "swapped with `x`?")
def swapped_pair(draw):
    @custom_gradient
    def h(x, y):
        return x * y, lambda dy: (dy * x, dy * y)

    return h, (draw(3), draw(3))


@mistake("declared = conjugate of expected")
def conjugate(draw):
    @custom_gradient
    def h(z):
        return z * z, lambda dy: dy * 2 * z

    return h, (draw.complex(3),)
