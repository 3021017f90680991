"""Undeclared variables: what an operation of `f` takes, once each, in the order of first use.

Only what JAX differentiates is in the list, the closed-over value itself (`v is w`), and the list
is the same in every mode. Each test has a rule that asserts its list, and wrong gradients.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import AROUND, BRIEF, WAYS, assert_derivative, gradient, hand_written, squared

from tfgrad_jax import custom_gradient

# These rules read a value that `f` ignores, on purpose: it has no gradient.
RULE_ALONE = pytest.mark.filterwarnings("ignore:.*which only its")
MESH, WHOLE = jax.make_mesh((1,), ("i",)), jax.P()


def mapped(f):
    return lambda *a: jax.shard_map(f, mesh=MESH, in_specs=WHOLE, out_specs=WHOLE)(*a)


# --- order: `z` is used before `a`, and `k` by the rule alone; all have one shape -----------------

ARRAYS = tuple(map(jnp.float32, (3.0, 2.0, 0.5, 1.5)))  # z, a, k, x
ORACLE = squared(
    hand_written(
        lambda z, a, k, x: z * x + a * x**2 + 0 * k,
        lambda z, a, k, x: 5 * x,
        lambda z, a, k, x: 11 * x**2,
        lambda z, a, k, x: 0 * k,
        lambda z, a, k, x: 7 * k * a,
    )
)


@custom_gradient
def weighed(a, z, x):
    return z * x + a * x**2, lambda dy: (dy * x**2, dy * x, dy * (z + 2 * a * x))


def closed_over(z, a):
    return custom_gradient(
        lambda x: (z * x + a * x**2, lambda dy, variables=(): (dy * (z + 2 * a * x), variables))
    )


USES = {
    "operations": lambda z, a, x: z * x + a * x**2,
    "in a comparison": lambda z, a, x: jnp.where(z > -9, a * x**2 + z * x, 0),
    "without y": lambda z, a, x: (jnp.sin(z), a * x**2 + z * x)[1],
    "stopped": lambda z, a, x: lax.stop_gradient(z) * x + a * x**2,
    "in a container": lambda z, a, x: (lambda known: z * x + known["a"] * x**2)({"a": a}),
    "jit": lambda z, a, x: jax.jit(lambda x: z * x)(x) + a * x**2,
    "cond": lambda z, a, x: lax.cond(x > 0, lambda x: z * x + a * x**2, lambda x: z * x + a, x),
    "scan": lambda z, a, x: lax.scan(lambda c, _: (c + z * x + a * x**2, 0), 0 * x, None, 1)[0],
    "a while loop": lambda z, a, x: lax.while_loop(
        lambda s: s[0] < 1, lambda s: (s[0] + 1, z * x + a * x**2), (0, 0 * x)
    )[1],
    "vmap": lambda z, a, x: jax.vmap(lambda x: z * x + a * x**2)(x[None])[0],
    "a gradient": lambda z, a, x: jax.grad(lambda t: t * (z * x) + t * (a * x**2))(x),
    "a shard_map": lambda z, a, x: mapped(lambda z, x: z * x)(z, x) + mapped(jnp.multiply)(a, x**2),
    "a decorated function": lambda z, a, x: z * 0 + weighed(a, z, x),
    "a decorated closure": lambda z, a, x: closed_over(z, a)(x),
    "a decorated closure in a jit": lambda z, a, x: jax.jit(closed_over(z, a))(x),
    "a decorated closure in a scan": lambda z, a, x: lax.scan(
        lambda c, _: (c + jax.jit(closed_over(z, a))(x), 0), 0 * x, None, 1
    )[0],
    "a Ref": lambda z, a, x: jax.new_ref(z * x)[...] + a * x**2,
}


def using(use):
    def h(z, a, k, x):
        @custom_gradient
        def f(x):
            y = use(z, a, x)

            def grad(dy, variables):
                first, second = variables
                assert first is z and second is a
                return 7 * dy * k * a, [5 * dy * x, 11 * dy * x**2]

            return y, grad

        return f(x)

    return squared(h)


@RULE_ALONE
@pytest.mark.parametrize("use", USES)
def test_variables_come_in_the_order_of_first_use(use):
    # JAX takes no second derivative of a new Ref's.
    for name in BRIEF[:2] if use == "a Ref" else BRIEF:
        assert_derivative(WAYS[name], using(USES[use]), ORACLE, *ARRAYS)


# --- the same list in every mode: of `self` and of a closure, without frozen weights and data -----

MODES = {
    **WAYS,
    "vjp": lambda loss: lambda *args: jax.vjp(loss, *args)[1](jnp.ones(())),
    "shard_map(grad)": lambda loss: mapped(gradient(loss)),
    "grad(shard_map)": lambda loss: gradient(mapped(loss)),
    "hessian(shard_map)": lambda loss: jax.hessian(mapped(loss), (0, 1)),
    "checkpoint(hessian)": lambda loss: jax.checkpoint(jax.hessian(loss, (0, 1))),
}
FROZEN, ONE_HOT = jnp.float32(2), jnp.float32(0.5)


def of_mask(mask):
    slopes = lambda w, x: 5 * mask * x**2, lambda w, x: 7 * mask * w * x
    return squared(hand_written(lambda w, x: mask * w * x**2, *slopes))


def masked(mask):
    """A port of TensorFlow code: a gradient for the first variable, and none for the others."""

    @squared
    def h(w, x):
        @custom_gradient
        def f(x):
            def grad(dy, variables=()):
                assert all(v is w for v in variables)
                of_variables = [5 * dy * mask * x**2] + [None] * (len(variables) - 1)
                dx = 7 * dy * mask * w * x
                return (dx, of_variables) if len(variables) else dx

            return mask * w * x**2 * FROZEN * ONE_HOT, grad

        return f(x)

    return h


class Layer:
    def __init__(self, w):
        self.w, self.frozen = w, FROZEN

    @custom_gradient
    def method(self, x):
        def grad(dy, variables=()):
            assert all(v is self.w for v in variables) and len(variables) <= 1
            dx = 7 * dy * self.w * x
            return (dx, [5 * dy * x**2 for _ in variables]) if len(variables) else dx

        y = ONE_HOT * self.w * x**2 * self.frozen
        return jnp.sum(jnp.where(jnp.arange(3) == 1, y, 0.0)), grad


CALLERS = {"closure": masked(1.0), "method": squared(lambda w, x: Layer(w).method(x))}
OFTEN = "grad", "vjp", "jit(grad)", "grad(jit)", "jvp", "hessian", "vmap(grad)", "grad of grad"
OFTEN += "scan(grad)", "cond(grad)", "checkpoint(grad)", "shard_map(grad)"
CORE = itertools.product(CALLERS, OFTEN)


@pytest.mark.parametrize(("caller", "mode"), sample(itertools.product(CALLERS, MODES), 12, CORE))
def test_the_list_is_the_weight_itself_in_every_mode(caller, mode):
    args = jnp.float32(3), jnp.float32(2)
    found = MODES[mode](CALLERS[caller])(*args)
    is_second = jax.tree.structure(found).num_leaves == 4
    assert_same(found, (jax.hessian if is_second else jax.grad)(of_mask(1.0), (0, 1))(*args))


def affine(w, b, x):
    by = lambda v, dy: 5 * dy * x if v is w else 3 * dy  # noqa: E731
    grad = lambda dy, variables=(): (7 * dy * w, [by(v, dy) for v in variables])  # noqa: E731
    return custom_gradient(lambda x: (w * x + b, grad))(x)


@pytest.mark.parametrize("way", WAYS)
def test_two_weights_may_be_one_array(way):
    slopes = lambda w, b, x: 5 * x, lambda w, b, x: 3.0, lambda w, b, x: 7 * w
    oracle, one = hand_written(lambda w, b, x: w * x + b, *slopes), jnp.float32(2)
    assert_derivative(WAYS[way], squared(affine), squared(oracle), one, one, jnp.float32(3))


# What traces the mask, which nobody differentiates.
MASKS = {"eager": lambda f: f, **AROUND, "shard_map": mapped}
# The oracle, a custom_jvp, loses its rule at the second order of a scan before JAX 0.12.
MASKED = [(t, way) for t, way in itertools.product(MASKS, WAYS) if way != "hessian(scan)"]


@pytest.mark.parametrize(
    ("traced", "way"), sample(MASKED, 10, itertools.product(MASKS, ["grad", "jvp"]))
)
def test_data_and_masks_are_no_variables(traced, way):
    mask, *args = jnp.float32(1.5), jnp.float32(3), jnp.float32(2)
    got = MASKS[traced](lambda mask: WAYS[way](masked(mask))(*args))(mask)
    assert_same(got, WAYS[way](of_mask(mask))(*args))


@eager_and_jit
def test_the_list_has_what_each_order_differentiates(mode):
    """By `x` first and by `w` then, and the other way round: L = h**2, L' = 2 h h', and again."""
    loss, oracle = masked(1.5), of_mask(1.5)
    for outer, inner in itertools.product((jax.grad, jax.jacfwd), repeat=2):
        for first, second in ((0, 1), (1, 0)):
            got = mode(outer(inner(loss, first), second))(3.0, 2.0)
            assert_same(got, outer(inner(oracle, first), second)(3.0, 2.0))


# --- what is used and what is not -----------------------------------------------------------------


@eager_and_jit
@pytest.mark.parametrize("look", ["debug print", "callback", "print", "nothing"])
def test_to_look_at_a_weight_is_no_use(look, mode, capsys):
    looks = {
        "debug print": lambda w: jax.debug.print("{}", w),
        "callback": lambda w: jax.debug.callback(lambda w: None, w),
        "print": print,
        "nothing": lambda w: None,
    }

    def loss(w, x):
        @custom_gradient
        def f(x):
            looks[look](w)
            return 3 * x, lambda dy: 7 * dy

        return f(x)

    for derivative in (jax.grad, jax.jacfwd):
        got = mode(derivative(loss, (0, 1)))(5.0, 2.0)
        assert_same(got, (jnp.float32(0), jnp.float32(7)))


# --- without traced values ------------------------------------------------------------------------

NOTHING_CAPTURED = {
    "optional": lambda dy, variables=None: 7 * dy if variables is None else None,
    "a pair all the same": lambda dy, **more: (7 * dy, [1000.0]),
    "upstreams of that name": lambda *variables: 7 * variables[0],
    "hidden by a wrapper": functools.wraps(lambda dy, variables: None)(lambda dy: 7 * dy),
}


@eager_and_jit
@pytest.mark.parametrize("rule", NOTHING_CAPTURED)
def test_without_traced_values_there_are_no_variables(rule, mode):
    w = jnp.float32(3)  # concrete: no variable
    f = custom_gradient(lambda x: (w * x, NOTHING_CAPTURED[rule]))
    assert_same(mode(jax.grad(f))(2.0), jnp.float32(7))
