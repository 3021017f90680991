"""What `recompute_grad` takes: arguments and functions of every kind."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import recompute_grad

X = jnp.asarray(np.linspace(0.2, 1.4, 4), jnp.float32)


def body(x):
    return jnp.sin(x) * jnp.exp(x)


# --- recompute_grad: arguments ------------------------------------------------------------------


def test_recompute_pytrees_in_and_out():
    @recompute_grad
    def f(d, e):
        return {"p": d["a"] * d["b"][0], "o": (d["b"][1] * e, d["a"] * e)}

    def loss(d, e):
        y = f(d, e)
        return y["p"] + 10 * y["o"][0] + 100 * y["o"][1]

    two, three, four, five = map(jnp.float32, (2, 3, 4, 5))
    g = jax.grad(loss, (0, 1))({"a": two, "b": [three, four]}, five)
    expected = {"a": jnp.float32(503), "b": [two, jnp.float32(50)]}, jnp.float32(240)
    assert_same(g, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_static_arguments(compiled):
    seen = []

    @recompute_grad
    def f(x, mode, flag, n, nothing, function, dtype, *rest, scale=1, **named):
        seen.append((mode, flag, n, nothing, function, dtype, rest, scale, named))
        return x * x * (3 if mode == "triple" and flag and n == 3 else 1)

    def loss(x):
        static = ("triple", True, 3, None, len, jnp.float32)
        return f(x, *static, "rest", scale=2, axis=None).sum()

    g = jax.grad(loss)
    assert_same((jax.jit(g) if compiled else g)(X), 6 * X)
    expected = ("triple", True, 3, None, len, jnp.float32, ("rest",), 2, {"axis": None})
    assert set(map(repr, seen)) == {repr(expected)}
    assert all(s[1] is True and s[3] is None for s in seen)


def test_recompute_arguments_by_name():
    f = recompute_grad(lambda x, k=1.0, *, s=1.0: x * x * k * s)
    three = jnp.float32(3.0)
    assert_same(jax.grad(lambda x: f(x=x).sum())(X), 2 * X)
    by_k = jax.grad(lambda k: f(X, k=k, s=2.0).sum())(three)
    assert_same(by_k, 2 * jnp.sum(X * X))
    assert_same(jax.grad(lambda s: f(X, s=s).sum())(three), jnp.sum(X * X))


def test_recompute_integers_bools_and_keys_among_the_arrays():
    key = jax.random.key(0)

    @recompute_grad
    def f(x, n, mask, key):
        noise = jax.random.normal(key, x.shape, x.dtype)
        return jnp.where(mask, x * x * n.astype(x.dtype), x) * noise

    n, mask = jnp.arange(4), jnp.array([True, False, True, False])
    g = jax.jit(jax.grad(lambda x: f(x, n, mask, key).sum()))(X)
    noise = jax.random.normal(key, X.shape, X.dtype)
    assert_same(g, jnp.where(mask, 2 * X * n.astype(X.dtype), 1.0) * noise)


def test_recompute_integer_and_number_outputs():
    f = recompute_grad(lambda x: (x * x, jnp.arange(2), 3.0, True))
    y, pull_back = jax.vjp(lambda x: f(x)[0], X)
    assert_same(pull_back(jnp.ones_like(y))[0], 2 * X)
    assert f(X)[1].dtype == jnp.arange(2).dtype
    assert f(X)[2] == 3.0


def test_recompute_unused_and_empty_arguments():
    f = recompute_grad(lambda x, unused, empty: x * x + empty.sum())
    empty = jnp.ones((0, 2), jnp.float32)
    g = jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(X, X, empty)
    assert_same(g, (2 * X, jnp.zeros_like(X), empty))


def test_recompute_the_same_array_twice():
    f = recompute_grad(lambda x, y: x * y * y)
    assert_same(jax.grad(lambda x: f(x, x).sum())(X), 3 * X * X)


# --- recompute_grad: functions ------------------------------------------------------------------


class Scaled:
    """All kinds of methods."""

    factor = 2.0

    def __init__(self, w):
        self.w = w

    @recompute_grad
    def method(self, x):
        return self.w * x * x

    @staticmethod
    @recompute_grad
    def static(x):
        return x * x

    @classmethod
    @recompute_grad
    def of_class(cls, x):
        return cls.factor * x * x

    @recompute_grad
    def __call__(self, x):
        return self.w * x * x


def test_recompute_methods():
    three = jnp.float32(3.0)
    of_x = lambda f: jax.grad(lambda x: f(x).sum())(X)  # noqa: E731
    assert_same(of_x(Scaled(three).method), 6 * X)
    assert_same(of_x(Scaled(three)), 6 * X)
    assert_same(of_x(recompute_grad(Scaled(three).method)), 6 * X)
    assert_same(of_x(Scaled.static), 2 * X)
    assert_same(of_x(Scaled(three).static), 2 * X)
    assert_same(of_x(Scaled.of_class), 4 * X)
    by_weight = jax.grad(lambda w: Scaled(w).method(X).sum())(three)
    assert_same(by_weight, jnp.sum(X * X))
    called_on_the_class = jax.grad(lambda x: Scaled.method(Scaled(three), x).sum())(X)
    assert_same(called_on_the_class, 6 * X)


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_differentiates_what_is_closed_over(compiled):
    def loss(w, x):
        return recompute_grad(lambda x: jnp.sin(w * x))(x).sum()

    def plain(w, x):
        return jnp.sin(w * x).sum()

    w = jnp.float32(1.5)
    wrap = jax.jit if compiled else (lambda f: f)
    assert_same(wrap(jax.grad(loss, (0, 1)))(w, X), jax.grad(plain, (0, 1))(w, X))
    assert_same(wrap(jax.hessian(loss))(w, X), jax.hessian(plain)(w, X))


def test_recompute_without_arguments():
    w = jnp.float32(3.0)
    assert_same(jax.grad(lambda w: recompute_grad(lambda: w * w)())(w), jnp.float32(6.0))


def test_recompute_nested():
    inner = recompute_grad(body)
    outer = recompute_grad(lambda x: inner(x) * inner(2 * x))
    expected = jax.grad(lambda x: (body(x) * body(2 * x)).sum())(X)
    assert_same(jax.grad(lambda x: outer(x).sum())(X), expected)


@pytest.mark.parametrize(
    "f",
    [
        functools.partial(lambda k, x: k * x * x, 1.0),
        jax.jit(lambda x: x * x),
        jax.vmap(lambda x: x * x),
        type("Square", (), {"__call__": lambda self, x: x * x})(),
    ],
    ids=["partial", "jit", "vmap", "object"],
)
def test_recompute_any_callable(f):
    assert_same(jax.grad(lambda x: recompute_grad(f)(x).sum())(X), 2 * X)


def test_recompute_keeps_the_metadata():
    def f(x, k=1):
        """What f does."""
        return x * k

    h = recompute_grad(f)
    assert (h.__name__, h.__doc__, h.__wrapped__) == ("f", "What f does.", f)
    assert inspect.signature(h) == inspect.signature(f)


def test_recompute_passes_errors_on():
    @recompute_grad
    def f(x):
        raise KeyError("from f")

    with pytest.raises(KeyError, match="from f"):
        jax.grad(lambda x: f(x).sum())(X)
