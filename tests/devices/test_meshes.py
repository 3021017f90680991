"""`jit` of arrays on a mesh; `shard_map` outside and inside a gradient, checked or not, nested.

Where `shard_map` checks, a gradient varies over the devices exactly where its input does: a
gradient for an input that all devices share is summed, as JAX does for its own operations.
"""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.helpers import assert_same, eager_and_jit, sample
from support.pairs import RULES, STYLES, by_hand, squared

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


def mesh(*axes):
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes))


def assert_as_by_hand(ours, hand, *args):
    """Compare values, placements and the collectives; return the value and the collectives."""
    compiled = [jax.jit(f).lower(*args).compile() for f in (ours, hand)]
    (actual, sent), (expected, by_hand) = (
        (run(*args), collections.Counter(COLLECTIVE.findall(run.as_text()))) for run in compiled
    )
    assert_same(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)
    assert sent == by_hand
    return actual, sent


BOTH = ("data", "model")
# Where the weight is split, and where the examples are, over 2 x 4 devices.
PLACEMENTS = {
    "data parallel": (P(), P(BOTH)),
    "tensor parallel": (P(None, "model"), P("data")),
    "fully sharded": (P(None, BOTH), P(BOTH)),
}


@pytest.mark.parametrize(
    ("name", "style", "placement"), sample(itertools.product(RULES, STYLES, PLACEMENTS), 6)
)
def test_placed_by_xla(name, style, placement):
    rule, over = RULES[name], mesh(("data", 2), ("model", 4))
    arrays = []
    for a, spec in zip(rule.arrays, PLACEMENTS[placement], strict=True):
        axes = zip(a.shape, spec, strict=False)  # what the devices do not divide stays whole
        fitting = P(*(axis if size % 8 == 0 else None for size, axis in axes))
        arrays.append(jax.device_put(a, NamedSharding(over, fitting)))
    hand = squared(by_hand(rule))
    got, sent = assert_as_by_hand(squared(STYLES[style](rule)), hand, *arrays)
    assert_same(jax.device_get(got), jax.device_get(hand(*rule.arrays)), rtol=1e-4, atol=1e-4)
    assert sent.total() > 0 or name != "dense"  # the count is no accident


# --- shard_map ------------------------------------------------------------------------------------

CASES = list(itertools.product(RULES, STYLES, (True, False)))
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


@pytest.mark.parametrize(("name", "style", "check_vma"), sample(CASES, 5))
def test_grad_of_and_inside_shard_map(name, style, check_vma):
    """Unchecked, JAX sums the gradients of what is on all devices; checked or inside, the rule."""
    rule = RULES[name]
    local = summed(rule) if check_vma else rule
    ways = (STYLES[style], by_hand)
    assert_right(*(squared(mapped(way(local), rule, ROWS, check_vma)) for way in ways), rule)
    inside = (mapped(squared(way(summed(rule))), rule, None, check_vma) for way in ways)
    assert_right(*inside, rule)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["dense", "normalize"])
def test_a_gradient_that_varies_is_summed_for_an_input_that_does_not(name, style):
    rule = RULES[name]
    got = jax.jit(squared(mapped(STYLES[style](rule), rule, ROWS, True)))(*rule.arrays)
    assert_same(got, squared(by_hand(rule))(*rule.arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "style", "check_vma"), sample([c for c in CASES if c[0] in ("elementwise", "loop")], 4)
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


# --- collectives ----------------------------------------------------------------------------------

# Each device has one row: what a collective of JAX, and its transpose, does to it.
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i") * jnp.ones_like(x),
    "all_gather": lambda x: x * lax.all_gather(x, "i")[1:3].sum(),
    "all_to_all": lambda x: lax.all_to_all(x.T * jnp.arange(1.0, 9.0)[:, None], "i", 0, 1)[..., :1],
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 3), (3, 0)]),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.tile(x, (8, 1)), "i", tiled=True),
}


@pytest.mark.sampled(4)
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


def test_a_constant_gradient_says_what_to_do():
    """The gradient of an input that varies must vary: the message names the conversion."""

    def loss(gradient):
        h = custom_gradient(lambda x: (x * 1.0, lambda dy: gradient(jnp.ones(2))))
        return on_eight(jax.grad(lambda x: jnp.sum(h(x))), ROWS, ROWS)

    with pytest.raises(ValueError, match=r"input `x`.* axis 'i'.*pcast\(g, \('i',\)"):
        loss(lambda g: g)(jnp.zeros(16))
    if hasattr(lax, "pcast"):
        assert_same(loss(lambda g: lax.pcast(g, ("i",), to="varying"))(jnp.zeros(16)), jnp.ones(16))


def test_a_log_of_values_that_are_not_traced_any_more():
    """No dead tracer is a value that the call captures, but those outside of it that are live."""
    log, rows = [], jnp.arange(8.0)
    over = lambda f: on_eight(f, ROWS, ROWS)  # noqa: E731
    over(lambda x: (log.append(2 * x), x)[1])(rows)

    def h(x, w):
        @custom_gradient
        def f(x):
            def rule(dy, variables=()):
                dx = 7 * dy * w + 0 * len(log)
                return (dx, [jnp.sum(5 * dy * x)]) if variables else dx

            return w * x + 0 * len(log), rule

        return f(x)

    inside = over(lambda x: jax.grad(lambda x: jnp.sum(h(x, 3.0)))(x))
    outside = jax.grad(lambda x: jnp.sum(over(lambda x: h(x, 3.0))(x)))
    of_weight = jax.grad(lambda w: jnp.sum(over(lambda x: h(x, w))(rows)))
    assert_same((inside(rows), outside(rows)), (jnp.full(8, 21.0),) * 2)
    assert_same(of_weight(jnp.float32(3)), 5 * jnp.sum(rows))
