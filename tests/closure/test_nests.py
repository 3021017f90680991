"""Decorated functions that call others and share weights with them, at second order.

The losses are squares: a second derivative that is linear in `y` does not ask whether the rule of
an inner function is still there. Each nest stands beside its oracle: the same function with the
weights passed as arguments, its derivatives declared by `jax.custom_jvp`.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from support.helpers import assert_same, product, sample
from support.ways import AROUND, DECLARED, WAYS, gradient, hand_written, squared

from tfgrad_jax import custom_gradient

ARGS = jnp.float32(1.3), jnp.float32(0.7)  # w, x
V = jnp.float32(0.5), jnp.float32(-2)  # a direction

# `product(w)` is `w x`, declared `7 w` by `x` and `5 x` by `w`; `rounded` is declared 1.
ROUND = hand_written(lambda w: jnp.round(w), lambda w: 1.0 + 0 * w)
LAYER = hand_written(lambda w, x: ROUND(w) * x, lambda w, x: 5 * x, lambda w, x: 7 * ROUND(w))
rounded = custom_gradient(lambda w: (jnp.round(w), lambda dy: dy))


def around(w, call, **options):
    """Return `w s` of `s = call(x)`, declared `11 s` by `x` and `13 s` by each variable."""

    @custom_gradient(**options)
    def outer(x):
        s = call(x)

        def rule(dy, variables=()):
            both = 11 * dy * s, [13 * dy * s for _ in variables]
            return both if len(variables) else both[0]

        return s * w, rule

    return outer


def oracle_around(s, by_w=None):
    return hand_written(
        lambda w, x: w * s(w, x), by_w or (lambda w, x: 13 * s(w, x)), lambda w, x: 11 * s(w, x)
    )


NESTS = {
    f"called in {name}": (
        lambda w, x, stage=stage: around(w, stage(product(w)))(x),
        oracle_around(DECLARED),
    )
    for name, stage in {"its body": lambda f: f, **AROUND}.items()
}


def nest(oracle):
    def register(f):
        NESTS[f.__name__.replace("_", " ")] = f, oracle
        return f

    return register


@nest(oracle_around(lambda w, x: 7 * w * x))
def a_gradient_of_the_inner_one(w, x):
    return around(w, lambda x: x * jax.grad(product(w))(x))(x)


@nest(oracle_around(DECLARED))
def both_declared(w, x):
    return around(w, product(w, variables=[w]), variables=[w])(x)


@nest(oracle_around(DECLARED, lambda w, x: DECLARED(w, x) + w * 5 * x))
def autodiff_of_the_outer_one(w, x):
    return around(w, product(w), variables="autodiff")(x)


@nest(oracle_around(DECLARED))
def a_weight_is_an_input_of_the_inner_one(w, x):
    inner = custom_gradient(lambda w, x: (w * x, lambda dy: (5 * dy * x, 7 * dy * w)))
    return around(w, lambda x: inner(w, x))(x)


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def rounded(self, x):
        k = rounded(self.w)
        return k * x, lambda dy, variables=(): (7 * dy * k, [5 * dy * x for _ in variables])

    @custom_gradient(variables=lambda self: self.w)
    def declared(self, x):
        k = rounded(self.w)
        return k * x, lambda dy, variables: (7 * dy * k, 5 * dy * x)

    @custom_gradient
    def inner(self, x):
        return product(lambda: self.w).__wrapped__(x)

    @custom_gradient
    def outer(self, x):
        return around(self.w, self.inner).__wrapped__(x)


NESTS |= {
    "a layer that rounds its weight": (lambda w, x: Layer(w).rounded(x), LAYER),
    "a declared layer that rounds its weight": (lambda w, x: Layer(w).declared(x), LAYER),
    "methods that share a weight": (lambda w, x: Layer(w).outer(x), oracle_around(DECLARED)),
}


@nest(DECLARED)
def a_function_that_calls_itself(w, x):  # as the forward rule of a `jax.custom_vjp` may
    rule = lambda x: lambda dy, variables=(): (7 * dy * w, [5 * dy * x for _ in variables])  # noqa: E731
    h = custom_gradient(lambda x: (h(x), rule(x)), primal=lambda x: w * x)
    return h(x)


@nest(lambda w, x: DECLARED(w, DECLARED(w, DECLARED(w, x))))
def one_layer_in_a_loop(w, x):
    layer = product(w)
    for _ in range(3):
        x = layer(x)
    return x


@nest(hand_written(lambda w, x: w * x, lambda w, x: 5 * x, lambda w, x: 7 * w * DECLARED(w, x)))
def called_by_the_rule_alone(w, x):
    inner = product(w)
    return product(w, in_rule=lambda x, dy: inner(x))(x)


@nest(lambda w, x: w - 0.1 * 2 * DECLARED(w, x) * 5 * x)
def a_step_of_gradient_descent(w, x):
    """As meta-learning takes one inside of its loss."""
    return w - 0.1 * jax.grad(lambda w: product(w)(x) ** 2)(w)


@nest(lambda w, x: DECLARED(w, x) + (7 * w) ** 2)
def a_gradient_penalty(w, x):
    return product(w)(x) + jax.grad(product(w))(x) ** 2


# --- orders ---------------------------------------------------------------------------------------


def pushed(f, v=V):
    return lambda *args: jax.jvp(f, args, v)[1]


def penalty(loss):
    return lambda *args: sum(g**2 for g in gradient(loss)(*args))


ORDERS = {way: WAYS[way] for way in ("grad", "jvp", "grad of grad", "hessian", "vmap(hessian)")}
ORDERS |= {
    "jvp of grad": lambda loss: pushed(gradient(loss)),
    "grad of jvp": lambda loss: gradient(pushed(loss)),
    "jvp of jvp": lambda loss: pushed(pushed(loss), V[::-1]),
    "penalty": lambda loss: gradient(penalty(loss)),
    "jit(penalty)": lambda loss: jax.jit(gradient(penalty(loss))),
    "grad(scan(jit(penalty)))": lambda loss: gradient(AROUND["scan"](jax.jit(penalty(loss)))),
    "grad(checkpoint(penalty))": lambda loss: gradient(jax.checkpoint(penalty(loss))),
}
FIRST_AID = itertools.product(NESTS, ["jvp of grad", "grad of jvp", "penalty"])


@pytest.mark.parametrize(("name", "order"), sample(itertools.product(NESTS, ORDERS), 40, FIRST_AID))
def test_a_nest_has_its_declared_derivatives(name, order):
    f, oracle = NESTS[name]
    assert_same(f(*ARGS), oracle(*ARGS))
    assert_same(ORDERS[order](squared(f))(*ARGS), ORDERS[order](squared(oracle))(*ARGS), rtol=1e-4)


def test_a_nest_of_one_code_is_right_at_any_depth():
    @jax.jit(static_argnums=0)  # which keeps what it has traced six deep
    def net(n, w, x):
        rule = lambda dy, variables=(): (7 * dy, [5 * dy for _ in variables])  # noqa: E731
        f = lambda x: w * net(n - 1, w, x)  # noqa: E731
        return custom_gradient(lambda x: (f(x), rule), primal=f)(x) if n else x

    for n in (8, 2):
        assert_same(jax.grad(net, (1, 2))(n, 3.0, 2.0), (jnp.float32(5), jnp.float32(7)))
