"""Cotangents that a `shard_map` types as reduced or unreduced, with JAX's checks on.

An input that is *reduced* over a mesh axis has *unreduced* cotangents: each device holds a part
of a sum. A rule that was traced to a jaxpr must have been traced for such upstreams. The value is
`x + x`; the rules declare 3 where the derivative is 2, by sums alone, for those keep the type.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import needs_eight_devices
from helpers import assert_same, eager_and_jit
from jax.sharding import AxisType, PartitionSpec

from tfgrad_jax import custom_gradient

pytestmark = needs_eight_devices

X = np.arange(1, 5, dtype=np.float32)
W = np.float32(3)


def by_hand(x):
    h = jax.custom_vjp(lambda x: x + x)
    h.defvjp(lambda x: (x + x, None), lambda _, dy: (dy + dy + dy,))
    return h(x)


@custom_gradient
def direct(x):
    return x + x, lambda dy: dy + dy + dy


def by_a_slotted_object(x):
    class Slotted:
        __slots__ = ("held",)

        def __init__(self, held):
            self.held = held

        def __call__(self, dy):
            return dy + dy + dy

    @custom_gradient
    def f(x):
        return x + x, Slotted(x)

    return f(x)


FUNCTIONS = [direct, by_a_slotted_object]


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.enable_checks(True), jax.set_mesh(mesh):
        yield mesh


def reduced(h, mesh):
    """Each device has the weight; what it adds to its gradient is summed at the very end."""

    def body(w, x):
        y = h(jax.lax.pcast(w, "i", to="reduced"))
        return jax.lax.pcast(y, "i", to="varying") * x

    each = PartitionSpec("i")
    f = jax.shard_map(body, mesh=mesh, in_specs=(PartitionSpec(), each), out_specs=each)
    return lambda w, x: jnp.sum(f(w, x))


def unreduced(h, mesh):
    """The function sees the parts of a sum; its upstream is reduced."""

    def body(x):
        return h(jax.lax.pcast(jnp.sum(x), "i", to="unreduced"))

    f = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec(unreduced={"i"})
    )
    return lambda x: jax.reshard(f(x), PartitionSpec())


def placed(x):
    return jax.device_put(x, PartitionSpec("i"))


def skip_where_jax_fails(call):
    try:
        call(by_hand)
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")


@eager_and_jit
@pytest.mark.parametrize("h", FUNCTIONS)
def test_unreduced_cotangent(h, mode, mesh):
    def check(h):
        by_w, by_x = mode(jax.grad(reduced(h, mesh), (0, 1)))(W, placed(X))
        assert_same(
            (np.asarray(by_w), np.asarray(by_x)), (np.float32(30), np.full(4, 6, np.float32))
        )

    skip_where_jax_fails(check)
    check(h)


@eager_and_jit
@pytest.mark.parametrize("h", FUNCTIONS)
def test_reduced_cotangent(h, mode, mesh):
    def check(h):
        by_x = mode(jax.grad(unreduced(h, mesh)))(placed(X))
        assert_same(np.asarray(by_x), np.full(4, 3, np.float32))

    skip_where_jax_fails(check)
    check(h)
