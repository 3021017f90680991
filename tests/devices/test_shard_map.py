"""`shard_map`: outside and inside a gradient, with and without `check_vma`, nested."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from devices import assert_as_by_hand, mesh, needs_eight_devices, squared
from helpers import assert_same, eager_and_jit, sample
from jax import lax
from jax.sharding import PartitionSpec
from pairs import RULES, STYLES, Rule, by_hand

from tfgrad_jax import custom_gradient

pytestmark = needs_eight_devices
CASES = list(itertools.product(RULES, STYLES, (True, False)))
some_cases = pytest.mark.parametrize(("name", "style", "check_vma"), sample(CASES, 5))
ROWS = PartitionSpec("i")


def replicated(rule):
    """Return whether the weight is on all devices, not split with the examples."""
    return rule.arrays[0].shape != rule.arrays[1].shape


def summed(rule):
    """Let the rule sum over the devices its gradient for a weight that is on all of them."""

    def backward(residuals, dy):
        dw, dx = rule.backward(residuals, dy)
        return lax.psum(dw, "i"), dx

    return rule._replace(backward=backward) if replicated(rule) else rule


def mapped(f, rule, out, check_vma):
    specs = (PartitionSpec() if replicated(rule) else ROWS, ROWS)
    return jax.shard_map(
        lambda w, x: f(w, x),
        mesh=mesh(("i", 8)),
        in_specs=specs,
        out_specs=specs if out is None else out,
        check_vma=check_vma,
    )


def on_one_device(rule):
    return squared(by_hand(rule))(*rule.arrays)


@some_cases
def test_grad_of_shard_map(name, style, check_vma):
    """Unchecked, JAX sums the gradients of what is on all devices; checked, the rule does."""
    rule = RULES[name]
    local = summed(rule) if check_vma else rule
    ways = (STYLES[style], by_hand)
    ours, hand = (squared(mapped(way(local), rule, ROWS, check_vma)) for way in ways)
    got, _ = assert_as_by_hand(ours, hand, *rule.arrays)
    assert_same(got, on_one_device(rule), rtol=1e-4, atol=1e-4)


@some_cases
def test_grad_inside_shard_map(name, style, check_vma):
    rule, ways = RULES[name], (STYLES[style], by_hand)
    ours, hand = (mapped(squared(way(summed(rule))), rule, None, check_vma) for way in ways)
    got, _ = assert_as_by_hand(ours, hand, *rule.arrays)
    assert_same(got, on_one_device(rule), rtol=1e-4, atol=1e-4)


# --- collectives in the function and in its rule ------------------------------------------------


def _mean_forward(w, x):
    mean = lax.pmean(jnp.mean(x, axis=0, keepdims=True), "i")
    return w * (x - mean), (w, x - mean)


def _mean_backward(residuals, dy):
    w, centered = residuals
    dz = 7 * w * dy
    dw = lax.psum(jnp.sum(7 * dy * centered, 0, keepdims=True), "i")
    return dw, dz - lax.pmean(jnp.mean(dz, axis=0, keepdims=True), "i")


CENTERED = Rule(_mean_forward, _mean_backward, RULES["normalize"].arrays)


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

    w, x = CENTERED.arrays
    got, _ = assert_as_by_hand(program(STYLES[style]), program(by_hand), w, x)
    assert_same(got, jax.grad(plain, (0, 1))(w, x))


@pytest.mark.parametrize(
    ("name", "style", "check_vma"),
    sample([c for c in CASES if c[0] in ("elementwise", "rounded", "loop")], 4),
)
def test_nested(name, style, check_vma):
    """The outer map splits the rows, the inner one, over other devices, the columns."""
    rule, over = RULES[name], mesh(("i", 2), ("j", 4))
    columns = PartitionSpec(None, "j")
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

    got, _ = assert_as_by_hand(program(STYLES[style]), program(by_hand), *rule.arrays)
    assert_same(got, on_one_device(rule), rtol=1e-4)


# Each device has one row: what a collective of JAX, and its transpose, does to it.
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i") * jnp.ones_like(x),
    "all_gather": lambda x: x * lax.all_gather(x, "i")[1:3].sum(),
    "all_to_all": lambda x: lax.all_to_all(x.T * jnp.arange(1.0, 9.0)[:, None], "i", 0, 1)[..., :1],
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 3), (3, 0)]),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.tile(x, (8, 1)), "i", tiled=True),
    "axis_index": lambda x: x * lax.axis_index("i").astype(x.dtype),
}


@eager_and_jit
@pytest.mark.parametrize("name", COLLECTIVES)
def test_linear_collectives_have_both_modes(name, mode):
    """The rule is JAX's own pullback of a collective; its transpose is the collective again."""
    f, x = COLLECTIVES[name], jnp.arange(8.0)[:, None]

    @custom_gradient
    def h(x):
        y, pull = jax.vjp(f, x)
        return y, lambda dy: jax.tree.map(lambda d: 7 * d, pull(dy))

    def derivatives(f):
        def push(x):
            return jax.jvp(f, (x,), (1 + x,))[1]

        def pull(x):
            return jax.vjp(f, x)[1](1 + x)[0]

        return [
            mode(jax.shard_map(way, mesh=mesh(("i", 8)), in_specs=ROWS, out_specs=ROWS))(x)
            for way in (push, pull)
        ]

    seven = jax.tree.map(lambda d: 7 * d, derivatives(f))
    assert_same(derivatives(h), seven)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("transform", [jax.jvp, jax.linearize], ids=["jvp", "linearize"])
def test_forward_mode(transform, check_vma):
    rule = RULES["softmax"]
    f = mapped(STYLES["inputs"](rule), rule, ROWS, check_vma)
    tangents = tuple(2 * a for a in rule.arrays)

    def push(f, *primals):
        if transform is jax.jvp:
            return jax.jvp(f, primals, tangents)[1]
        return jax.linearize(f, *primals)[1](*tangents)

    expected = jax.jvp(lambda w, x: 7 * rule.forward(w, x)[0], rule.arrays, tangents)[1]
    assert_same(jax.jit(functools.partial(push, f))(*rule.arrays), expected)
