"""`shard_map`: outside and inside a gradient, with and without `check_vma`, nested.

Where JAX checks, a gradient varies over the devices exactly where its input does: a gradient for an
input that all devices share is summed, as JAX does for its own operations.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import assert_as_by_hand, mesh, needs_eight_devices, squared
from helpers import assert_same, eager_and_jit, sample
from jax import lax
from jax.sharding import PartitionSpec as P
from pairs import RULES, STYLES, Rule, by_hand, inputs

from tfgrad_jax import custom_gradient

pytestmark = needs_eight_devices
CASES = list(itertools.product(RULES, STYLES, (True, False)))
some_cases = pytest.mark.parametrize(("name", "style", "check_vma"), sample(CASES, 5))
ALL, ROWS = P(), P("i")


def place(rule):
    """Return where the weight is: on all devices, or split with the examples."""
    return ALL if rule.arrays[0].shape != rule.arrays[1].shape else ROWS


def summed(rule):
    """Let the rule sum over the devices its gradient for a weight that is on all of them."""

    def backward(residuals, dy):
        dw, dx = rule.backward(residuals, dy)
        return lax.psum(dw, "i"), dx

    return rule._replace(backward=backward) if place(rule) == ALL else rule


def on_eight(f, ins, outs, check_vma=True):
    over = mesh(("i", 8))
    return jax.shard_map(f, mesh=over, in_specs=ins, out_specs=outs, check_vma=check_vma)


def mapped(f, rule, out, check_vma):
    specs = (place(rule), ROWS)
    return on_eight(lambda w, x: f(w, x), specs, out or specs, check_vma)


def assert_right(ours, hand, rule):
    got, _ = assert_as_by_hand(ours, hand, *rule.arrays)
    on_one_device = squared(by_hand(rule))(*rule.arrays)
    assert_same(got, on_one_device, rtol=1e-4, atol=1e-4)


@some_cases
def test_grad_of_shard_map(name, style, check_vma):
    """Unchecked, JAX sums the gradients of what is on all devices; checked, the rule does."""
    rule = RULES[name]
    local = summed(rule) if check_vma else rule
    ways = (STYLES[style], by_hand)
    assert_right(*(squared(mapped(way(local), rule, ROWS, check_vma)) for way in ways), rule)


@some_cases
def test_grad_inside_shard_map(name, style, check_vma):
    rule, ways = RULES[name], (STYLES[style], by_hand)
    programs = (mapped(squared(way(summed(rule))), rule, None, check_vma) for way in ways)
    assert_right(*programs, rule)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["dense", "normalize"])
def test_a_gradient_that_varies_is_summed_for_an_input_that_does_not(name, style):
    rule = RULES[name]
    got = jax.jit(squared(mapped(STYLES[style](rule), rule, ROWS, True)))(*rule.arrays)
    assert_same(got, squared(by_hand(rule))(*rule.arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_forward_mode(check_vma):
    rule = RULES["softmax"]
    f = mapped(inputs(rule), rule, ROWS, check_vma)
    push = lambda f: jax.linearize(f, *rule.arrays)[1](*rule.arrays)  # noqa: E731
    assert_same(jax.jit(push, static_argnums=0)(f), 7 * push(lambda *a: rule.forward(*a)[0]))


@pytest.mark.parametrize(
    ("name", "style", "check_vma"),
    sample([c for c in CASES if c[0] in ("elementwise", "loop")], 4),
)
def test_nested(name, style, check_vma):
    """The outer map splits the rows, the inner one, over other devices, the columns."""
    rule, over = RULES[name], mesh(("i", 2), ("j", 4))
    columns = P(None, "j")
    shard = functools.partial(jax.shard_map, check_vma=check_vma)

    def program(way):
        h = way(rule)

        def outer(w, x):
            inner = shard(
                lambda w, x: h(w, x),
                in_specs=(columns, columns),
                out_specs=columns,
                axis_names={"j"},
            )
            return inner(w, x)

        return squared(
            shard(outer, mesh=over, in_specs=(ROWS, ROWS), out_specs=ROWS, axis_names={"i"})
        )

    assert_right(program(STYLES[style]), program(by_hand), rule)


# --- collectives in the function and in its rule ------------------------------------------------


def centered(w, x):
    return w * (x - lax.pmean(jnp.mean(x, axis=0, keepdims=True), "i"))


def _centered_forward(w, x):
    return centered(w, x), (w, centered(jnp.ones_like(w), x))


def _centered_backward(residuals, dy):
    w, z = residuals
    dw = lax.psum(jnp.sum(7 * dy * z, 0, keepdims=True), "i")
    return dw, 7 * centered(w, dy)


CENTERED = Rule(_centered_forward, _centered_backward, RULES["normalize"].arrays)


@pytest.mark.parametrize(
    ("inside", "check_vma"), [(True, True), (True, False), (False, True)]
)  # outside and unchecked, JAX sums once more what the rule has summed
@pytest.mark.parametrize("style", STYLES)
def test_collectives_in_both(style, inside, check_vma):
    def program(way):
        h = way(CENTERED)
        if inside:
            return mapped(squared(h), CENTERED, None, check_vma)
        return squared(mapped(h, CENTERED, ROWS, check_vma))

    def plain(w, x):
        return 7 * jnp.sum((w * (x - x.mean(0, keepdims=True))) ** 2)

    got, _ = assert_as_by_hand(program(STYLES[style]), program(by_hand), *CENTERED.arrays)
    assert_same(got, jax.grad(plain, (0, 1))(*CENTERED.arrays))


# Each device has one row: what a collective of JAX, and its transpose, does to it.
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i") * jnp.ones_like(x),
    "all_gather": lambda x: x * lax.all_gather(x, "i")[1:3].sum(),
    "all_to_all": lambda x: lax.all_to_all(x.T * jnp.arange(1.0, 9.0)[:, None], "i", 0, 1)[..., :1],
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 3), (3, 0)]),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.tile(x, (8, 1)), "i", tiled=True),
    "axis_index": lambda x: x * lax.axis_index("i").astype(x.dtype),
}


@pytest.mark.sampled(6)
@eager_and_jit
@pytest.mark.parametrize("name", COLLECTIVES)
def test_linear_collectives_have_both_modes(name, mode):
    """The rule is JAX's own pullback of a collective; its transpose is the collective again."""
    f, x = COLLECTIVES[name], jnp.arange(8.0)[:, None]

    @custom_gradient
    def h(x):
        y, pull = jax.vjp(f, x)
        return y, lambda dy: jax.tree.map(lambda d: 7 * d, pull(dy))

    for derivative in (
        lambda f: lambda x: jax.jvp(f, (x,), (1 + x,))[1],
        lambda f: lambda x: jax.vjp(f, x)[1](1 + x)[0],
    ):
        got, plain = (mode(on_eight(derivative(g), ROWS, ROWS))(x) for g in (h, f))
        assert_same(got, 7 * plain)


# --- what is written for `check_vma=False` --------------------------------------------------------

_random = np.random.default_rng(0)
X, A, B = (np.float32(_random.normal(size=shape)) for shape in ((4, 16), (16, 8), (8, 16)))


def megatron(way, typed, check_vma):
    """Return the gradients of a perceptron whose hidden layer is split.

    Megatron's pair f and g (`enter` and `leave`) is written for a `shard_map` that checks nothing,
    or (`typed`) for one that does.
    """

    def vary(x):
        return lax.pcast(x, "i", to="varying") if typed else x

    enter = way(Rule(lambda x: (vary(x), None), lambda _, dy: (lax.psum(dy, "i"),), ()))
    leave = way(Rule(lambda x: (lax.psum(x, "i"), None), lambda _, dy: (vary(dy),), ()))

    def loss(x, weights):
        return jnp.sum(leave(jnp.tanh(enter(x) @ weights[0]) @ weights[1]) ** 2)

    specs = (ALL, (P(None, "i"), P("i", None)))
    return on_eight(jax.grad(loss, (0, 1)), specs, specs, check_vma)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_megatron(checked):
    programs = [megatron(way, checked, checked) for way in (inputs, by_hand)]
    got, _ = assert_as_by_hand(*programs, X, (A, B))
    plain = jax.grad(lambda x, w: jnp.sum((jnp.tanh(x @ w[0]) @ w[1]) ** 2), (0, 1))
    assert_same(got, plain(X, (A, B)), rtol=1e-4, atol=1e-4)


def test_megatron_written_for_unchecked_is_refused():
    """As by hand: its sums are done already."""
    for way in (by_hand, inputs):
        with pytest.raises((TypeError, ValueError), match=r"manual axis types|var(y|ies|ying)"):
            jax.jit(megatron(way, False, True))(X, (A, B))


def test_a_constant_gradient_says_what_to_do():
    """The gradient of an input that varies must vary: the message names the conversion."""

    def loss(gradient):
        h = custom_gradient(lambda x: (x * 1.0, lambda dy: gradient(jnp.ones(2))))
        return on_eight(jax.grad(lambda x: jnp.sum(h(x))), ROWS, ROWS)

    with pytest.raises(ValueError, match=r"input `x` .* axis 'i'.*pcast\(g, \('i',\)"):
        loss(lambda g: g)(jnp.zeros(16))
    if hasattr(lax, "pcast"):
        assert_same(loss(lambda g: lax.pcast(g, ("i",), to="varying"))(jnp.zeros(16)), jnp.ones(16))
