"""Threads, and what outlives a call: no tracer but what the user keeps.

All losses are declared `7 w` by `x` and `5 x` by `w`.
"""

import concurrent.futures
import gc
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.errors import UnexpectedTracerError
from support.helpers import assert_same, product
from support.ways import DECLARED, WAYS, gradient

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def __call__(self, x):
        return product(lambda: self.w).__wrapped__(x)


LOSSES = {
    "closure": lambda w, x: product(w)(x),
    "method": lambda w, x: Layer(w)(x),
    "nest": lambda w, x: product(w, lambda x: Layer(w)(product(w)(x)) / (w * w * x))(x),
    "a custom_jvp in a jit": lambda w, x: product(
        w, lambda x: jax.jit(lambda x: jax.nn.relu(w * x) / (w * x))(x)
    )(x),
}
MODES = "grad", "jit(grad)", "jvp", "vmap(grad)", "grad(scan)", "grad(checkpoint)", "hessian"


def tracers():
    jax.clear_caches()
    gc.collect()
    return sum(isinstance(o, jax.core.Tracer) for o in gc.get_objects())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_tracer_is_left(loss, mode):
    before = tracers()
    with jax.checking_leaks():
        got = WAYS[mode](lambda *a: LOSSES[loss](*a))(W, X)
    assert_same(got, WAYS[mode](DECLARED)(W, X), atol=1e-4)
    assert tracers() <= before


# --- threads --------------------------------------------------------------------------------------


def test_a_late_function_of_another_thread_does_not_meet_this_run():
    """While one thread is in `f`, another runs the custom_jvp rule of an earlier `jit` (B9)."""
    inside, may_end = threading.Event(), threading.Event()
    g = jax.custom_jvp(jnp.sin)
    g.defjvp(lambda primals, tangents: (g(*primals), 3 * tangents[0] * jnp.cos(primals[0])))
    first = jax.jit(custom_gradient(lambda x: (g(x), lambda dy: 7 * dy)))
    assert_same(first(X), jnp.sin(X))

    def wait(x):
        inside.set()
        assert may_end.wait(60)
        return 1

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gradient(lambda w, x: product(w, wait)(x)), W, X)
        assert inside.wait(60)
        assert_same(jax.grad(first)(X), jnp.float32(7))
        may_end.set()
        assert_same(waiting.result(), (5 * X, 7 * W))


@pytest.mark.parametrize("mode", ["grad", "jit(grad)", "jvp"])
def test_threads_do_not_disturb_each_other(mode):
    def work(scale):
        w = jnp.float32(scale)
        for f in LOSSES.values():
            assert_same(WAYS[mode](lambda *a, f=f: f(*a))(w, X), (5 * X, 7 * w), atol=1e-4)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 9)))


def reverse(x):
    return x, lambda dy: -dy


h = custom_gradient(reverse)
CALLS = {
    "by position": lambda x: (h, x),
    "by name": lambda x: (lambda x: h(x=x), x),
    "primal": lambda x: (custom_gradient(reverse, primal=lambda x: x), x),
    "constant": lambda x: (custom_gradient(lambda x: (jnp.float32(1), lambda dy: -dy)), x),
    "closed over": lambda x: (custom_gradient(lambda _: ((x, x), lambda *dys: -dys[0])), 1.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_thread_does_not_lose_the_rule_of_what_another_one_differentiates(call):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:

        def loss(x):
            return jax.tree.leaves(threads.submit(*CALLS[call](x)).result())[0]

        for way in (jax.grad(loss), jax.jit(loss), lambda x: jax.jvp(loss, (x,), (x,))):
            with pytest.raises(UnexpectedTracerError, match="not in a thread pool"):
                way(X)


def test_a_thread_differentiates_by_itself_or_computes_values():
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert_same(threads.submit(jax.grad(h), X).result(), jnp.float32(-1))
        assert_same(threads.submit(h, X).result(), X)
