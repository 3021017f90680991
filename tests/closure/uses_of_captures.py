"""Transformations of a loss of weights and inputs: what each returns, and what is expected."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

W, X = 3.0, 2.0
WS, XS = np.array([3.0, 0.5], np.float32), np.array([2.0, -1.5], np.float32)

TRANSFORMATIONS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {}


def transformation(f: Callable[..., Any]) -> Callable[..., Any]:
    TRANSFORMATIONS[f.__name__] = f
    return f


def both(expected, w, x):
    return expected.by_w(w, x), expected.by_x(w, x)


@transformation
def eager(loss, e):
    return jax.value_and_grad(loss, (0, 1))(W, X), (e.value(W, X), both(e, W, X))


@transformation
def inputs_only(loss, e):
    return jax.grad(loss, 1)(W, X), e.by_x(W, X)


@transformation
def weights_only(loss, e):
    return jax.grad(loss, 0)(W, X), e.by_w(W, X)


@transformation
def jit_of_grad(loss, e):
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X), (e.value(W, X), both(e, W, X))


@transformation
def jit_of_grad_inputs_only(loss, e):
    return jax.jit(jax.grad(loss, 1))(W, X), e.by_x(W, X)


@transformation
def jit_of_grad_weights_only(loss, e):
    return jax.jit(jax.grad(loss, 0))(W, X), e.by_w(W, X)


@transformation
def grad_of_jit(loss, e):
    return jax.grad(jax.jit(loss), (0, 1))(W, X), both(e, W, X)


@transformation
def vmap_of_grad(loss, e):
    return jax.vmap(jax.grad(loss, (0, 1)))(WS, XS), both(e, WS, XS)


@transformation
def vmap_of_grad_over_weights(loss, e):
    return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(WS, X), both(e, WS, X)


@transformation
def vmap_of_grad_over_inputs(loss, e):
    return jax.vmap(jax.grad(loss, (0, 1)), (None, 0))(W, XS), both(e, W, XS)


@transformation
def grad_of_vmap(loss, e):
    def total(w, x):
        return jax.vmap(loss)(w, x).sum()

    return jax.grad(total, (0, 1))(WS, XS), both(e, WS, XS)


@transformation
def grad_of_vmap_over_weights(loss, e):
    def total(w, x):
        return jax.vmap(lambda w: loss(w, x))(w).sum()

    return jax.grad(total, (0, 1))(WS, X), (e.by_w(WS, X), e.by_x(WS, X).sum())


@transformation
def grad_of_vmap_over_inputs(loss, e):
    def total(w, x):
        return jax.vmap(lambda x: loss(w, x))(x).sum()

    return jax.grad(total, (0, 1))(W, XS), (e.by_w(W, XS).sum(), e.by_x(W, XS))


@transformation
def hessian(loss, e):
    return jax.hessian(loss, (0, 1))(W, X), e.hessian(W, X)


@transformation
def jit_of_hessian(loss, e):
    return jax.jit(jax.hessian(loss, (0, 1)))(W, X), e.hessian(W, X)


@transformation
def reverse_over_reverse(loss, e):
    return jax.jacrev(jax.grad(loss, (0, 1)), (0, 1))(W, X), e.hessian(W, X)


@transformation
def scan_with_the_weight_outside(loss, e):
    def total(w, xs):
        return jax.lax.scan(lambda sum_, x: (sum_ + loss(w, x), None), 0.0, xs)[0]

    return jax.grad(total, (0, 1))(W, XS), (e.by_w(W, XS).sum(), e.by_x(W, XS))


@transformation
def checkpoint(loss, e):
    return jax.grad(jax.checkpoint(loss), (0, 1))(W, X), both(e, W, X)


@transformation
def cond(loss, e):
    def either(w, x):
        return jax.lax.cond(x > 0, loss, lambda w, x: 0.0 * w * x, w, x)

    return jax.grad(either, (0, 1))(W, X), both(e, W, X)
