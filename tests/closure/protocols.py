"""What the tables of this folder share: one function, `w x**2`, and its derivatives by hand.

They are declared wrong: `7 w x` by `x`, and by `w`, `5 x**2` by a rule or `x**2` by "autodiff".
Right numbers prove whose gradient was taken.
"""

import jax.numpy as jnp
from support.ways import FORWARD, REVERSE, SECOND, hand_written

NUMBERS = 3.0, 2.0  # w, x
ARGS = jnp.float32(3), jnp.float32(2)
WAYS = {**REVERSE, **FORWARD, **SECOND}
BRIEF = "grad", "jit(grad)", "jvp", "jacfwd of constants", "hessian(jit)"


def square(w, x):
    return w * x**2


DECLARED = hand_written(square, lambda w, x: 5 * x**2, lambda w, x: 7 * w * x)
ORDINARY = hand_written(square, lambda w, x: x**2, lambda w, x: 7 * w * x)


def squared(h):
    """Return a loss whose first derivative has `h` in it: its second needs the rule again."""
    return lambda *args: h(*args) ** 2
