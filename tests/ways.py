"""Many ways to the same derivative, and an oracle to compare them with.

A *loss* is a scalar function of one or more arrays. Each entry of `REVERSE`, `FORWARD` and
`SECOND` maps a loss to a function of the same arrays that returns the tuple of its gradients, or
the tuple of tuples of its second derivatives: with a transformation inside the derivative, or
around it, or without any. `hand_written` is the oracle: the same derivatives declared by
`jax.custom_jvp`, with everything passed by hand.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax
from jax.flatten_util import ravel_pytree

Function = Callable[..., Any]


# --- transformations that leave the value as it is -----------------------------------------------


def _pair(args: Any) -> Any:
    """Stack the arguments and other ones along a new axis."""
    return jax.tree.map(lambda a: jnp.stack([a, 1.5 * a]), args)


def _first(results: Any) -> Any:
    return jax.tree.map(lambda r: r[0], results)


def in_vmap(f: Function) -> Function:
    return lambda *args: _first(jax.vmap(f)(*_pair(args)))


def in_scan(f: Function) -> Function:
    return lambda *args: _first(lax.scan(lambda c, xs: (c, f(*xs)), None, _pair(args))[1])


def in_cond(f: Function) -> Function:
    return lambda *args: lax.cond(True, f, f, *args)


def of_constants(f: Function) -> Function:
    """Compile a call all of whose operands are constants of the program."""
    return lambda *args: jax.jit(lambda: f(*args))()


AROUND: Mapping[str, Function] = {
    "jit": jax.jit,
    "vmap": in_vmap,
    "scan": in_scan,
    "cond": in_cond,
    "checkpoint": jax.checkpoint,
}


def crossed(name: str, derivative: Function) -> dict[str, Function]:
    """Return the derivative alone, of each transformation, and under each transformation."""
    ways = {name: derivative, f"{name} of constants": lambda loss: of_constants(derivative(loss))}
    for kind, around in AROUND.items():
        ways[f"{name}({kind})"] = lambda loss, around=around: derivative(around(loss))
        ways[f"{kind}({name})"] = lambda loss, around=around: around(derivative(loss))
    return ways


# --- derivatives by all arguments ----------------------------------------------------------------


def _by_all(transformation: Function) -> Function:
    def derivative(loss: Function) -> Function:
        return lambda *args: transformation(loss, tuple(range(len(args))))(*args)

    return derivative


gradient = _by_all(jax.grad)
hessian = _by_all(jax.hessian)


def _columns(push: Function) -> Function:
    """Return the gradients from the derivatives along each coordinate."""

    def derivative(loss: Function) -> Function:
        def gradients(*args: Any) -> Any:
            flat, unravel = ravel_pytree(args)
            along = push(lambda v: loss(*unravel(v)), flat)
            return unravel(jnp.stack([along(e) for e in jnp.eye(flat.size, dtype=flat.dtype)]))

        return gradients

    return derivative


jvp = _columns(lambda f, v: lambda e: jax.jvp(f, (v,), (e,))[1])
linearize = _columns(lambda f, v: jax.linearize(f, v)[1])


def nested_gradient(loss: Function) -> Function:
    """Return the second derivatives of a loss of scalars, by `grad` of `grad` alone."""

    def second(*args: Any) -> Any:
        several = range(len(args))
        return tuple(gradient(lambda *a, i=i: gradient(loss)(*a)[i])(*args) for i in several)

    return second


def _twice(outer: Function, inner: Function) -> Function:
    def second(loss: Function) -> Function:
        def matrix(*args: Any) -> Any:
            argnums = tuple(range(len(args)))
            return outer(inner(loss, argnums), argnums)(*args)

        return matrix

    return second


REVERSE = {**crossed("grad", gradient), "jacrev": _by_all(jax.jacrev)}
FORWARD = {**crossed("jacfwd", _by_all(jax.jacfwd)), "jvp": jvp, "linearize": linearize}
SECOND = {
    "grad of grad": nested_gradient,
    **crossed("hessian", hessian),
    "jacrev of jacrev": _twice(jax.jacrev, jax.jacrev),
    "jacrev of jacfwd": _twice(jax.jacrev, jax.jacfwd),
    "jacfwd of jacfwd": _twice(jax.jacfwd, jax.jacfwd),
}
# Without any tracing to a jaxpr: functions that branch on values can be differentiated so.
EAGER = {"grad": gradient, "jvp": jvp, "linearize": linearize}
EAGER_SECOND = {"grad of grad": nested_gradient, "hessian": hessian}

# A selection, for tests of many functions.
FEW = {
    **{name: REVERSE[name] for name in ("grad", "jit(grad)", "grad(vmap)", "grad(scan)")},
    **{name: FORWARD[name] for name in ("jvp", "jacfwd(jit)", "jacfwd of constants")},
}
FEW_SECOND = {name: SECOND[name] for name in ("grad of grad", "hessian", "hessian(jit)")}


def by(ways: Mapping[str, Function], few: Mapping[str, Function] = FEW) -> Any:
    """Parametrize a test with `way`; those that are not among the few are slow."""
    return pytest.mark.parametrize(
        "way",
        [
            pytest.param(way, id=name, marks=() if name in few else pytest.mark.slow)
            for name, way in ways.items()
        ],
    )


def every(ways: Mapping[str, Function]) -> Any:
    """Parametrize a test with `way`; none is slow."""
    return by(ways, ways)


# --- the oracle ----------------------------------------------------------------------------------


def hand_written(value: Function, *gradients: Function) -> Function:
    """Return `value` with the given functions as its partial derivatives, at every order."""

    @jax.custom_jvp
    def h(*args: Any) -> Any:
        return value(*args)

    @h.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        pushed = [g(*primals) * t for g, t in zip(gradients, tangents, strict=True)]
        return h(*primals), sum(pushed[1:], pushed[0])

    return h


def reverse_by_hand(value: Function, *gradients: Function) -> Function:
    """Return the same for reverse mode of the first order alone, declared by `jax.custom_vjp`."""
    h = jax.custom_vjp(lambda *args: value(*args))
    h.defvjp(
        lambda *args: (value(*args), args),
        lambda args, dy: tuple(g(*args) * dy for g in gradients),
    )
    return h


def by_hand(way: Function, value: Function, *gradients: Function) -> Function:
    """Return what a user of JAX would write for this derivative."""
    declare = reverse_by_hand if way in REVERSE.values() else hand_written
    return declare(value, *gradients)


def skip_where_jax_fails(way: Function, hand: Function, oracle: Function, *args: Any) -> None:
    """Skip the test if JAX has no right number for the loss of a function declared by hand."""
    try:
        assert_derivative(way, hand, oracle, *args)
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")


def assert_derivative(way: Function, loss: Function, oracle: Function, *args: Any) -> None:
    """Compare a derivative of a loss with the plain one of its oracle."""
    second = way in SECOND.values()
    expected = (hessian if second else gradient)(oracle)(*args)
    assert_same(way(loss)(*args), expected)
