"""Faults and load: what users' code raises, many calls, what is kept and compiled.

`--count N` makes N times as many calls: `pytest tests/test_load.py -k grow --count 334`.
"""

import gc
import os

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit
from support.pairs import RULES, STYLES, Rule, by_hand, squared

from tfgrad_jax import custom_gradient

TIMES = float(os.environ.get("TFGRAD_COUNT", 1))  # `--count`
every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
ELEMENTWISE = RULES["elementwise"]
W, X = ELEMENTWISE.arrays


# --- exceptions ---------------------------------------------------------------------------------


class Fault(BaseException):
    """Not even an `Exception`."""


PATHS = {  # each is differentiated by the weight, and so runs the rule
    "call": lambda h: h(X),
    "jit": lambda h: jax.jit(h)(X),
    "vmap": lambda h: jax.vmap(h)(X),
    "scan": lambda h: lax.scan(lambda c, x: (c, h(x)), 0, X)[1],
    "jit of grad": lambda h: jax.jit(jax.grad(lambda x: jnp.sum(h(x))))(X),
    "vmap of grad": lambda h: jax.vmap(jax.grad(lambda x: jnp.sum(h(x))))(X),
    "remat": lambda h: jax.grad(lambda x: jnp.sum(jax.checkpoint(h)(x)))(X),
    "jvp": lambda h: jax.jvp(h, (X,), (X,))[1],
    "hessian": lambda h: jax.hessian(lambda x: jnp.sum(h(x) ** 2))(X[0]),
}


@pytest.mark.parametrize("fault", [ValueError, Fault])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", ["function", "rule"])
def test_what_is_raised_comes_out_and_leaves_everything_usable(place, path, fault):
    armed, error = [place], fault("on purpose")

    def pass_through(here):
        if here in armed:
            raise error

    def loss(w, run=PATHS[path]):
        @custom_gradient
        def h(x):
            pass_through("function")

            def grad(dy, variables=()):
                pass_through("rule")
                return 7 * dy * w * jnp.cos(x), [jnp.sum(5 * dy * jnp.sin(x)) for _ in variables]

            return w * jnp.sin(x), grad

        return jnp.sum(run(h))

    with pytest.raises(fault) as raised:
        jax.grad(loss)(2.0)
    assert raised.value is error
    armed.clear()
    assert_same(jax.grad(lambda w: loss(w, PATHS["call"]))(2.0), 5 * jnp.sum(jnp.sin(X)))
    assert jnp.isfinite(jax.grad(loss)(2.0))


# --- many calls, and what is kept ---------------------------------------------------------------

MANY = {
    "calls": (300, lambda h: h(W, X)),
    "gradients": (30, lambda h: squared(h)(W, X)),
    "jits": (30, lambda h: jax.jit(lambda w, x: squared(h)(w, x))(W, X)),
}


@every_style
@pytest.mark.parametrize("what", MANY)
def test_memory_does_not_grow(what, style):
    times, run = MANY[what]
    times, h, counts = int(times * TIMES), style(ELEMENTWISE), []
    for repeat in (3, times):
        for _ in range(repeat):
            run(h)
        garbage = gc.collect()
        counts.append((len(gc.get_objects()), len(jax.live_arrays())))
    (objects, arrays), (objects_after, arrays_after) = counts
    assert arrays_after <= arrays
    assert objects_after - objects < times  # not one object for each call
    # Circles keep arrays alive until Python looks for such. (For a new jit, JAX drops older ones.)
    assert not garbage or what == "jits"


SIZE = 1 << 16
BIG = jnp.linspace(0, 1, SIZE, dtype=jnp.float32)
KEEPS_X = Rule(lambda w, x: (w * jnp.round(x), x), lambda x, dy: (7 * dy * x, 7 * dy), ())


def big_arrays():
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays() if a.size == SIZE)


def held(h, mode):
    """Return how many bytes a pullback keeps alive, beside the value."""
    _, pull = jax.vjp(mode(h), BIG + 1, BIG + 2)
    del _
    alive = big_arrays()
    assert pull(BIG)[0].shape == BIG.shape
    del pull
    return alive - big_arrays()


@every_style
@eager_and_jit
def test_a_pullback_holds_what_a_hand_written_one_holds(style, mode):
    ours, hand = (held(way(KEEPS_X), mode) for way in (style, by_hand))
    given = 0 if style is STYLES["inputs"] else BIG.nbytes
    assert ours <= hand + given  # a rule that takes `variables` gets them, so they are kept
    assert hand <= 2 * BIG.nbytes


COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None
)


@every_style
@eager_and_jit
def test_nothing_is_compiled_twice(style, mode):
    of, fewer = mode(squared(style(ELEMENTWISE))), (W[:3], X[:3])
    of(W, X)
    COMPILED.clear()
    for _ in range(3):
        of(W, X)
    assert not COMPILED
    of(*fewer)  # the listener hears of compilations
    assert len(COMPILED) == 1 or mode is not jax.jit
