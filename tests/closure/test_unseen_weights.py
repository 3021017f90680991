"""A weight to which no closure leads, such as a global: right or an error, never zero.

Places x protocols x stages around the loss that stores the weight x stages around the call.
"""

import contextlib
import contextvars
import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from protocols import ARGS, DECLARED, ORDINARY, WAYS, squared
from support.helpers import assert_same, sample
from support.ways import SECOND, gradient, hessian

from tfgrad_jax import custom_gradient

W: Any = None
TABLE: dict[str, Any] = {}
LOCAL = threading.local()
CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("w")


def put_in_a_variable(w):
    global W
    W = w


# How the weight is stored, and read.
PLACES = {
    "variable": (put_in_a_variable, lambda: W),
    "dict": (lambda w: TABLE.update(w=w), lambda: TABLE["w"]),
    "thread": (lambda w: setattr(LOCAL, "w", w), lambda: LOCAL.w),
    "context": (CONTEXT.set, CONTEXT.get),
}


def weighted(get, takes_variables, **options):
    @custom_gradient(**options)
    def f(x):
        kept = get()
        rule = lambda dy: 7 * dy * kept * x  # noqa: E731
        more = lambda dy, variables: (rule(dy), [5 * dy * x**2])  # noqa: E731
        return kept * x**2, more if takes_variables else rule

    return f


PROTOCOLS = {
    "undeclared": (lambda get: weighted(get, True), DECLARED),
    "lost": (lambda get: weighted(get, False), None),  # an error, or the gradient of `x` alone
    "autodiff": (lambda get: weighted(get, False, variables="autodiff"), ORDINARY),
    "declared": (lambda get: weighted(get, True, variables=lambda: [get()]), DECLARED),
}
STAGES = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "cond": lambda f: lambda *a: lax.cond(True, f, lambda *_: jnp.float32(0), *a),
    "checkpoint": jax.checkpoint,
    "checkpoint of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "scan": lambda f: lambda *a: lax.map(lambda x: f(*x), jax.tree.map(lambda b: b[None], a))[0],
    "vmap": lambda f: lambda *a: jax.vmap(f)(*(x[None] for x in a))[0],
    "while": lambda f: lambda *a: lax.fori_loop(0, 1, lambda _, c: c + f(*a), 0.0),
}


def loss_of(place, protocol, outer, inner):
    """Return the loss: the weight is stored between the two stages."""
    put, get = PLACES[place]
    f = PROTOCOLS[protocol][0](get)

    def stored(w, x):
        put(w)
        return STAGES[inner](f)(x)

    return STAGES[outer](stored)


EVERY = itertools.product(PLACES, PROTOCOLS, STAGES, STAGES, WAYS)
CORE = itertools.product(["variable"], PROTOCOLS, ["jit"], STAGES, ["jit(grad)", "jvp"])


def check(place, protocol, outer, inner, way):
    """Return whether it is right, where an error of JAX or of ours is as good."""
    h, oracle = loss_of(place, protocol, outer, inner), PROTOCOLS[protocol][1]
    try:
        got = WAYS[way](squared(h) if oracle else h)(*ARGS)
    except (TypeError, ValueError, NotImplementedError, jax.errors.UnexpectedTracerError):
        return False
    assert oracle, f"no rule has the gradient of the weight, and it is {got}"
    assert_same(got, (hessian if way in SECOND else gradient)(squared(oracle))(*ARGS))
    return True


@pytest.mark.parametrize(("place", "protocol", "outer", "inner", "way"), sample(EVERY, 30, CORE))
def test_any_unseen_weight_is_right_or_an_error(place, protocol, outer, inner, way):
    check(place, protocol, outer, inner, way)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["grad", "jvp", "hessian"])
def test_eagerly_an_unseen_weight_has_its_gradient(place, way):
    for protocol in ("undeclared", "autodiff", "declared"):
        assert check(place, protocol, "nothing", "nothing", way), protocol


@pytest.mark.parametrize(
    ("protocol", "right"), [("undeclared", 20), ("lost", None), ("autodiff", 4)]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: jax.jit(jax.value_and_grad(f))(x)[0],
        lambda f, x: f(x),
    ],
    ids=["beside a staged gradient", "alone"],
)
def test_a_global_weight_in_the_value_of_a_constant_is_never_lost(call, protocol, right):
    def loss(w):
        put_in_a_variable(w)
        f = PROTOCOLS[protocol][0](PLACES["variable"][1])
        return call(f, jnp.float32(2))

    with contextlib.suppress(TypeError, jax.errors.UnexpectedTracerError):
        assert jax.grad(loss)(3.0) == right
