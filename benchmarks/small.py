"""Functions that do almost nothing: what the decorator itself costs, and how that grows.

Where ours closes over values, the others, which cannot, are given them as arguments.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results import OURS
from benchmarks.workload import EVERY, HAND, JAX, JVP, PEERS, PLAIN, Rule, Way, Workload, normal
from tfgrad_jax import custom_gradient

MEASURES = ("eager forward", "eager grad", "run grad", "trace grad")
HIGHER = ("trace second order", "trace jvp", "trace hessian", "eager jvp")
ONE = (None, None, None)


# --- log1pexp: inputs only ------------------------------------------------------------------------


def _log1pexp(x: Any) -> Any:
    e = jnp.exp(x)
    return jnp.log(1 + e), e


def _log1pexp_backward(e: Any, dy: Any) -> Any:
    return (dy * (1 - 1 / (1 + e)),)


def _log1pexp_push(primals: Any, tangents: Any) -> Any:
    y, e = _log1pexp(*primals)
    return y, tangents[0] * (1 - 1 / (1 + e))


def _log1pexp_pair(x: Any) -> Any:
    e = jnp.exp(x)
    return jnp.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


LOG1PEXP = Rule(
    _log1pexp,
    _log1pexp_backward,
    residuals=lambda y, x: jnp.exp(x),
    push=_log1pexp_push,
    written={OURS: custom_gradient(_log1pexp_pair), JAX: jax.custom_gradient(_log1pexp_pair)},
)


def _scalar(size: Any, dtype: Any) -> Any:
    return (jnp.asarray(1.5, dtype),)


def _closing_over_much(way: Way, entries: int) -> Any:
    """Return the same function, which reads a large table."""
    table = dict.fromkeys(range(entries), 1.0)

    def forward(x: Any) -> Any:
        e = jnp.exp(x)
        return jnp.log(table[0] + e), e

    def pair(x: Any) -> Any:
        e = jnp.exp(x)
        return jnp.log(table[0] + e), lambda dy: dy * (1 - 1 / (1 + e))

    written = {OURS: custom_gradient(pair), JAX: jax.custom_gradient(pair)}
    return way(dataclasses.replace(LOG1PEXP, forward=forward, written=written))


# --- a linear layer under logsumexp: weights ------------------------------------------------------


def _head(w: Any, x: Any) -> Any:
    logits = x @ w
    y = jax.nn.logsumexp(logits)
    return y, (w, x, logits, y)


def _head_backward(residuals: Any, dy: Any) -> Any:
    w, x, logits, y = residuals
    p = dy * jnp.exp(logits - y)
    return x[:, None] * p, w @ p


def _layer(name: str, how: str) -> Workload:
    rule = Rule(
        _head, _head_backward, residuals=lambda y, w, x: (w, x, x @ w, y), captured=1, how=how
    )
    return Workload(
        name,
        lambda way, size: way(rule),
        lambda size, dtype: (normal(0, (8, 8), dtype), normal(1, (8,), dtype)),
        (0, 1),
        ONE,
        MEASURES,
        PEERS,
        note="the others are given the weights as arguments",
    )


OVERHEAD = (
    Workload(
        "inputs only", lambda way, size: way(LOG1PEXP), _scalar, (0,), ONE,
        MEASURES + HIGHER, (*PEERS[:3], JVP, *PEERS[3:]),
    ),
    Workload(
        "large closure", _closing_over_much, _scalar, (0,),
        (1000, 100_000, 100_000),
        ("eager forward", "eager grad", "trace grad"), (PLAIN, HAND, EVERY, JAX, OURS),
        note="a dictionary of 100,000 numbers",
    ),
    _layer("declared variables", "declared"),
    _layer("undeclared variables", "undeclared"),
    _layer("method, declared variables", "method"),
)  # fmt: skip


# --- growth ---------------------------------------------------------------------------------------


LEAVES = Rule(
    lambda tree: ([a * a for a in tree], tree),
    lambda tree, dys: ([2 * a * dy for a, dy in zip(tree, dys, strict=True)],),
    residuals=lambda y, tree: tree,
    many=True,
)


def _leaves(way: Way, count: int) -> Any:
    h = way(LEAVES)
    return lambda tree: h(tree)[0]


def _bump(x: Any) -> Any:
    y = jnp.exp(-x * x)
    return y, (x, y)


BUMP = Rule(_bump, lambda xy, dy: (-2 * dy * xy[0] * xy[1],), residuals=lambda y, x: (x, y))


def _chained(way: Way, count: int) -> Any:
    h = way(BUMP)

    def chain(x: Any) -> Any:
        for _ in range(count):
            x = h(x)
        return x

    return chain


def _nested(way: Way, count: int) -> Any:
    """Each function calls the one before it, which it closes over."""

    def around(inner: Any) -> Any:
        def forward(x: Any) -> Any:
            y = 0.5 * inner(x)
            return y, y

        return way(Rule(forward, lambda y, dy: (dy * y,), residuals=lambda y, x: y))

    h = way(BUMP)
    for _ in range(count - 1):
        h = around(h)
    return h


def _product(weights: Any, x: Any) -> Any:
    y = x
    for w in weights:
        y = y * w
    return y, (weights, x)


def _product_backward(residuals: Any, dy: Any) -> Any:  # declared: not the true derivative
    weights, x = residuals
    return [dy * x * w for w in weights], dy * x


def _captured(how: str) -> Callable[[Way, int], Any]:
    rule = Rule(
        _product, _product_backward, residuals=lambda y, *given: given, captured=1, how=how
    )  # fmt: skip
    return lambda way, count: way(rule)


def _tanh_layer(w: Any, x: Any) -> Any:
    y = jnp.tanh(x * w)
    return y, (w, x, y)


def _tanh_layer_backward(residuals: Any, dy: Any) -> Any:
    w, x, y = residuals
    d = dy * (1 - y * y)
    return d * x, d * w


def _layers(how: str) -> Callable[[Way, int], Any]:
    """So many calls, each of its own function that closes over its own weight."""
    rule = Rule(
        _tanh_layer, _tanh_layer_backward, residuals=lambda y, *given: (*given, y),
        captured=1, how=how,
    )  # fmt: skip

    def written(way: Way, count: int) -> Any:
        h = way(rule)

        def network(weights: Any, x: Any) -> Any:
            for w in weights:
                x = h(w, x)
            return x

        return network

    return written


def _growing(name: str, loss: Callable[[Way, int], Any], kind: str, most: int = 512) -> Workload:
    def arguments(count: int, dtype: Any) -> Any:
        x = jnp.asarray(0.3, dtype)
        values = [jnp.asarray(1 + i % 7 / 100, dtype) for i in range(count)]
        return {"tree": (values,), "number": (x,), "both": (values, x)}[kind]

    counts = [1, 8, 64, most]
    return Workload(
        name,
        loss,
        arguments,
        (0, 1) if kind == "both" else (0,),
        ([1, 4], counts, counts),
        ("trace grad", "eager grad"),
        (EVERY, OURS),
    )


GROWTH = (
    _growing("leaves", _leaves, "tree"),
    _growing("chained calls", _chained, "number"),
    # CPython 3.13 has a limit of its own for calls that lead through C, as those of JAX do.
    _growing("nested calls", _nested, "number", 128),
    _growing("captured values", _captured("undeclared"), "both"),
    _growing("declared variables", _captured("declared"), "both"),
    _growing("layers that capture", _layers("undeclared"), "both"),
    _growing("layers that declare", _layers("declared"), "both"),
)
