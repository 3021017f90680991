"""Programs x transformations: each derivative of each program, in, under and over what JAX has.

A program is a loss of a decorated function, one for each way that a call and its rule can take. Its
oracle is the same loss of a function that is declared by `jax.custom_jvp`, right at every order and
in both modes. Rules are wrong by a factor of 7 for the first input, 5 for the second and for
weights. The transformations of `ways.py` leave the value as it is, so the oracle is differentiated
plainly.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, drops_in_scan, total
from support.ways import FORWARD, REVERSE, SECOND, gradient, hand_written, hessian

from tfgrad_jax import custom_gradient


class Program(NamedTuple):
    loss: Callable[..., Any]
    oracle: Callable[..., Any]
    args: tuple[Any, ...]


PROGRAMS: dict[str, Program] = {}
X = jnp.float32([0.3, 0.8, 1.3])
W = X[::-1] + 1
A = jnp.float32(0.7)
MATRIX = jnp.float32(np.random.default_rng(0).uniform(-1, 1, (2, 3)))


def scaled(f, *factors):
    """Return `f` with its derivatives times the factors; at higher orders, those of these."""
    h = jax.custom_jvp(f)

    def push(primals, tangents):
        pairs = zip(tangents, factors, strict=True)
        moved = tuple(jax.tree.map(lambda t, k=k: k * t, tangent) for tangent, k in pairs)
        return h(*primals), jax.jvp(f, primals, moved)[1]

    h.defjvp(push)
    return h


def squares(f):
    """Return a loss with a second derivative of its own."""
    return lambda *args: total(jax.tree.map(lambda y: y**2 + 2 * y, f(*args)))


def program(oracle, *args):
    def register(h):
        PROGRAMS[h.__name__.replace("_", " ")] = Program(squares(h), squares(oracle), args)
        return h

    return register


# --- inputs ---------------------------------------------------------------------------------------


@program(scaled(jnp.sin, 7), A)
@custom_gradient
def scalar(x):
    return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(x)


@program(scaled(lambda x, y: x * jnp.exp(y), 7, 5), X, W)
@custom_gradient
def two_inputs(x, y):
    return x * jnp.exp(y), lambda dy: (7 * dy * jnp.exp(y), 5 * dy * x * jnp.exp(y))


def _layer(params, x):
    return {"y": jnp.tanh(params["w"] @ x + params["b"][0])}


@program(scaled(_layer, 5, 7), {"w": MATRIX, "b": [X[:2]]}, X)
def pytrees_and_settings(params, x):
    @custom_gradient
    def h(params, x, activation, *, flip=False):
        assert activation == "tanh" and not flip

        def grad(dy):
            y = _layer(params, x)["y"]  # not the output, which would have the declared derivative
            dz = dy * (1 - y**2)
            return {"w": 5 * jnp.outer(dz, x), "b": [5 * dz]}, 7 * params["w"].T @ dz, None

        return _layer(params, x), grad

    return h(params, x, "tanh")


@program(scaled(lambda x: (x**3, jnp.sum(jnp.exp(x))), 7), X)
@custom_gradient
def several_outputs(x):
    return (x**3, jnp.sum(jnp.exp(x))), lambda a, b: 7 * (a * 3 * x**2 + b * jnp.exp(x))


@program(hand_written(lambda x, y: x * y, lambda x, y: 7 * x**2, lambda x, y: 0 * y), X, W)
@custom_gradient
def no_gradient_for_one(x, y):
    return x * y, lambda dy: (7 * dy * x**2, None)


# --- closed-over values ---------------------------------------------------------------------------

_TANH = scaled(lambda w, x: jnp.tanh(w * x), 5, 7)


def _slope(w, x, dy):
    return dy * (1 - jnp.tanh(w * x) ** 2)


@program(_TANH, W, X)
def undeclared(w, x):
    @custom_gradient
    def h(x):
        def grad(dy, variables):
            (v,) = variables
            return 7 * _slope(v, x, dy) * v, [5 * _slope(v, x, dy) * x]

        return jnp.tanh(w * x), grad

    return h(x)


@program(_TANH, W, X)
def declared(w, x):
    @custom_gradient(variables={"w": w})
    def h(x):
        def grad(dy, variables):
            s = _slope(variables["w"], x, dy)
            return 7 * s * variables["w"], {"w": 5 * s * x}

        return jnp.tanh(w * x), grad

    return h(x)


@program(scaled(lambda w, x: jnp.tanh(w * x), 1, 7), W, X)
def autodiff(w, x):
    return custom_gradient(
        lambda x: (jnp.tanh(w * x), lambda dy: 7 * _slope(w, x, dy) * w), variables="autodiff"
    )(x)


# --- functions in each other ----------------------------------------------------------------------


@program(hand_written(lambda x: jnp.sin(x) ** 2, lambda x: 7 * x), X)
def hides_what_it_calls(x):
    return custom_gradient(lambda x: (scalar(x) ** 2, lambda dy: 7 * dy * x))(x)


@program(hand_written(jnp.cos, lambda x: -scaled(jnp.sin, 7)(x)), X)
def in_a_rule(x):
    return custom_gradient(lambda x: (jnp.cos(x), lambda dy: -dy * scalar(x)))(x)


# --- transformations ------------------------------------------------------------------------------


def in_custom_vjp(loss):
    """A hand-written rule around it, which multiplies what JAX's pullback gives."""
    h = jax.custom_vjp(loss)
    h.defvjp(lambda *args: jax.vjp(loss, *args), lambda pull, dy: pull(dy))
    return h


def under(setting, derivative):
    def of(loss):
        def run(*args):
            with setting():
                return jax.jit(derivative(loss))(*args)

        return run

    return of


SETTINGS = {
    "disable_jit": jax.disable_jit,
    "check_tracer_leaks": jax.check_tracer_leaks,
    "enable_checks": lambda: jax.enable_checks(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "x64": lambda: jax.enable_x64(True),
}


INSIDE = {
    "switch": lambda loss: lambda *args: lax.switch(1, [lambda *_: jnp.float32(0), loss], *args),
    "fori_loop": lambda loss: lambda *args: lax.fori_loop(0, 2, lambda _, c: loss(*args), 0.0),
}
DERIVATIVES = {"grad": gradient, "jacfwd": FORWARD["jacfwd"], "hessian": hessian}
MORE = {
    f"{n}({k})": lambda loss, d=d, f=f: d(f(loss))
    for n, d in DERIVATIVES.items()
    for k, f in INSIDE.items()
}
MORE |= {f"{name}(grad)": under(setting, gradient) for name, setting in SETTINGS.items()}
MORE["grad(custom_vjp)"] = lambda loss: gradient(in_custom_vjp(loss))
WAYS = {**REVERSE, **FORWARD, **SECOND, **MORE}


# Before JAX 0.12 this is a limit: "orders of a scan".
LIMITED = ("hides what it calls", "hessian(scan)")
EVERY = [(n, w) for n in PROGRAMS for w in WAYS if not (drops_in_scan() and (n, w) == LIMITED)]


@pytest.mark.sampled(45)
@pytest.mark.parametrize(("name", "way"), EVERY)
def test_every_transformation(name, way):
    loss, oracle, args = PROGRAMS[name]
    if way == "grad of grad":  # of scalars alone
        loss, oracle = (
            lambda s, f=f, args=args: f(*jax.tree.map(lambda a: s * a, args))
            for f in (loss, oracle)
        )
        args = (jnp.float32(1.1),)
    is_second = way in SECOND or "hessian" in way
    expected = (hessian if is_second else gradient)(oracle)(*args)
    assert_same(WAYS[way](loss)(*args), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_value(name):
    """Eagerly, compiled, mapped, and by its shape alone."""
    loss, oracle, args = PROGRAMS[name]
    expected = oracle(*args)
    two = jax.tree.map(lambda a: jnp.stack([a, a]), args)
    assert_same((loss(*args), jax.jit(loss)(*args)), (expected, expected))
    assert_same(jax.jit(jax.vmap(loss))(*two), jnp.stack([expected, expected]))
    assert jax.eval_shape(loss, *args).dtype == expected.dtype
