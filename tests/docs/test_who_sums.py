"""The table "who sums the gradient of a weight" of the how-to on sharding: each cell is run.

A clip would hide a wrong factor. So one rule is linear, and wrong by a factor of its own; the other
grows with the norm of the upstream over all devices, which shows an upstream of the wrong size.
"""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tfgrad_jax import custom_gradient

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "sharding.md"
W = np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2) / 7
X = np.arange(24.0, dtype=np.float32).reshape(8, 3) / 10
AXIS = "data"

pytestmark = [pytest.mark.docs, pytest.mark.usefixtures("as_users_run_it")]


def over_devices(a):
    return jax.lax.psum(a, AXIS)


def layer(w, x, linear, total, sum_of_dw):
    """`total` sums over the devices, or is the identity where one device has all rows."""

    @custom_gradient(variables=w)
    def f(x):
        def grad(dy, variables):
            if not linear:
                dy = dy * (1 + total(jnp.sum(dy**2)))
            return 3 * dy @ w.T, sum_of_dw(3 * x.T @ dy)

        return x @ w, grad

    return f(x)


def row(name, local, share, over):
    """Return the function to map for a row of the table, and what is around the `shard_map`."""
    if name.startswith("around"):
        return lambda w, x: over(local(w, x)), jax.grad
    if "of the loss over all devices" in name:
        return lambda w, x: jax.grad(lambda w: over(local(w, x)))(w), lambda mapped: mapped
    sums = over_devices if "then `psum`" in name else lambda dw: dw
    return lambda w, x: sums(jax.grad(share)(w, x)), lambda mapped: mapped


def cells():
    rows = re.findall(r"^\| ((?:around|inside).*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 6
    for name, *said in rows:
        for summed, what in zip((False, True), said, strict=True):
            yield pytest.param(name, summed, what, id=f"{name}-{'psum' if summed else 'own'}")


@pytest.mark.parametrize(("name", "summed", "said"), list(cells()))
def test_the_table_says_what_comes_out(name, summed, said):
    n = len(jax.devices())
    assert n == 8
    mesh = jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,))
    for linear, mean in itertools.product((True, False), repeat=2):
        reduce, over = (jnp.mean, jax.lax.pmean) if mean else (jnp.sum, jax.lax.psum)

        def loss(w, x, total, sum_of_dw, linear=linear, reduce=reduce):
            return reduce((layer(w, x, linear, total, sum_of_dw) - 1) ** 2)

        def local(w, x, loss=loss):
            return loss(w, x, over_devices, over_devices if summed else lambda dw: dw)

        def share(w, x, local=local, parts=n if mean else 1):
            return local(w, x) / parts

        body, outer = row(name, local, share, lambda a, over=over: over(a, AXIS))
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), P(AXIS)),
            out_specs=P(),
            check_vma="check_vma=False" not in name,
        )
        found = jax.jit(outer(mapped))(W, X)
        expected = jax.grad(loss)(W, X, lambda a: a, lambda dw: dw)
        ratio = np.asarray(found) / np.asarray(expected)
        if said == "wrong":
            assert not np.allclose(ratio, 1, rtol=0.1)
        else:
            factor = {"right": 1, "n times too large": n}[said]
            np.testing.assert_allclose(ratio, factor, rtol=1e-4)
