"""Threads, and what outlives a call: no tracer but what the user keeps."""

import concurrent.futures
import gc
import threading
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.errors import UnexpectedTracerError
from support.helpers import assert_same

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)


def closure(w, x):
    @custom_gradient
    def f(x):
        y = w * x

        def rule(dy, variables=()):
            return 7 * dy * w, [5 * dy * x for _ in variables]

        return y, rule

    return f(x)


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def __call__(self, x):
        def rule(dy, variables=()):
            return 7 * dy * self.w, [5 * dy * x for _ in variables]

        return self.w * x, rule


def nest(w, x):
    @custom_gradient
    def f(x):
        s = Layer(w)(closure(w, x))

        def rule(dy, variables=()):
            return 7 * dy * w, [5 * dy * x for _ in variables]

        return s, rule

    return f(x)


def with_custom_jvp(w, x):
    @custom_gradient
    def f(x):
        def rule(dy, variables=()):
            return 7 * dy * w, [5 * dy * x for _ in variables]

        return jax.jit(lambda x: jax.nn.relu(w * x))(x), rule

    return f(x)


LOSSES = {
    "closure": closure,
    "method": lambda w, x: Layer(w)(x),
    "nest": nest,
    "functions with a custom_jvp": with_custom_jvp,
}
MODES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit(grad)": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "jvp": lambda f: (
        lambda w, x: (
            jax.jvp(f, (w, x), (jnp.ones(()), jnp.zeros(())))[1],
            jax.jvp(f, (w, x), (jnp.zeros(()), jnp.ones(())))[1],
        )
    ),
    "vmap(grad)": lambda f: (
        lambda *a: jax.tree.map(
            lambda g: g[0], jax.vmap(jax.grad(f, (0, 1)))(*(x[None] for x in a))
        )
    ),
    "grad(scan)": lambda f: jax.grad(
        lambda *a: lax.map(lambda a: f(*a), tuple(x[None] for x in a))[0], (0, 1)
    ),
    "grad(cond)": lambda f: jax.grad(lambda *a: lax.cond(a[0] > 0, f, f, *a), (0, 1)),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "hessian": lambda f: lambda *a: (jax.hessian(f, (0, 1))(*a), jax.grad(f, (0, 1))(*a))[1],
}


def tracers():
    gc.collect()
    return sum(isinstance(o, jax.core.Tracer) for o in gc.get_objects())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_tracer_is_left(loss, mode):
    jax.clear_caches()
    before = tracers()
    with jax.checking_leaks():
        got = MODES[mode](lambda *a: LOSSES[loss](*a))(W, X)
    assert_same(got, (5 * X, 7 * W))
    jax.clear_caches()
    assert tracers() <= before


@pytest.mark.parametrize("loss", ["closure", "method", "nest"])
def test_an_exception_in_f_or_in_its_rule_leaves_no_tracer(loss):
    held = types.SimpleNamespace(fails=True)

    def failing(w, x):
        @custom_gradient
        def f(x):
            y = LOSSES[loss](w, x)
            if held.fails:
                raise ValueError("on purpose")
            return y, lambda dy, variables=(): (7 * dy * w, [5 * dy * x for _ in variables])

        return f(x)

    before = tracers()
    for way in (jax.grad(failing, (0, 1)), jax.jit(jax.grad(failing, (0, 1)))):
        held.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            way(W, X)
        held.fails = False
        assert_same(way(W, X), (5 * X, 7 * W))
    jax.clear_caches()
    assert tracers() <= before


# --- threads --------------------------------------------------------------------------------------


def test_a_late_function_of_another_thread_does_not_meet_this_run():
    """While one thread is in `f`, another runs the custom_jvp rule of an earlier `jit` (B9)."""
    inside, may_end = threading.Event(), threading.Event()

    def inner(x):
        g = jax.custom_jvp(lambda x: jnp.sin(x))
        g.defjvp(lambda primals, tangents: (g(*primals), 3 * tangents[0] * jnp.cos(primals[0])))
        return g(x)

    first = jax.jit(custom_gradient(lambda x: (inner(x), lambda dy: 7 * dy)))
    assert_same(first(X), jnp.sin(X))

    def loss(w, x):
        @custom_gradient
        def f(x):
            y = w * x
            inside.set()
            assert may_end.wait(60)
            rule = lambda dy, variables: (7 * dy * w, [5 * dy * x for _ in variables])  # noqa: E731
            return y * jnp.float32(1), rule

        return f(x)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(jax.grad(loss, (0, 1)), W, X)
        assert inside.wait(60)
        assert_same(jax.grad(first)(X), jnp.float32(7))
        may_end.set()
        assert_same(waiting.result(), (5 * X, 7 * W))


@pytest.mark.parametrize("mode", ["grad", "jit(grad)", "jvp"])
def test_threads_do_not_disturb_each_other(mode):
    def work(scale):
        w = jnp.float32(scale)
        every = [MODES[mode](lambda *a, f=f: f(*a))(w, X) for f in LOSSES.values()]
        assert_same(every, [(5 * X, 7 * w)] * len(LOSSES))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 9)))


REVERSAL = {
    "identity": lambda x: (x, lambda dy: -dy),
    "identity in a tuple": lambda x: ((x, x), lambda *dys: -dys[0]),
    "constant": lambda x: (jnp.float32(1), lambda dy: -dy),
}


@pytest.mark.parametrize("name", REVERSAL)
@pytest.mark.parametrize("call", ["by position", "by name", "primal", "closed over"])
def test_a_thread_does_not_lose_the_rule_of_what_another_one_differentiates(call, name):
    f = REVERSAL[name]
    h = custom_gradient(f, primal=(lambda x: f(x)[0]) if call == "primal" else None)
    threads = concurrent.futures.ThreadPoolExecutor(1)

    def loss(x):
        if call == "closed over":
            done = threads.submit(custom_gradient(lambda _: f(x)), 1.0)
        else:
            done = threads.submit(h, x=x) if call == "by name" else threads.submit(h, x)
        return jnp.sum(jax.tree.leaves(done.result())[0])

    with threads:
        if not (call == "closed over" and name == "constant"):  # then nothing is traced
            for way in (jax.grad(loss), jax.jit(loss), lambda x: jax.jvp(loss, (x,), (x,))):
                with pytest.raises(UnexpectedTracerError, match="not in a thread pool"):
                    way(X)
        # A thread differentiates by itself, or computes values.
        own = threads.submit(jax.grad(lambda x: jax.tree.leaves(h(x))[0]), X)
        assert_same(own.result(), jnp.float32(-1))
        assert_same(threads.submit(h, X).result(), f(X)[0])


def test_threads_that_pull_back_leave_a_variable_alone():
    scale, pulls = 0.0, []
    f = custom_gradient(lambda x: (x * 1.0, lambda dy: 7 * dy * scale))
    for k in range(100):
        scale = k
        pulls.append(jax.vjp(f, X)[1])
    scale = 1000
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pull: float(pull(jnp.float32(1))[0]), pulls))
    assert got == [7.0 * k for k in range(100)]
    assert scale == 1000
