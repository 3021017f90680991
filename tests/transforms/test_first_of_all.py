"""Where the package is imported and where it is called first must not matter."""

import concurrent.futures
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, sample
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

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


def sine(x):
    from tfgrad_jax import custom_gradient

    @custom_gradient
    def sine(x):
        return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(x)

    return sine(x)


def mapped(f):
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("i",))
    per_device = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    return lambda x: per_device(x[None])[0]


GRADIENTS = {
    "grad": jax.grad,
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0],
    "grad of scan": lambda f: jax.grad(lambda x: lax.map(f, x[None])[0]),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of shard_map": lambda f: jax.grad(mapped(f)),
    "jvp of vmap": lambda f: lambda x: jax.jvp(jax.vmap(f), (x[None],), (jnp.ones(1),))[1][0],
}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_imported_where_something_is_transformed(forgotten, gradient):
    assert_same(GRADIENTS[gradient](sine)(X), 7 * jnp.cos(X))
    assert_same(jax.grad(sine)(X), 7 * jnp.cos(X))  # and from then on
    assert_same(jax.grad(jax.jit(sine))(X), 7 * jnp.cos(X))


def under(context):
    def call(f):
        with context():
            return f()

    return call


def in_a_thread(f):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


CONTEXTS = {
    "disable_jit": under(jax.disable_jit),
    "ensure_compile_time_eval": under(jax.ensure_compile_time_eval),
    "enable_checks": under(lambda: jax.enable_checks(True)),
    "debug_nans": under(lambda: jax.debug_nans(True)),
    "x64": under(lambda: jax.enable_x64(True)),
    "numpy_dtype_promotion": under(lambda: jax.numpy_dtype_promotion("strict")),
    "check_tracer_leaks": under(jax.check_tracer_leaks),
    "thread": in_a_thread,
    "pure_callback": lambda f: jax.pure_callback(lambda: np.asarray(f()), X),
    "eval_shape": lambda f: jax.eval_shape(f),
    "nothing": lambda f: f(),
}


def tower(custom_gradient):
    """Return a function of three levels; each rule, wrong by 7, reads the value of the next."""

    def level(below):
        def f(x):
            b = jax.jit(below)(x)
            return jnp.sin(x) * b, lambda dy: 7 * dy * b

        return custom_gradient(f)

    return level(level(custom_gradient(lambda x: (jnp.exp(x), lambda dy: 7 * dy * jnp.cos(x)))))


@pytest.mark.parametrize("first", sample(CONTEXTS, 4))
def test_called_first_in_a_context(forgotten, first):
    from tfgrad_jax import custom_gradient

    def scanned(x):
        return jnp.sum(lax.map(tower(custom_gradient), x[None]))

    CONTEXTS[first](lambda: jax.grad(tower(custom_gradient))(X))
    b, db = jnp.sin(X) * jnp.exp(X), 7 * jnp.exp(X)  # the level below, and its declared derivative
    derivative = scanned
    for expected in (7 * b, 7 * db, 7 * 7 * 7 * jnp.cos(X)):
        derivative = jax.grad(derivative)
        assert_same(derivative(X), expected, rtol=1e-4)
        assert_same(jax.jit(derivative)(X), expected, rtol=1e-4)
