"""`shard_map`: outside and inside a gradient, with and without `check_vma`, nested; and `pmap`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from devices import assert_as_by_hand, mesh, needs_eight_devices, squared
from helpers import assert_same
from jax import lax
from jax.sharding import PartitionSpec
from pairs import RULES, STYLES, Rule, by_hand

pytestmark = [needs_eight_devices, pytest.mark.deep]
every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
every_rule = pytest.mark.parametrize(
    ("rule", "style"),
    [
        *(pytest.param(rule, STYLES["undeclared"], id=name) for name, rule in RULES.items()),
        *(pytest.param(RULES["dense"], STYLES[s], id=f"dense, {s}") for s in STYLES),
    ],
)
check_vma = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
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


@every_rule
@check_vma
def test_grad_of_shard_map(rule, style, check_vma):
    """Unchecked, JAX sums the gradients of what is on all devices; checked, the rule does."""
    local = summed(rule) if check_vma else rule
    ours, hand = (squared(mapped(m(local), rule, ROWS, check_vma)) for m in (style, by_hand))
    got, _ = assert_as_by_hand(ours, hand, *rule.arrays)
    assert_same(got, on_one_device(rule), rtol=1e-4, atol=1e-4)


@every_rule
@check_vma
def test_grad_inside_shard_map(rule, style, check_vma):
    rule_that_sums = summed(rule)
    ours, hand = (
        mapped(squared(m(rule_that_sums)), rule, None, check_vma) for m in (style, by_hand)
    )
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


@every_style
@check_vma
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_collectives_in_both(style, inside, check_vma):
    if not inside and not check_vma:
        pytest.skip("JAX sums once more what the rule has summed")

    def program(way):
        h = way(CENTERED)
        if inside:
            return mapped(squared(h), CENTERED, None, check_vma)
        return squared(mapped(h, CENTERED, ROWS, check_vma))

    def plain(w, x):
        return 7 * jnp.sum((w * (x - x.mean(0, keepdims=True))) ** 2)

    w, x = CENTERED.arrays
    got, _ = assert_as_by_hand(program(style), program(by_hand), w, x)
    assert_same(got, jax.grad(plain, (0, 1))(w, x))


@every_style
@check_vma
@pytest.mark.parametrize("name", ["elementwise", "rounded", "loop"])
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

    got, _ = assert_as_by_hand(program(style), program(by_hand), *rule.arrays)
    assert_same(got, on_one_device(rule), rtol=1e-4)


@every_rule
def test_pmap(rule, style):
    """The weight is given once, for all devices."""
    w, x = rule.arrays
    first = None if replicated(rule) else 0
    split = [a if axis is None else a[:, None] for a, axis in ((w, first), (x, 0))]

    def run(way):
        gradients = jax.pmap(squared(way(rule)), axis_name="i", in_axes=(first, 0))(*split)
        return jax.device_get(gradients)

    dw, dx = run(style)
    assert_same((dw, dx), run(by_hand))
    joined = (dw.sum(0) if replicated(rule) else dw[:, 0], dx[:, 0])
    assert_same(joined, jax.device_get(on_one_device(rule)), rtol=1e-4, atol=1e-4)


@check_vma
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
