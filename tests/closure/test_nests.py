"""Decorated functions that call others and share weights with them, at second order.

The losses are squares: a second derivative that is linear in `y` does not ask whether the rule of
an inner function is still there. Each nest stands beside its oracle: the same function with the
weights passed as arguments, its derivatives declared by `jax.custom_jvp`.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, sample
from support.ways import gradient, hand_written, hessian, jvp, nested_gradient, squared

from tfgrad_jax import custom_gradient

ARGS = jnp.float32(1.3), jnp.float32(0.7)  # w, x

# Inner functions: `w x`, declared `3 w` by `x` and `5 x` by `w`, and `round(w)`, declared 1.
INNER = hand_written(lambda w, x: w * x, lambda w, x: 5 * x, lambda w, x: 3 * w)
ROUND = hand_written(lambda w: jnp.round(w), lambda w: 1.0 + 0 * w)
rounded = custom_gradient(lambda w: (jnp.round(w), lambda dy: dy))


def simple_inner(w, **options):
    @custom_gradient(**options)
    def inner(x):
        def grad(dy, variables=()):
            return (3 * dy * w, [5 * dy * x for _ in variables]) if len(variables) else 3 * dy * w

        return w * x, grad

    return inner


def outer_of(w, call, **options):
    """Return `w s` of `s = call(x)`, declared `7 s` by what `s` depends on and `11 s` by `w`."""

    @custom_gradient(**options)
    def outer(x):
        s = call(x)

        def grad(dy, variables=()):
            dx = 7 * dy * s
            return (dx, [11 * dy * s for _ in variables]) if len(variables) else dx

        return s * w, grad

    return outer


def outer_oracle(s_of):
    """Of the same: the outer rule declares all that there is by `w` and by `x`."""
    return hand_written(
        lambda w, x: w * s_of(w, x), lambda w, x: 11 * s_of(w, x), lambda w, x: 7 * s_of(w, x)
    )


AROUND = {
    "directly": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: lax.cond(x > 0, f, lambda x: x, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
    "grad": lambda f: lambda x: jax.grad(f)(x) * x / 3,  # again `w x`
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x / 3,))[1],
}
SECOND_OF_INNER = {  # `3 w x / 3`: an ordinary residual of the rule of the inner function
    "grad": lambda w, x: w * x,
    "jvp": lambda w, x: w * x,
}
NESTS = {
    f"called by {name}": (
        lambda w, x, around=around: outer_of(w, around(simple_inner(w)))(x),
        outer_oracle(SECOND_OF_INNER.get(name, INNER)),
    )
    for name, around in AROUND.items()
}


def nest(oracle):
    def register(f):
        NESTS[f.__name__.replace("_", " ")] = f, oracle
        return f

    return register


@nest(outer_oracle(INNER))
def both_declared(w, x):
    inner = simple_inner(w, variables=[w])
    return outer_of(w, inner, variables=[w])(x)


@nest(outer_oracle(INNER))
def the_inner_one_declared(w, x):
    return outer_of(w, simple_inner(w, variables=[w]))(x)


@nest(hand_written(
    lambda w, x: w * INNER(w, x),
    lambda w, x: INNER(w, x) + w * 5 * x,
    lambda w, x: 7 * INNER(w, x),
))  # fmt: skip
def autodiff_of_the_outer_one(w, x):
    inner = simple_inner(w)

    @custom_gradient(variables="autodiff")
    def outer(x):
        s = inner(x)
        return s * w, lambda dy: 7 * dy * s

    return outer(x)


@nest(outer_oracle(lambda w, x: INNER(w, INNER(w, x))))
def three_levels(w, x):
    inner = simple_inner(w)
    return outer_of(w, lambda x: inner(inner(x)))(x)


@nest(outer_oracle(INNER))
def a_weight_is_an_input_of_the_inner_one(w, x):
    inner = custom_gradient(lambda w, x: (w * x, lambda dy: (5 * dy * x, 3 * dy * w)))
    return outer_of(w, lambda x: inner(w, x))(x)


@nest(outer_oracle(lambda w, x: ROUND(w) * x))
def a_function_of_the_weight_alone(w, x):
    return outer_of(w, lambda x: rounded(w) * x)(x)


@nest(hand_written(
    lambda w, x: ROUND(w) * x, lambda w, x: 5 * x, lambda w, x: 7 * ROUND(w)
))  # fmt: skip
def a_layer_that_rounds_its_weight(w, x):
    class Layer:
        def __init__(self, w):
            self.w = w

        @custom_gradient
        def __call__(self, x):
            k = rounded(self.w)

            def grad(dy, variables=()):
                dx = 7 * dy * k
                return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

            return k * x, grad

    return Layer(w)(x)


@nest(hand_written(
    lambda w, x: ROUND(w) * x, lambda w, x: 5 * x, lambda w, x: 7 * ROUND(w)
))  # fmt: skip
def a_declared_layer_that_rounds_its_weight(w, x):
    class Layer:
        def __init__(self, w):
            self.w = w

        @custom_gradient(variables=lambda self: self.w)
        def __call__(self, x):
            k = rounded(self.w)
            return k * x, lambda dy, variables: (7 * dy * k, 5 * dy * x)

    return Layer(w)(x)


@nest(outer_oracle(INNER))
def layers_of_a_model_that_share_a_weight(w, x):
    class Sub:
        def __init__(self, w):
            self.w = w

        @custom_gradient
        def __call__(self, x):
            def grad(dy, variables=()):
                dx = 3 * dy * self.w
                return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

            return self.w * x, grad

    class Model(Sub):
        def __init__(self, w):
            super().__init__(w)
            self.sub = Sub(w)

        @custom_gradient
        def __call__(self, x):
            s = self.sub(x)

            def grad(dy, variables=()):
                dx = 7 * dy * s
                return (dx, [11 * dy * s for _ in variables]) if len(variables) else dx

            return self.w * s, grad

    return Model(w)(x)


@nest(lambda w, x: INNER(w, INNER(w, INNER(w, x))))
def one_layer_in_a_loop(w, x):
    inner = simple_inner(w)
    for _ in range(3):
        x = inner(x)
    return x


@nest(hand_written(
    lambda w, x: w * x, lambda w, x: 11 * INNER(w, x), lambda w, x: 7 * INNER(w, x)
))  # fmt: skip
def called_by_the_rule_alone(w, x):
    inner = simple_inner(w)

    @custom_gradient
    def outer(x):
        def grad(dy, variables=()):
            s = inner(x)
            return (7 * dy * s, [11 * dy * s for _ in variables]) if len(variables) else 7 * dy * s

        return w * x, grad

    return outer(x)


@nest(lambda w, x: w - 0.1 * 2 * INNER(w, x) * 5 * x)
def a_step_of_gradient_descent(w, x):
    """As meta-learning takes one inside of its loss."""
    return w - 0.1 * jax.grad(lambda w: simple_inner(w)(x) ** 2)(w)


@nest(lambda w, x: INNER(w, x) + (3 * w) ** 2)
def a_gradient_penalty(w, x):
    inner = simple_inner(w)
    return inner(x) + jax.grad(inner)(x) ** 2


# --- orders ---------------------------------------------------------------------------------------


def hvp(loss):
    """Forward over reverse."""
    return lambda *args: jax.jvp(gradient(loss), args, (jnp.float32(0.5), jnp.float32(-2)))[1]


def reverse_over_forward(loss):
    pushed = lambda *args: jax.jvp(loss, args, (jnp.float32(0.5), jnp.float32(-2)))[1]  # noqa: E731
    return gradient(pushed)


def twice_forward(loss):
    of = lambda *args: jax.jvp(loss, args, (jnp.float32(0.5), jnp.float32(-2)))[1]  # noqa: E731
    return lambda *args: jax.jvp(of, args, (jnp.float32(3), jnp.float32(1)))[1]


def penalty(loss):
    return gradient(lambda *args: sum(g**2 for g in gradient(loss)(*args)))


ORDERS = {
    "grad": gradient,
    "jvp": jvp,
    "grad of grad": nested_gradient,
    "hessian": hessian,
    "jvp of grad": hvp,
    "grad of jvp": reverse_over_forward,
    "jvp of jvp": twice_forward,
    "penalty": penalty,
    "jit(jvp of grad)": lambda loss: jax.jit(hvp(loss)),
    "jvp of grad(jit)": lambda loss: hvp(jax.jit(loss)),
    "vmap(grad of grad)": lambda loss: (
        lambda *args: jax.tree.map(
            lambda g: g[0], jax.vmap(nested_gradient(loss))(*(a[None] for a in args))
        )
    ),
    "grad(scan(jit(grad)))": lambda loss: gradient(
        lambda *args: sum(
            lax.map(lambda a: jax.jit(gradient(loss))(*a), tuple(a[None] for a in args))
        )[0]
    ),
    "grad(checkpoint(grad))": lambda loss: gradient(
        lambda *args: sum(jax.checkpoint(gradient(loss))(*args)) ** 2
    ),
}
FIRST_AID = "jvp of grad", "grad of jvp", "penalty"


@pytest.mark.parametrize("order", FIRST_AID)
@pytest.mark.parametrize("name", NESTS)
def test_a_nest_has_its_declared_derivatives(name, order):
    f, oracle = NESTS[name]
    assert_same(f(*ARGS), oracle(*ARGS))
    assert_same(ORDERS[order](squared(f))(*ARGS), ORDERS[order](squared(oracle))(*ARGS), rtol=1e-4)


OTHERS = [pair for pair in itertools.product(NESTS, ORDERS) if pair[1] not in FIRST_AID]


@pytest.mark.parametrize(("name", "order"), sample(OTHERS, 40))
def test_a_sample_of_nests_and_orders(name, order):
    f, oracle = NESTS[name]
    assert_same(ORDERS[order](squared(f))(*ARGS), ORDERS[order](squared(oracle))(*ARGS), rtol=1e-4)
