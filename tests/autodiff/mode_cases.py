"""Functions for both modes: each declares seven times the gradient of the plain one beside it.

The plain function `seven(f)` has the value of `f` and seven times its derivative, at every order
and in both modes, by JAX's own rules alone: that is what all results are compared with.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import lax
from loop_rules import (
    centered,
    chosen,
    complex_loop,
    half_precision_loop,
    loop,
    loop_with_variables,
    masked_loop,
    recomputed,
)

from tfgrad_jax import custom_gradient

X = jnp.asarray([0.5, -1.2, 2.0], jnp.float32)
W = jnp.asarray([[0.3, -0.7, 1.1], [0.2, 0.9, -0.4]], jnp.float32)
Z = lax.complex(X, X[::-1])


def seven(f):
    """Give the value of `f` a derivative seven times as large."""

    def g(*args):
        return jax.tree.map(
            lambda y: (
                7 * y - 6 * lax.stop_gradient(y) if jnp.issubdtype(y.dtype, jnp.inexact) else y
            ),
            f(*args),
        )

    return g


class Case:
    """A decorated function `h` and the plain `f` that it stands for, at `args`."""

    def __init__(self, h, f, *args, rtol=0.0):
        self.h, self.f, self.args, self.rtol = h, f, args, rtol
        rng = np.random.default_rng(0)
        self.tangents = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x) * rng.uniform(0.5, 1.5, x.shape), x.dtype), args
        )


def loss(f):
    """Make a real number of the outputs, with a second derivative of its own."""

    def scalar(*args):
        leaves = [y for y in jax.tree.leaves(f(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.real(y) ** 2 + 3 * jnp.imag(y) ** 2) for y in leaves)

    return scalar


@custom_gradient
def sine(x):
    return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(x)


@custom_gradient
def product(x, y):
    return x * jnp.exp(y), lambda dy: (7 * dy * jnp.exp(y), 7 * dy * x * jnp.exp(y))


@custom_gradient
def dense(w, x):
    y = jnp.tanh(w @ x)

    def grad(dy):
        da = 7 * dy * (1 - jnp.tanh(w @ x) ** 2)
        return jnp.outer(da, x), w.T @ da

    return y, grad


@custom_gradient
def by_vjp(x):
    y, pull_back = jax.vjp(lambda x: jnp.sin(x) * jnp.sum(x**2), x)
    return y, lambda dy: pull_back(7 * dy)


@custom_gradient
def of_pytree(params, scale, activation, *, flip=False):
    assert activation == "tanh" and scale == 2 and flip is False
    y = jnp.tanh(params["w"] @ params["x"]) * scale

    def grad(d_steps, dy):
        assert d_steps.dtype == jnp.int32
        da = 7 * dy * scale * (1 - jnp.tanh(params["w"] @ params["x"]) ** 2)
        x, w = params["x"], params["w"]
        return {"w": jnp.outer(da, x), "x": w.T @ da, "steps": None}, None, None

    return {"y": y, "steps": params["steps"] + 1}, grad


def pytree(f):
    steps = jnp.arange(2)

    def of_floats(params):
        return f({**params, "steps": steps}, 2, "tanh")["y"]

    return of_floats


def plain_of_pytree(params, scale, activation):
    return {"y": jnp.tanh(params["w"] @ params["x"]) * scale, "steps": params["steps"] + 1}


@custom_gradient
def two_outputs(x):
    return (x**3, jnp.sum(jnp.exp(x))), lambda d1, d2: 7 * (d1 * 3 * x**2 + d2 * jnp.exp(x))


@custom_gradient
def no_gradient(x, y):
    return jnp.sin(x) + jnp.exp(y), lambda dy: (7 * dy * jnp.cos(x), None)


@custom_gradient
def complex_cube(z):
    return z**3, lambda dy: 7 * dy * jnp.conj(3 * z**2)


@custom_gradient(convention="jax")
def complex_cube_in_jax_convention(z):
    return z**3, lambda dy: 7 * dy * 3 * z**2


@custom_gradient
def squared_modulus(z):
    return jnp.real(z) ** 2 + jnp.imag(z) ** 2, lambda dy: 7 * 2 * lax.complex(dy, 0 * dy) * z


@custom_gradient
def phase(x):
    y = lax.complex(jnp.cos(x), jnp.sin(x))
    return y, lambda dy: 7 * jnp.real(jnp.conj(lax.complex(-jnp.sin(x), jnp.cos(x))) * dy)


def undeclared_variables(w, x):
    @custom_gradient
    def h(x):
        def grad(dy, variables):
            assert len(variables) == 1 and variables[0] is w
            da = 7 * dy * (1 - jnp.tanh(w @ x) ** 2)
            return w.T @ da, [jnp.outer(da, x)]

        return jnp.tanh(w @ x), grad

    return h(x)


def declared_variables(w, x):
    @custom_gradient(variables={"w": w})
    def h(x):
        def grad(dy, variables):
            da = 7 * dy * (1 - jnp.tanh(variables["w"] @ x) ** 2)
            return variables["w"].T @ da, {"w": jnp.outer(da, x)}

        return jnp.tanh(w @ x), grad

    return h(x)


def recursive(x):
    @custom_gradient
    def exp(x):
        return jnp.exp(x), lambda dy: 7 * dy * lax.stop_gradient(0 * x) + 7 * dy * jnp.exp(x)

    return exp(x)


def tanh_dense(w, x):
    return jnp.tanh(w @ x)


CASES = {
    "elementwise": Case(sine, jnp.sin, X),
    "scalar": Case(sine, jnp.sin, X[0]),
    "two inputs": Case(product, lambda x, y: x * jnp.exp(y), X, X[::-1]),
    "dense": Case(dense, tanh_dense, W, X),
    "traced rule": Case(by_vjp, lambda x: jnp.sin(x) * jnp.sum(x**2), X),
    "pytree": Case(pytree(of_pytree), pytree(plain_of_pytree), {"w": W, "x": X}),
    "two outputs": Case(two_outputs, lambda x: (x**3, jnp.sum(jnp.exp(x))), X),
    "no gradient": Case(
        no_gradient, lambda x, y: jnp.sin(x) + lax.stop_gradient(jnp.exp(y)), X, X[::-1]
    ),
    "complex": Case(complex_cube, lambda z: z**3, Z),
    "complex, JAX's convention": Case(complex_cube_in_jax_convention, lambda z: z**3, Z),
    "complex to real": Case(squared_modulus, lambda z: jnp.real(z) ** 2 + jnp.imag(z) ** 2, Z),
    "real to complex": Case(phase, lambda x: lax.complex(jnp.cos(x), jnp.sin(x)), X),
    "undeclared variables": Case(undeclared_variables, tanh_dense, W, X),
    "declared variables": Case(declared_variables, tanh_dense, W, X),
    "local function": Case(recursive, jnp.exp, X),
    "loop": Case(loop, lambda x, w: jnp.sin(x * w), X, X[0]),
    "loop, mask": Case(
        lambda x: masked_loop(x, jnp.arange(3)),
        lambda x: jnp.where(jnp.arange(3), jnp.sin(x), 0), X,
    ),
    "checkpoint": Case(recomputed, lambda x: jnp.sin(jnp.sin(x)), X),
    "cond": Case(chosen, jnp.sin, X),
    "subtraction": Case(centered, lambda x, w: (x - jnp.mean(x)) * w, X, X[::-1]),
    "complex loop": Case(complex_loop, lambda z, w: w * z**2, Z, Z[0]),
    "half precision loop": Case(
        half_precision_loop,
        lambda x, w: x.astype(jnp.float32) * w, X.astype(jnp.bfloat16), X[0],
        rtol=1e-2,
    ),
    "loop with variables": Case(loop_with_variables, tanh_dense, W, X),
}  # fmt: skip
REPRESENTATIVE = ("elementwise", "pytree", "complex", "undeclared variables", "loop")

all_cases = pytest.mark.parametrize("name", CASES)
# All cases, most of them among the slow tests.
most_slow = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in REPRESENTATIVE else pytest.mark.slow) for n in CASES],
)
some_cases = pytest.mark.parametrize("name", REPRESENTATIVE)


def compare(name, transformed, rtol=2e-4):
    """Compare `transformed(function, case)` for the decorated and for the plain function."""
    case = CASES[name]
    expected = transformed(seven(case.f), case)
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(expected))
    assert_same(transformed(case.h, case), expected, rtol=max(rtol, case.rtol), atol=2e-4)


def jvp(f, case):
    return jax.jvp(f, case.args, case.tangents)


def grads(f, case):
    """Return the gradients by all arguments, as a function."""
    return jax.grad(f, tuple(range(len(case.args))))


def stacked(tree):
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x, x - 1]), tree)
