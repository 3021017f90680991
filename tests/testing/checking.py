"""Short ways to check a rule, and to what the check says of it."""

import jax.numpy as jnp

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


def declare(f, rule, **options):
    """Decorate `f` of one argument with `rule(x, dy)`."""

    @custom_gradient(**options)
    def h(x):
        return f(x), lambda dy: rule(x, dy)

    return h


half_square = declare(jnp.square, lambda x, dy: dy * x)
full_square = declare(jnp.square, lambda x, dy: dy * 2 * x)
clipped = declare(lambda x: x, lambda x, dy: jnp.clip(dy, -0.1, 0.1))
