"""Where the package is imported and where it is called first must not matter."""

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


def on_devices(kind):
    def call(f):
        mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
        each = lambda x: lax.map(f, x) + 0 * lax.psum(x, "i")  # noqa: E731
        over = jax.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.full(4, X), P("i"))
            return jax.device_get(jax.grad(lambda x: jnp.sum(over(x)))(x))[0]

    return call


def in_a_thread(f):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(jax.grad(f), X).result()


def under(context):
    def call(f):
        with context():
            return jax.grad(f)(X)

    return call


FIRST = {  # each returns the derivative
    "grad": lambda f: jax.grad(f)(X),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(X[None])[0],
    "grad of scan": lambda f: jax.grad(lambda x: lax.map(f, x[None])[0])(X),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X),
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (X[None],), (jnp.ones(1),))[1][0],
    "mesh": on_devices(AxisType.Auto),
    "explicit mesh": on_devices(AxisType.Explicit),
    "pure_callback": lambda f: jax.pure_callback(lambda: np.asarray(jax.grad(f)(X)), X),
    "thread": in_a_thread,
    "disable_jit": under(jax.disable_jit),
    "ensure_compile_time_eval": under(jax.ensure_compile_time_eval),
    "x64": under(lambda: jax.enable_x64(True)),
    "check_tracer_leaks": under(jax.check_tracer_leaks),
}


@pytest.mark.parametrize("first", sample(FIRST, 3, ["mesh", "explicit mesh"]))
def test_imported_and_called_first_in_a_context(forgotten, first):
    b, db = jnp.sin(X) * jnp.exp(X), 7 * jnp.exp(X)  # the level below, and its declared derivative
    assert_same(FIRST[first](tower), 7 * b)
    derivative = lambda x: jnp.sum(lax.map(tower, x[None]))  # noqa: E731
    for expected in (7 * b, 7 * db, 7 * 7 * 7 * jnp.cos(X)):
        derivative = jax.grad(derivative)
        assert_same(derivative(X), expected, rtol=1e-4)
        assert_same(jax.jit(derivative)(X), expected, rtol=1e-4)
