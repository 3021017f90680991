"""Short ways to check a rule, and what the report says of it."""

import jax.numpy as jnp

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import check_gradient

X = jnp.asarray([0.5, -1.2, 2.0], jnp.float32)
ONES = jnp.ones(3)


def quick(h, *args, **options):
    return check_gradient(h, *args, **{"transforms": False, **options})


def note(h, *args, **options):
    """Return the note of the only row, which must have failed."""
    report = quick(h, *args, **options)
    (row,) = report.rows
    assert not row.ok and not report.ok
    return row.note


def notes(report):
    """Return the note on each row, which is right just if there is none."""
    assert all(row.ok is not bool(row.note) for row in report.rows)
    return {row.argument: row.note for row in report.rows}


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
