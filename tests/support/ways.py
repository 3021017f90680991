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
from jax import lax
from jax.flatten_util import ravel_pytree
from support.helpers import assert_same

Function = Callable[..., Any]


def _pair(args: Any) -> Any:
    """Stack the arguments and other ones along a new axis."""
    return jax.tree.map(lambda a: jnp.stack([a, 1.5 * a]), args)


def _first(results: Any) -> Any:
    return jax.tree.map(lambda r: r[0], results)


AROUND: Mapping[str, Function] = {  # transformations that leave the value as it is
    "jit": jax.jit,
    "vmap": lambda f: lambda *args: _first(jax.vmap(f)(*_pair(args))),
    "scan": lambda f: lambda *args: _first(lax.map(lambda xs: f(*xs), _pair(args))),
    "cond": lambda f: lambda *args: lax.cond(True, f, f, *args),
    "checkpoint": jax.checkpoint,
}


def of_constants(f: Function) -> Function:
    """Compile a call all of whose operands are constants of the program."""
    return lambda *args: jax.jit(lambda: f(*args))()


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


def along(f: Function) -> Function:
    """Return the derivative of a function of one number, in forward mode."""
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


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

WAYS = {**REVERSE, **FORWARD, **SECOND}
BRIEF = "grad", "jit(grad)", "jvp", "jacfwd of constants", "hessian(jit)"

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


# Those of `helpers.product`, whose rule gives the weight a gradient, or whose own operations do.
DECLARED = hand_written(lambda w, x: w * x, lambda w, x: 5 * x, lambda w, x: 7 * w)
ORDINARY = hand_written(lambda w, x: w * x, lambda w, x: x, lambda w, x: 7 * w)


def squared(h: Function) -> Function:
    """Return a loss whose first derivative has `h` in it: its second needs the rule again."""
    return lambda *args: h(*args) ** 2


def assert_derivative(way: Function, loss: Function, oracle: Function, *args: Any) -> None:
    """Compare a derivative of a loss with the plain one of its oracle."""
    __tracebackhide__ = True
    expected = (hessian if way in SECOND.values() else gradient)(oracle)(*args)
    assert_same(way(loss)(*args), expected)
