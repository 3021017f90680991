"""A linear rule has both modes at every order; any other reverse mode, and an error that says why.

For an input `x` the declared gradient is `7 rule(dy) x`, whatever the value is. The oracles are
written for JAX's own decorators: a `custom_jvp` that multiplies by the matrix of the rule, and a
`custom_vjp` that runs the rule.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, differentiated, sample, total
from jax import lax
from rules import FIRST_ORDER_ALONE, LINEAR, NOT_LINEAR, ZEROS, N, X

from tfgrad_jax import custom_gradient


def leaves_of(rule):
    return lambda dy: jax.tree.leaves(rule(dy))


def inputs(rule):
    """Return one input for each gradient, and tangents for them."""
    random = np.random.default_rng(1)
    shapes = [(g.shape, g.dtype) for g in jax.eval_shape(leaves_of(rule), X)]
    return [tuple(jnp.asarray(random.uniform(0.5, 1.5, s), d) for s, d in shapes) for _ in "xt"]


def value_at(xs):
    """Return a value that is `X` at `xs`; its own derivative is none of those declared."""
    there = total(xs)
    return lambda *xs: X + 3 * (total(xs) - there)


def decorated(rule, xs):
    value = value_at(xs)

    @custom_gradient
    def declared_here(*xs):
        def grad(dy):
            return [x * g for x, g in zip(xs, leaves_of(rule)(7 * dy), strict=True)]

        return value(*xs), grad

    return declared_here


def by_matrix(rule, xs):
    """Return the same with both modes, by the rule's columns: it must be linear."""
    columns = [leaves_of(rule)(unit) for unit in jnp.eye(N)]
    matrices = [jnp.stack([c.ravel() for c in several]) for several in zip(*columns, strict=True)]
    h = jax.custom_jvp(value_at(xs))

    def push(xs, ts):
        moved = zip(matrices, xs, ts, strict=True)
        return h(*xs), sum((7 * m @ (x * t).ravel() for m, x, t in moved), ZEROS)

    h.defjvp(push)
    return h


def by_running(rule, xs):
    """Return the same for reverse mode: the forward pass of the rule calls the function."""
    attached = jax.custom_vjp(lambda y, *xs: y)

    def backward(xs, dy):
        gradients = leaves_of(rule)(7 * dy)
        return jnp.zeros_like(dy), *(x * g for x, g in zip(xs, gradients, strict=True))

    attached.defvjp(lambda y, *xs: (attached(y, *xs), xs), backward)
    return lambda *xs: attached(lax.stop_gradient(value_at(xs)(*xs)), *xs)


def loss(h):
    return lambda *xs: jnp.sum(jnp.sin(h(*xs)) * jnp.arange(1.0, N + 1))


def pushed(f, xs, ts):
    return jax.jvp(f, xs, ts)[1]


FORWARD = {
    "jvp": pushed,
    "linearize": lambda h, xs, ts: jax.linearize(h, *xs)[1](*ts),
    "transposed linearize": lambda h, xs, ts: jax.linear_transpose(jax.linearize(h, *xs)[1], *xs)(
        X
    ),
    "jvp of jit": lambda h, xs, ts: pushed(jax.jit(h), xs, ts),
    "jvp of scan": lambda h, xs, ts: pushed(
        lambda *xs: lax.scan(lambda c, _: (c + loss(h)(*xs), None), 0.0, None, length=2)[0], xs, ts
    ),
    "vmap over tangents": lambda h, xs, ts: jax.vmap(
        lambda s: pushed(h, xs, tuple(s * t for t in ts))
    )(jnp.float32([1, -2])),
    "jvp of grad": lambda h, xs, ts: pushed(differentiated(loss(h), len(xs), 1), xs, ts),
    "jvp of jvp": lambda h, xs, ts: pushed(lambda *xs: pushed(loss(h), xs, ts), xs, ts),
    "jvp of jvp along x itself": lambda h, xs, ts: pushed(
        lambda *xs: pushed(loss(h), xs, tuple(jnp.sin(x) for x in xs)), xs, ts
    ),
    "grad of jvp": lambda h, xs, ts: differentiated(
        lambda *xs: pushed(loss(h), xs, ts), len(xs), 1
    )(*xs),
    "jvp of grad of grad": lambda h, xs, ts: pushed(differentiated(loss(h), len(xs), 2), xs, ts),
}
REVERSE = {
    order: lambda h, xs, ts, order=order: differentiated(loss(h), len(xs), order)(*xs)
    for order in (1, 2, 3)
} | {"vmap of grad": lambda h, xs, ts: jax.vmap(differentiated(loss(h), len(xs), 1))(*_two(xs))}
MODES = {
    "eager": lambda way, h, xs, ts: way(h, xs, ts),
    "jit": lambda way, h, xs, ts: jax.jit(lambda xs, ts: way(h, xs, ts))(xs, ts),
    "jit of constants": lambda way, h, xs, ts: jax.jit(lambda: way(h, xs, ts))(),
}
UNMAPPED = {"linear_call", "ragged dot"}  # JAX has no `vmap` of these


def _two(xs):
    return [jnp.stack([x, x]) for x in xs]


def agree(got, expected, name=""):
    rtol = 2e-2 if "precision" in name else 1e-3
    assert_same(got, expected, rtol=rtol, atol=2 * rtol)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("name", LINEAR)
def test_forward_mode_applies_the_transpose(name):
    """Eagerly, compiled, and compiled where all operands are constants."""
    rule = LINEAR[name]
    xs, ts = inputs(rule)
    h = decorated(rule, xs)
    expected = pushed(by_matrix(rule, xs), xs, ts)
    for mode in MODES.values():
        agree(mode(FORWARD["jvp"], h, xs, ts), expected, name)
    gradients = leaves_of(rule)(7 * X)
    assert_same(jax.vjp(h, *xs)[1](X), tuple(x * g for x, g in zip(xs, gradients, strict=True)))


ORDERS = FORWARD | REVERSE
EVERY = [
    (name, way, mode)
    for name in LINEAR
    for way in ORDERS
    for mode in MODES
    if name not in UNMAPPED or "vmap" not in str(way)
]
CORE = [(n, w, "jit") for n in ("dot", "roll in scan", "cond", "split") for w in ORDERS]


@pytest.mark.parametrize(("name", "way", "mode"), [*CORE, *sample(EVERY, 15)])
def test_a_linear_rule_is_the_derivative_at_every_order_in_both_modes(name, way, mode):
    rule = LINEAR[name]
    xs, ts = inputs(rule)
    run = MODES[mode]
    expected = run(ORDERS[way], by_matrix(rule, xs), xs, ts)
    agree(run(ORDERS[way], decorated(rule, xs), xs, ts), expected, name)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_reverse_mode_runs_any_rule_at_every_order(name):
    rule, _ = NOT_LINEAR[name]
    xs, ts = inputs(rule)
    for order in (1, 2, 3) if name not in FIRST_ORDER_ALONE else (1,):
        expected = REVERSE[order](by_running(rule, xs), xs, ts)
        agree(REVERSE[order](decorated(rule, xs), xs, ts), expected)
    if name != "callback":
        for way in (1, "vmap of grad"):
            expected = jax.jit(lambda way=way: REVERSE[way](by_running(rule, xs), xs, ts))()
            agree(jax.jit(lambda way=way: REVERSE[way](decorated(rule, xs), xs, ts))(), expected)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_forward_mode_names_the_operation(name):
    rule, operation = NOT_LINEAR[name]
    xs, ts = inputs(rule)
    with pytest.raises(TypeError, match=operation) as caught:
        pushed(decorated(rule, xs), xs, ts)
    message = str(caught.value)
    assert "declared_here" in message and "test_rules.py" in message  # whose rule
    assert "is not linear in its upstream gradients" in message
    assert "reverse mode" in message and "jax.grad" in message  # the way out


EVERY_REFUSAL = [(n, w, m) for n in NOT_LINEAR for w in FORWARD for m in MODES]
CORE_REFUSAL = [("clip", w, m) for w in FORWARD for m in MODES]


@pytest.mark.parametrize(("name", "way", "mode"), [*CORE_REFUSAL, *sample(EVERY_REFUSAL, 20)])
def test_refused_wherever_forward_mode_is_evaluated(name, way, mode):
    rule, _ = NOT_LINEAR[name]
    xs, ts = inputs(rule)
    if way == "transposed linearize":  # which is reverse mode
        way = "linearize"
    with pytest.raises(TypeError, match="is not linear in its upstream"):
        MODES[mode](FORWARD[way], decorated(rule, xs), xs, ts)
