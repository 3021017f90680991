"""`primal=g` runs instead of `f` where nothing is differentiated.

`g` returns 100 more than `f` on purpose, so that the value shows which of them ran.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

X = jnp.float32(2)
RULE = jnp.float32(14)


def with_primal(**options):
    def g(x):
        return x**2 + 100

    @custom_gradient(primal=g, **options)
    def h(x):
        return x**2, lambda dy: 7 * dy * x

    return h


h = with_primal()

NOT_DIFFERENTIATED = {
    "eager": lambda: h(X),
    "by name": lambda: h(x=X),
    "number": lambda: jnp.float32(h(2.0)),
    "jit": lambda: jax.jit(h)(X),
    "vmap": lambda: jax.vmap(h)(X[None])[0],
    "jit(vmap)": lambda: jax.jit(jax.vmap(h))(X[None])[0],
    "scan": lambda: lax.scan(lambda c, x: (c, h(x)), None, X[None])[1][0],
    "cond": lambda: lax.cond(True, h, h, X),
    "checkpoint": lambda: jax.checkpoint(h)(X),
    "beside what is differentiated": lambda: jax.value_and_grad(lambda z: h(X) + 0 * z)(X)[0],
    "jit beside what is differentiated": lambda: jax.jit(
        jax.value_and_grad(lambda z, x: h(x) + 0 * z)
    )(X, X)[0],
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIATED)
def test_primal_runs(name):
    assert_same(NOT_DIFFERENTIATED[name](), jnp.float32(104))


DIFFERENTIATED = {
    "grad": lambda h: jax.value_and_grad(h)(X),
    "jit(grad)": lambda h: jax.jit(jax.value_and_grad(h))(X),
    "grad(jit)": lambda h: jax.value_and_grad(jax.jit(h))(X),
    "grad(vmap)": lambda h: jax.value_and_grad(lambda x: jax.vmap(h)(x[None])[0])(X),
    "grad(scan)": lambda h: jax.value_and_grad(
        lambda x: lax.scan(lambda c, x: (c + h(x), None), 0.0, x[None])[0]
    )(X),
    "jvp": lambda h: jax.jvp(h, (X,), (jnp.float32(1),)),
    "jit(jvp)": lambda h: jax.jit(lambda x: jax.jvp(h, (x,), (jnp.float32(1),)))(X),
    "linearize": lambda h: (lambda y, push: (y, push(jnp.float32(1))))(*jax.linearize(h, X)),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_f_runs_where_it_is_differentiated(name):
    assert_same(DIFFERENTIATED[name](h), (jnp.float32(4), RULE))


def test_f_runs_at_every_order():
    """`L = h**2`: `L'' = 14 h + 98 x**2` with the value of `f`, not of `g`."""
    loss = lambda x: h(x) ** 2  # noqa: E731
    for second in (jax.grad(jax.grad(loss)), jax.hessian(loss), jax.jacfwd(jax.jacfwd(loss))):
        assert_same(second(X), jnp.float32(448))
        assert_same(jax.jit(second)(X), jnp.float32(448))


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_f_does_not_run_where_it_is_not_differentiated(mode):
    """What only the backward pass needs is not computed, nor even traced, in a plain call."""
    runs = []

    @functools.partial(custom_gradient, primal=lambda x: x**2)
    def f(x):
        runs.append(x)
        return x**2, lambda dy: 7 * dy * x

    assert_same(jnp.float32(f(X)), jnp.float32(4))
    assert not runs
    assert_same(mode(jax.grad(f))(X), RULE)
    assert len(runs) == 1


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_closures_and_variables(mode):
    def loss(w, x):
        @custom_gradient(primal=lambda x: w * x**2 + 100)
        def f(x):
            def grad(dy, variables):
                return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

            return w * x**2, grad

        return f(x)

    w = jnp.float32(3)
    assert_same(mode(loss)(w, X), jnp.float32(112))
    expected = jnp.float32(20), jnp.float32(42)
    assert_same(mode(jax.grad(loss, (0, 1)))(w, X), expected)
    assert_same(mode(jax.jacfwd(loss, (0, 1)))(w, X), expected)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_methods(mode):
    class Model:
        def __init__(self, w):
            self.w = w

        def fast(self, x):
            return self.w * x**2 + 100

        @custom_gradient(primal=fast)
        def call(self, x):
            return self.w * x**2, lambda dy: 7 * dy * self.w * x

    model = Model(3.0)
    assert_same(mode(model.call)(X), jnp.float32(112))
    assert_same(mode(jax.value_and_grad(model.call))(X), (jnp.float32(12), jnp.float32(42)))


def test_settings_and_defaults():
    def g(x, power=2, *, offset=0.0):
        return x**power + offset + 100

    @custom_gradient(primal=g)
    def f(x, power=2, *, offset=0.0):
        return x**power + offset, lambda dy: (7 * dy * x, None)[: 1 if power == 2 else 2]

    assert_same(f(X), jnp.float32(104))
    assert_same(f(X, 3, offset=1.0), jnp.float32(109))
    assert_same(jax.jit(lambda x: f(x, power=3))(X), jnp.float32(108))
    assert_same(jax.value_and_grad(f)(X), (jnp.float32(4), RULE))
    assert_same(jax.value_and_grad(lambda x: f(x, 3))(X), (jnp.float32(8), RULE))
