"""Functions that do almost nothing: what the decorator itself costs, and how that grows.

`OVERHEAD`, `GROWTH` and `NESTS` are workloads, which `workload.measure` measures. Where ours closes
over values, the others, which cannot, are given them as arguments.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ways import EVERY, JVP, OURS, PEERS, Function, Rule, Way
from benchmarks.workload import Workload, normal, of
from tfgrad_jax import custom_gradient

MEASURES = "trace grad", "eager grad"
LEVELS = 5, 20  # of nests, few and many
HIGHER = ("trace second order", "trace jvp", "trace hessian", "eager jvp")


# --- log1pexp: inputs only ------------------------------------------------------------------------


def _log1pexp(x: Any) -> Any:
    e = jnp.exp(x)
    return jnp.log(1 + e), e


def _log1pexp_push(primals: Any, tangents: Any) -> Any:
    y, e = _log1pexp(*primals)
    return y, tangents[0] * (1 - 1 / (1 + e))


def _log1pexp_pair(x: Any) -> Any:
    e = jnp.exp(x)
    return jnp.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


LOG1PEXP = Rule(
    _log1pexp,
    lambda e, dy: (dy * (1 - 1 / (1 + e)),),
    residuals=lambda y, x: jnp.exp(x),
    push=_log1pexp_push,
    written=custom_gradient(_log1pexp_pair),
)


# --- a linear layer under logsumexp: weights ------------------------------------------------------


def _head(w: Any, x: Any) -> Any:
    logits = x @ w
    y = jax.nn.logsumexp(logits)
    return y, (w, x, logits, y)


def _head_backward(residuals: Any, dy: Any) -> Any:
    w, x, logits, y = residuals
    p = dy * jnp.exp(logits - y)
    return x[:, None] * p, w @ p


HEAD = Rule(_head, _head_backward, residuals=lambda y, w, x: (w, x, x @ w, y), captured=1)


def _spread(h: Function) -> Function:
    return lambda params: h(*params)


def _scalar(size: Any, dtype: Any) -> Any:
    return (jnp.asarray(0.3, dtype),)


def _weights(size: Any, dtype: Any) -> Any:
    return ((normal(0, (8, 8), dtype), normal(1, (8,), dtype)),)


def _overhead(
    name: str, loss: Any, arguments: Function, higher: Any = (), ways: Any = PEERS
) -> Any:
    measures = ("eager forward", "eager grad", "run grad", "trace grad", *higher)
    return Workload(name, loss, arguments, (None,) * 3, measures, ways, section="overhead")


OVERHEAD = (
    _overhead("inputs only", of(LOG1PEXP), _scalar, HIGHER, (*PEERS, JVP)),
    _overhead("declared variables", of(HEAD, _spread), _weights),
    _overhead("undeclared variables", of(HEAD, _spread, how="undeclared"), _weights),
)


# --- growth: a loss is a function of a number, or of so many numbers and one ----------------------


def _product(weights: Any, x: Any) -> Any:
    return functools.reduce(operator.mul, weights, x), (weights, x)


def _product_backward(residuals: Any, dy: Any) -> Any:  # declared: not the true derivative
    weights, x = residuals
    return [dy * x * w for w in weights], dy * x


def _bump(x: Any) -> Any:
    y = jnp.exp(-x * x)
    return y, (x, y)


LEAVES = Rule(
    lambda tree: ([a * a for a in tree], tree),
    lambda tree, dys: ([2 * a * dy for a, dy in zip(tree, dys, strict=True)],),
    residuals=lambda y, tree: tree,
)
BUMP = Rule(_bump, lambda xy, dy: (-2 * dy * xy[0] * xy[1],), residuals=lambda y, x: (x, y))
PRODUCT = Rule(_product, _product_backward, residuals=lambda y, *given: given, captured=1)


def _chained(way: Way, count: int) -> Function:
    h = way(BUMP)
    return lambda x: functools.reduce(lambda x, _: h(x), range(count), x)


def _nested(way: Way, count: int, weights: int = 0) -> Function:
    """Each function calls the one before it, which it closes over, and maybe a weight."""

    def around(inner: Function) -> Function:
        def forward(*args: Any) -> Any:
            y = args[0] * inner(*args)
            return y, (*args, y)

        def backward(residuals: Any, dy: Any) -> Any:  # declared: not the true derivative
            return tuple(dy * residuals[-1] for _ in residuals[1:])

        residuals = lambda y, *args: (*args, y)  # noqa: E731
        return way(Rule(forward, backward, residuals, captured=weights, how="undeclared"))

    return functools.reduce(lambda h, _: around(h), range(count), lambda *args: jnp.exp(-args[-1]))


def _jitted(loss: Any) -> Any:
    """Return a loss under a `jit` that is new at each call: nothing is cached."""
    return lambda way, size: lambda *args: jax.jit(lambda *given: loss(way, size)(*given))(*args)


def _numbers(count: int, dtype: Any) -> Any:
    return ([jnp.asarray(1 + i % 7 / 100, dtype) for i in range(count)],)


def _both(count: int, dtype: Any) -> Any:
    return ((*_numbers(count, dtype), *_scalar(count, dtype)),)


def _two(count: int, dtype: Any) -> Any:
    return ((*_scalar(count, dtype), *_scalar(count, dtype)),)


def _growing(
    name: str, loss: Any, arguments: Function, few: int = 64, many: int = 512, how: Any = MEASURES
) -> Workload:
    sizes = [1, 4], [few, many], [few, many]
    return Workload(name, loss, arguments, sizes, how, (EVERY, OURS), section="growth")


GROWTH = (
    _growing("leaves", of(LEAVES, lambda h: lambda tree: h(tree)[0]), _numbers),
    _growing("chained calls", _chained, _scalar),
    # CPython 3.13 has a limit of its own for calls that lead through C, as those of JAX do.
    _growing("nested calls", _nested, _scalar, 8, 64),
    _growing("declared variables", of(PRODUCT, _spread), _both),
)
_nest = lambda way, size: _spread(_nested(way, size, 1))  # noqa: E731
NESTS = (
    _growing("nest with weights", _nest, _two, *LEVELS),
    _growing("nest with weights under jit", _jitted(_nest), _two, *LEVELS, MEASURES[:1]),
)
