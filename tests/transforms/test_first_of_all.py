"""Where the package is imported and where it is called first must not matter.

Nothing is learned about JAX inside a mesh, or where a trace or a setting is on.
"""

import concurrent.futures
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.helpers import assert_same, sample

X = jnp.float32(0.7)


@pytest.fixture
def forgotten():
    """Let the package be imported for the first time."""

    def forget():
        ours = [name for name in sys.modules if name.partition(".")[0] == "tfgrad_jax"]
        return {name: sys.modules.pop(name) for name in ours}

    known = forget()
    yield
    forget()
    sys.modules.update(known)


def tower(x):
    """Call a function of three levels; each rule, wrong by 7, reads the value of the next."""
    from tfgrad_jax import custom_gradient

    def level(below):
        def f(x):
            b = jax.jit(below)(x)
            return jnp.sin(x) * b, lambda dy: 7 * dy * b

        return custom_gradient(f)

    lowest = custom_gradient(lambda x: (jnp.exp(x), lambda dy: 7 * dy * jnp.cos(x)))
    return level(level(lowest))(x)


def over(kind, f, around=lambda f: f):
    """Call the function on four devices, and differentiate a collective of it."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType[kind],))
    rows = jax.device_put(X * jnp.ones(4), jax.NamedSharding(mesh, P("i")))

    def shard(f):
        return around(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")))

    with jax.set_mesh(mesh):
        value = jax.device_get(shard(f)(rows))
        product = shard(lambda x: f(x) * lax.all_gather(f(x), "i")[1])
        gradient = jax.device_get(jax.grad(lambda x: jnp.sum(product(x)))(rows))
    b = np.sin(X) * np.exp(X)
    assert_same(value, np.full(4, np.sin(X) * b))
    assert_same(gradient, 7 * b * value * np.float32([1, 5, 1, 1]))


def in_a_thread(f):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(jax.grad(f), X).result()


def under(context):
    def call(f):
        with context():
            return jax.grad(f)(X)

    return call


FIRST = {
    "grad": lambda f: jax.grad(f)(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(X[None]),
    "grad of scan": lambda f: jax.grad(lambda x: lax.map(f, x[None])[0])(X),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X),
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (X[None],), (jnp.ones(1),)),
    "pure_callback": lambda f: jax.pure_callback(lambda: np.asarray(jax.grad(f)(X)), X),
    "eval_shape": lambda f: jax.eval_shape(jax.grad(f), X),
    "thread": in_a_thread,
    "ensure_compile_time_eval": under(jax.ensure_compile_time_eval),
    "enable_checks": under(lambda: jax.enable_checks(True)),
    "x64": under(lambda: jax.enable_x64(True)),
}
MESHES = {
    "shard_map": lambda f: over("Auto", f),
    "jit of shard_map": lambda f: over("Auto", f, jax.jit),
    "shard_map of an explicit mesh": lambda f: over("Explicit", f),
    "shard_map of jit": lambda f: over("Explicit", jax.jit(f)),
}
if jax.device_count() >= 4:
    FIRST |= MESHES


@pytest.mark.parametrize("first", sample(FIRST, 3, [m for m in MESHES if m in FIRST][1:3]))
def test_imported_and_called_first_in_a_context(forgotten, first):
    FIRST[first](tower)
    b, db = jnp.sin(X) * jnp.exp(X), 7 * jnp.exp(X)  # the level below, and its declared derivative
    derivative = lambda x: jnp.sum(lax.map(tower, x[None]))  # noqa: E731
    for expected in (7 * b, 7 * db, 7 * 7 * 7 * jnp.cos(X)):
        derivative = jax.grad(derivative)
        assert_same(derivative(X), expected, rtol=1e-4)
        assert_same(jax.jit(derivative)(X), expected, rtol=1e-4)
