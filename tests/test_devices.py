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
from tfgrad_jax._compat import SYSTEM_LOSES_ZEROS

X = jnp.linspace(0.1, 1.2, 8, dtype=jnp.float32).reshape(2, 4)
W = jnp.float32(0.3)
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map


@pytest.fixture(autouse=True)
def two_devices():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")


def plain(x, w):
    return jnp.sin(x * w)


@custom_gradient
def inputs(x, w):
    def grad(dy):
        slope = 7 * dy * jnp.cos(x * w)
        return slope * w, jnp.sum(slope * x)

    return plain(x, w), grad


@custom_gradient(forward_mode=True)
def forward(x, w):
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
    """Only the rule uses what it closes over."""
    scale = 7 * jnp.ones_like(x) * w / w

    @custom_gradient(variables=[w])
    def h(x):
        def grad(dy, variables):
            slope = scale * dy * jnp.cos(x * w)
            return slope * w, [jnp.sum(slope * x)]

        return plain(x, w), grad

    return h(x)


FUNCTIONS = (inputs, forward, forward_loop, forward_subtraction, closure, rule_only)
every_function = pytest.mark.parametrize("h", FUNCTIONS, ids=lambda h: h.__name__)
forward_mode = pytest.mark.parametrize(
    "h", (forward, forward_loop, forward_subtraction), ids=lambda h: h.__name__
)
jit_or_not = pytest.mark.parametrize(
    "jit", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "jit"]
)


# JAX 0.6 cannot differentiate inside a `shard_map`, nor transpose a loop there.
OLD = SYSTEM_LOSES_ZEROS
old_jax_fails = pytest.mark.skipif(OLD, reason="JAX 0.6 differentiates nothing in a shard_map")


def expected_gradients():
    y, pull_back = jax.vjp(plain, X, W)
    return pull_back(7 * 2 * y)


def gradients(f, jit):
    g = jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))
    return jax.jit(g) if jit else g


@pytest.mark.skipif(not hasattr(AxisType, "Explicit"), reason="no sharding in types")
@pytest.mark.parametrize("spec", [("i", None), (None, "i")], ids=str)
@jit_or_not
@every_function
def test_sharded_by_type(h, jit, spec):
    if h is forward_loop and spec[0] is not None:
        pytest.skip("a scan runs over an axis that is not sharded")
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
    if OLD and h is forward_loop:
        pytest.skip("JAX 0.6 does not transpose a loop in a shard_map")
    assert_same(gradients(mapped(lambda x, w: h(x, w)), jit)(X, W), expected_gradients())


@old_jax_fails
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
    if OLD and h is forward_loop:
        pytest.skip("JAX 0.6 does not transpose a loop in a shard_map")
    f = mapped(lambda x, w: h(x, w))
    pushed = lambda x, w: jax.jvp(f, (x, w), (2 * x, w))[1]  # noqa: E731
    got = (jax.jit(pushed) if jit else pushed)(X, W)
    assert_same(got, 7 * jax.jvp(plain, (X, W), (2 * X, W))[1])
