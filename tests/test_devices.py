"""Several devices: arrays that are sharded by their type, and `shard_map`.

The gradients are those of the same function on one device, by plain JAX: seven times the gradient
of the value, which is what every rule here declares.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tfgrad_jax import custom_gradient

X = jnp.linspace(0.1, 1.2, 8, dtype=jnp.float32).reshape(2, 4)
W = jnp.float32(0.3)
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map


@pytest.fixture(autouse=True)
def two_devices():
    if jax.device_count() < 2:  # `conftest.py` makes two of a CPU; an accelerator may be one
        pytest.skip("needs two devices")


def plain(x, w):
    return jnp.sin(x * w)


def elementwise(x, w):
    def grad(dy):
        slope = 7 * dy * jnp.cos(x * w)
        return slope * w, jnp.sum(slope * x)

    return plain(x, w), grad


@custom_gradient(forward_mode=True)
def forward_loop(x, w):
    def grad(dy):
        def body(dw, step):
            xi, dyi = step
            slope = 7 * dyi * jnp.cos(xi * w)
            return dw + jnp.sum(slope * xi), slope * w

        dw, dx = lax.scan(body, 0 * jnp.sum(dy[0]), (x, dy))
        return dx, dw

    return plain(x, w), grad


@custom_gradient(forward_mode=True)
def forward_subtraction(x, w):
    def grad(dy):
        slope = 7 * dy * jnp.cos(x * w)
        return 2 * slope * w - slope * w, 2 * jnp.sum(slope * x) - jnp.sum(slope * x)

    return plain(x, w), grad


def closure(x, w):
    @custom_gradient
    def h(x):
        def grad(dy, variables):
            slope = 7 * dy * jnp.cos(x * w)
            return slope * w, [jnp.sum(slope * x) for _ in variables]

        return plain(x, w), grad

    return h(x)


def rule_only(x, w):
    """Only the rule uses `scale`, and `y` does not depend on it."""
    scale = 7 * jnp.ones_like(x) * w / w

    @custom_gradient(variables=[w])
    def h(x):
        def grad(dy, variables):
            slope = scale * dy * jnp.cos(x * w)
            return slope * w, [jnp.sum(slope * x)]

        return plain(x, w), grad

    return h(x)


FORWARD = {
    "forward mode": custom_gradient(elementwise, forward_mode=True),
    "forward mode, loop": forward_loop,
    "forward mode, subtraction": forward_subtraction,
}
FUNCTIONS = {
    "inputs": custom_gradient(elementwise),
    **FORWARD,
    "closure": closure,
    "used by the rule alone": rule_only,
}
every_function = pytest.mark.parametrize("h", FUNCTIONS.values(), ids=FUNCTIONS)
forward_mode = pytest.mark.parametrize("h", FORWARD.values(), ids=FORWARD)
jit_or_not = pytest.mark.parametrize(
    "jit", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "jit"]
)


def expected_gradients():
    y, pull_back = jax.vjp(plain, X, W)
    return pull_back(7 * 2 * y)


def gradients(f, jit):
    g = jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))
    return jax.jit(g) if jit else g


# A scan runs over an axis that is not sharded, so the loop has one case.
SHARDED = [
    pytest.param(h, spec, id=f"{name}-{spec}")
    for name, h in FUNCTIONS.items()
    for spec in (("i", None), (None, "i"))
    if h is not forward_loop or spec[0] is None
]


@jit_or_not
@pytest.mark.parametrize(("h", "spec"), SHARDED)
def test_sharded_by_type(h, spec, jit):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(*spec)))
        dx, dw = gradients(h, jit)(x, W)
    assert tuple(dx.sharding.spec) == spec
    assert_same((np.asarray(dx), np.asarray(dw)), expected_gradients())


@jit_or_not
@forward_mode
def test_forward_mode_sharded_by_type(h, jit):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(None, "i")))
        pushed = lambda x, w: jax.jvp(h, (x, w), (2 * x, w))[1]  # noqa: E731
        got = (jax.jit(pushed) if jit else pushed)(x, W)
    assert_same(np.asarray(got), 7 * jax.jvp(plain, (X, W), (2 * X, W))[1])


def mapped(f):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("i",))
    each, shared = PartitionSpec(None, "i"), PartitionSpec()
    return shard_map(f, mesh=mesh, in_specs=(each, shared), out_specs=each)


@jit_or_not
@every_function
def test_grad_of_shard_map(h, jit):
    """The weight is shared: its gradient is the sum of what the devices computed."""
    assert_same(gradients(mapped(lambda x, w: h(x, w)), jit)(X, W), expected_gradients())


@jit_or_not
@every_function
def test_grad_inside_shard_map(h, jit):
    def gradient(x, w):
        return jax.grad(lambda x: jnp.sum(h(x, w) ** 2))(x)

    g = mapped(gradient)
    assert_same((jax.jit(g) if jit else g)(X, W), expected_gradients()[0])


@jit_or_not
@forward_mode
def test_jvp_of_shard_map(h, jit):
    f = mapped(lambda x, w: h(x, w))
    pushed = lambda x, w: jax.jvp(f, (x, w), (2 * x, w))[1]  # noqa: E731
    got = (jax.jit(pushed) if jit else pushed)(X, W)
    assert_same(got, 7 * jax.jvp(plain, (X, W), (2 * X, W))[1])
