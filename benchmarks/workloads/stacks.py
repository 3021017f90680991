"""Deep computations whose backward pass needs nothing of the forward pass but its end.

A reversible residual stack recomputes each layer's input from its output; a fixed-point layer
differentiates the equation that its result solves, not the iteration that solved it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results import CHECKPOINT, HAND, OURS, OURS_FORWARD, PLAIN
from benchmarks.workloads.common import Workload, by_hand, normal
from tfgrad_jax import custom_gradient

DEPTHS = (4, 16, 64, 128)
ITERATIONS = 40


# --- reversible stack -----------------------------------------------------------------------------


def _branch(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def _layer(halves: Any, w: Any) -> Any:
    a, b = halves
    a = a + _branch(b, w[0])
    b = b + _branch(a, w[1])
    return (a, b), None


def _plain(body: Any) -> Any:
    return lambda a, b, weights: jax.lax.scan(body, (a, b), weights)[0]


def _forward(a: Any, b: Any, weights: Any) -> Any:
    a, b = _plain(_layer)(a, b, weights)
    return (a, b), (a, b, weights)


def _backward(residuals: Any, upstreams: Any) -> Any:
    a, b, weights = residuals

    def layer(carry: Any, w: Any) -> Any:
        a, b, da, db = carry
        fa, pull_a = jax.vjp(_branch, a, w[1])
        b = b - fa
        d, dw1 = pull_a(db)
        da = da + d
        fb, pull_b = jax.vjp(_branch, b, w[0])
        a = a - fb
        d, dw0 = pull_b(da)
        return (a, b, da, db + d), jnp.stack([dw0, dw1])

    (_, _, da, db), dws = jax.lax.scan(layer, (a, b, *upstreams), weights, reverse=True)
    return da, db, dws


def _ours(forward_mode: bool = False) -> Any:
    def stack(a: Any, b: Any, weights: Any) -> Any:
        @custom_gradient(forward_mode=forward_mode)
        def of_halves(a: Any, b: Any) -> Any:
            y, residuals = _forward(a, b, weights)

            def grad(*dys: Any, variables: Any) -> Any:
                da, db, dws = _backward(residuals, dys)
                return (da, db), [dws]

            return y, grad

        return of_halves(a, b)

    return stack


def reversible(depth: int) -> Workload:
    shapes = {"tiny": (4, 8), "full": (512, 128), "gpu": (4096, 1024)}

    def arguments(size: str, dtype: Any) -> Any:
        batch, width = shapes[size]
        layers = min(depth, 4) if size == "tiny" else depth
        return (
            normal(0, (batch, width), dtype),
            normal(1, (batch, width), dtype),
            normal(2, (layers, 2, width, width), dtype, 0.5 * width**-0.5),
        )

    def loss(stack: Any) -> Any:
        def total(a: Any, b: Any, weights: Any) -> Any:
            a, b = stack(a, b, weights)
            return (a * a).mean() + (b * jnp.cos(b)).mean()

        return total

    return Workload(
        f"reversible stack, depth {depth}",
        arguments,
        {
            PLAIN: loss(_plain(_layer)),
            CHECKPOINT: loss(_plain(jax.checkpoint(_layer))),
            HAND: loss(by_hand(_forward, _backward)),
            OURS: loss(_ours()),
            OURS_FORWARD: loss(_ours(forward_mode=True)),
        },
        (0, 1, 2),
        note="ours closes over the weights (undeclared)",
    )


# --- fixed point ----------------------------------------------------------------------------------


def _map(z: Any, w: Any, x: Any) -> Any:
    return jnp.tanh(z @ w + x)


def _iterate(step: Any, start: Any) -> Any:
    return jax.lax.fori_loop(0, ITERATIONS, lambda _, z: step(z), start)


def _solve(w: Any, x: Any) -> Any:
    z = _iterate(lambda z: _map(z, w, x), jnp.zeros_like(x))
    return z, (w, x, z)


def _solve_backward(residuals: Any, dy: Any) -> Any:
    # z = g(z, w, x): with u = dy + (dg/dz)^T u, the gradients are (dg/dw)^T u and (dg/dx)^T u.
    w, x, z = residuals
    pull_z = jax.vjp(lambda z: _map(z, w, x), z)[1]
    u = _iterate(lambda u: dy + pull_z(u)[0], dy)
    return jax.vjp(lambda w, x: _map(z, w, x), w, x)[1](u)


def fixed_point() -> Workload:
    shapes = {"tiny": (4, 8), "full": (1024, 256), "gpu": (8192, 2048)}

    def arguments(size: str, dtype: Any) -> Any:
        batch, width = shapes[size]
        # Norm about 0.4: the iteration has converged to float64 precision after 40 steps.
        w = normal(0, (width, width), dtype, 0.2 * width**-0.5)
        return w, normal(1, (batch, width), dtype)

    def unrolled(wrap: Any) -> Any:
        def solve(w: Any, x: Any) -> Any:
            step = wrap(lambda z, w, x: _map(z, w, x))
            start = jnp.zeros_like(x)
            return jax.lax.scan(lambda z, _: (step(z, w, x), None), start, None, ITERATIONS)[0]

        return solve

    def ours(forward_mode: bool = False) -> Any:
        def solve(w: Any, x: Any) -> Any:
            @custom_gradient(variables=w, forward_mode=forward_mode)
            def of_x(x: Any) -> Any:
                y, residuals = _solve(w, x)

                def grad(dy: Any, variables: Any) -> Any:
                    dw, dx = _solve_backward(residuals, dy)
                    return dx, dw

                return y, grad

            return of_x(x)

        return solve

    def loss(solve: Any) -> Any:
        return lambda w, x: (solve(w, x) ** 2).mean()

    return Workload(
        "fixed-point layer",
        arguments,
        {
            PLAIN: loss(unrolled(lambda f: f)),
            CHECKPOINT: loss(unrolled(jax.checkpoint)),
            HAND: loss(by_hand(_solve, _solve_backward)),
            OURS: loss(ours()),
            OURS_FORWARD: loss(ours(forward_mode=True)),
        },
        (0, 1),
        note=f"{ITERATIONS} iterations in either direction; ours closes over w (variables=w)",
    )
