"""Short ways to check a rule, random points, and planted mistakes with what is noted of them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from right_rules import rule

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import check_gradient

X = jnp.asarray([0.5, -1.2, 2.0], jnp.float32)


def quick(h, *args, **options):
    return check_gradient(h, *args, **{"transforms": False, **options})


def note(h, *args, **options):
    """Return the note of the only row, which must have failed."""
    report = quick(h, *args, **options)
    (row,) = report.rows
    assert not row.ok and not report.ok
    return row.note


def fact(report, name):
    (found,) = [f for f in report.facts if f.name == name]
    return found


def declare(f, grad, **options):
    """Decorate `f` of one argument with `grad(x, dy)`."""

    @custom_gradient(**options)
    def h(x):
        return f(x), lambda dy: grad(x, dy)

    return h


half_square = declare(jnp.square, lambda x, dy: dy * x)
full_square = declare(jnp.square, lambda x, dy: dy * 2 * x)
clipped = declare(lambda x: x, lambda x, dy: jnp.clip(dy, -0.1, 0.1))


def precision(name):
    return contextlib.nullcontext() if name == "float32" else jax.enable_x64(True)


class Draw:
    """Random arrays of one precision."""

    def __init__(self, seed, dtype):
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def __call__(self, *shape, scale=1.0):
        return jnp.asarray(scale * self.rng.standard_normal(shape), self.dtype)

    def complex(self, *shape):
        return jax.lax.complex(self(*shape), self(*shape))


# Wrong rules: the function, its gradient, the point, and the notes on its arguments.
MISTAKES = {
    "forgotten factor": (
        lambda x: x**2, lambda dy, y, x: dy * x,
        lambda draw: (draw(3),), ("declared = 0.5 x expected",),
    ),
    "unsummed bias": (
        lambda x, b: x + jnp.broadcast_to(b, x.shape), lambda dy, y, x, b: (dy, dy),
        lambda draw: (draw(4, 3), draw(3)), (),
    ),
    "wrong sign": (
        jnp.cos, lambda dy, y, x: dy * jnp.sin(x),
        lambda draw: (draw(3),), ("wrong sign: declared = -1 x expected",),
    ),
    "swapped pair": (
        jnp.multiply, lambda dz, z, x, y: (dz * x, dz * y),
        lambda draw: (draw(3), draw(3)), ("swapped with `xs[1]`?", "swapped with `xs[0]`?"),
    ),
    "conjugate": (
        jnp.square, lambda dy, y, z: dy * 2 * z,
        lambda draw: (draw.complex(3),), ("declared = conjugate of expected",),
    ),
}  # fmt: skip


def wrong(name, draw):
    f, grad, point, notes = MISTAKES[name]
    return rule(f, grad), point(draw), notes
