"""What a decorated function closes over: holders x protocols x ways.

All have the value `w x`, whose declared derivatives are wrong: `7 w` by `x`, and by `w` it is `5 x`
by a rule or `x` by "autodiff". Right numbers prove whose gradient was taken.
"""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import pytest
from holders import COMPUTED, HOLD, OUTSIDE
from support.helpers import assert_same, eager_and_jit, product, sample
from support.ways import BRIEF, DECLARED, ORDINARY, WAYS, assert_derivative, hand_written, squared

from tfgrad_jax import custom_gradient

NUMBERS = 3.0, 2.0  # w, x
ARGS = W, X = jnp.float32(3), jnp.float32(2)
OF_THE_RULE = hand_written(lambda w, x: 3 * x + 0 * w, lambda w, x: 0 * w, lambda w, x: 7 * w)
# `f` does not read what these rules read, on purpose: so its gradient is 0, with a warning.
RULE_ALONE = pytest.mark.filterwarnings("ignore:.*which only its")


def input_and_rule(get, w):
    """The rule reads the weight from its holder; the gradient is an input's."""
    f = custom_gradient(lambda x, w: (w * x, lambda dy: (7 * dy * get(), 5 * dy * x)))
    return lambda x: f(x, w)


PROTOCOLS = {  # (get, w) -> a function of x; and its oracle
    "undeclared": (lambda get, w: product(get), DECLARED),
    "declared": (lambda get, w: product(get, variables={"w": [w]}), DECLARED),
    "autodiff": (lambda get, w: product(get, variables="autodiff"), ORDINARY),
    "input and rule": (input_and_rule, DECLARED),
    "residual": (
        lambda get, w: custom_gradient(lambda x: (3 * x, lambda dy: 7 * dy * get())),
        OF_THE_RULE,
    ),
}


def fits(holder, name, way):
    if holder in COMPUTED and name not in ("autodiff", "input and rule", "residual"):
        return False
    # JAX's own: a Ref of a value that is not mapped cannot be mapped.
    return holder != "ref" or not any(w in way for w in ("jac", "hessian", "vmap"))


def staged(holder):
    """Return a context: from a global, JAX itself may refuse a weight in what it traces."""
    lost = TypeError, ValueError, jax.errors.UnexpectedTracerError
    return contextlib.suppress(*lost) if holder in OUTSIDE else contextlib.nullcontext()


EVERY = [t for t in itertools.product(HOLD, PROTOCOLS, WAYS) if fits(*t)]
SOME = "cell", "object", "jitted function", "default by name", "property over a registry"
CORE = [
    *itertools.product(HOLD, ["undeclared"], ["grad", "jit(grad)", "jacrev of jacrev", "hessian"]),
    *itertools.product(SOME, PROTOCOLS, ["grad", "jit(grad)"]),
    *itertools.product(["cell"], PROTOCOLS, BRIEF),
    *itertools.product(COMPUTED, ["autodiff", "input and rule", "residual"], ["grad"]),
]
CORE = [t for t in dict.fromkeys(CORE) if fits(*t)]


@RULE_ALONE
@pytest.mark.parametrize(("holder", "name", "way"), sample(EVERY, 60, CORE))
def test_a_weight_is_found_wherever_it_is_held(holder, name, way):
    make, oracle = PROTOCOLS[name]
    loss = squared(lambda w, x: make(HOLD[holder](w), w)(x))
    # Eagerly with Python numbers, of which none is lost.
    with staged(holder) if way != "grad" else contextlib.nullcontext():
        assert_derivative(WAYS[way], loss, squared(oracle), *(NUMBERS if way == "grad" else ARGS))


@pytest.mark.parametrize("holder", HOLD)
def test_a_lost_weight_is_an_error(holder):
    """A rule without `variables`: nobody has the gradient of the weight."""

    def loss(w, x):
        get = HOLD[holder](w)
        return custom_gradient(lambda x: (get() * x, lambda dy: 7 * dy * get()))(x)

    for around in (lambda f: f, jax.jit):
        with pytest.raises(TypeError, match=r"closes over[^$]*(float32|int32)\["):
            around(jax.grad(loss))(*ARGS)
        assert_same(around(jax.grad(loss, 1))(*ARGS), 7 * W)


# --- declarations ---------------------------------------------------------------------------------


@eager_and_jit
def test_a_declared_weight_that_f_ignores_gets_what_the_rule_says(mode):
    def loss(w, x, unused):
        others = {"activation": jnp.sin, "n": 3, "name": "layer"}

        @custom_gradient(variables={"w": w, "unused": unused, **others})
        def f(x):
            def grad(dy, variables):
                assert variables["activation"] is jnp.sin and variables["n"] == 3
                return 7 * dy * w, {**variables, "w": 5 * dy * x, "unused": 11 * dy}

            return w * x, grad

        return f(x)

    got = mode(jax.grad(loss, (0, 1, 2)))(*NUMBERS, 1.0)
    assert_same(got, (5 * X, 7 * W, jnp.float32(11)))
    assert_same(mode(jax.grad(loss, 2))(*NUMBERS, 1.0), jnp.float32(11))  # `y` is a plain number


@pytest.mark.parametrize("none", [[None, None], (None, None), None], ids=str)
def test_none_is_no_gradient_for_one_variable_or_for_all(none):
    def loss(w, b, x):
        f = custom_gradient(lambda x: (w * x + b, lambda dy, variables: (7 * dy * w, none)))
        return f(x) + 11 * b

    assert_same(jax.grad(loss, (0, 1, 2))(W, W, X), (0 * W, jnp.float32(11), 7 * W))
