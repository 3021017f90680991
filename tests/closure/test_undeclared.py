"""Undeclared variables: what `y` depends on, once each, in the order of first use."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from protocols import BRIEF, WAYS, squared
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import assert_derivative, hand_written

from tfgrad_jax import custom_gradient

# --- order: `z` is used before `a`, and `k` by the rule alone; all have one shape -----------------

ARRAYS = 3.0, 2.0, 0.5, 1.5  # z, a, k, x
ORACLE = squared(
    hand_written(
        lambda z, a, k, x: z * x + a * x**2 + 0 * k,
        lambda z, a, k, x: 5 * x,
        lambda z, a, k, x: 11 * x**2,
        lambda z, a, k, x: 0 * k,
        lambda z, a, k, x: 7 * k * a,
    )
)


def in_a_loop(z, x):
    kept = jax.new_ref(0 * x)

    def body(_, __):
        old = kept[...]
        kept[...] = z * x
        return 0, old

    return lax.scan(body, 0, None, 2)[1][1]


@custom_gradient
def weighed(a, z, x):
    return z * x + a * x**2, lambda dy: (dy * x**2, dy * x, dy * (z + 2 * a * x))


def closed_over(z, a):
    """Uses `z` first, and has its variables in the order of their names."""
    return custom_gradient(
        lambda x: (z * x + a * x**2, lambda dy, variables=(): (dy * (z + 2 * a * x), variables))
    )


@custom_gradient
def outer_weighed(a, z, x):
    return weighed(a, z, x), lambda dy: (dy * x**2, dy * x, dy * (z + 2 * a * x))


def with_its_own_derivative(make, f):
    """Return a function whose derivatives JAX must not take: they are those of another one."""
    g = make(f)
    if make is jax.custom_jvp:
        g.defjvp(lambda primals, tangents: (g(*primals), 13 * tangents[-1]))
    else:
        g.defvjp(lambda *args: (g(*args), args), lambda args, dy: (*args[:-1], 13 * dy))
    return g


def weighed_by_jax(make):
    return lambda z, a, x: with_its_own_derivative(make, lambda a, z, x: z * x + a * x**2)(a, z, x)


def in_a_while_loop(z, a, x):
    body = lambda s: (s[0] + 1, z * x + a * x**2)  # noqa: E731
    return lax.while_loop(lambda s: s[0] < 1, body, (0, 0 * x))[1]


def in_a_shard_map(z, a, x):
    mesh, whole = jax.make_mesh((1,), ("i",)), jax.P()
    first = jax.shard_map(lambda z, x: z * x, mesh=mesh, in_specs=whole, out_specs=whole)
    return first(z, x) + jax.shard_map(lambda x: a * x, mesh=mesh, in_specs=whole, out_specs=whole)(
        x**2
    )


USES = {
    "operations": lambda z, a, x: z * x + a * x**2,
    "read late": lambda z, a, x: (lambda known: z * x + known["a"] * x**2)({"a": a}),
    "jit": lambda z, a, x: jax.jit(lambda x: z * x)(x) + a * x**2,
    "cond": lambda z, a, x: lax.cond(x > 0, lambda x: z * x + a * x**2, lambda x: z * x + a, x),
    "scan": lambda z, a, x: lax.scan(lambda c, _: (c + z * x + a * x**2, 0), 0 * x, None, 1)[0],
    "the carry of a loop, in its last round": lambda z, a, x: (
        lax.scan(lambda c, _: ((*c[1:], z * x), 0), (0 * x,) * 3, None, 3)[0][0] + a * x**2
    ),
    "a while loop": in_a_while_loop,
    "checkpoint": lambda z, a, x: jax.checkpoint(lambda x: z * x + a * x**2)(x),
    "vmap": lambda z, a, x: jax.vmap(lambda x: z * x + a * x**2)(x[None])[0],
    "a gradient": lambda z, a, x: jax.grad(lambda t: t * (z * x) + t * (a * x**2))(x),
    "a custom_jvp": weighed_by_jax(jax.custom_jvp),
    "a custom_vjp": weighed_by_jax(jax.custom_vjp),
    "a shard_map": in_a_shard_map,
    "a decorated function": lambda z, a, x: weighed(a, z, x),
    "a decorated closure": lambda z, a, x: closed_over(z, a)(x),
    "a decorated closure in a jit": lambda z, a, x: jax.jit(closed_over(z, a))(x),
    "a decorated closure in a jit in a scan": lambda z, a, x: lax.scan(
        lambda c, _: (c + jax.jit(closed_over(z, a))(x), 0), 0 * x, None, 1
    )[0],
    "a decorated closure in a cond": lambda z, a, x: lax.cond(x > 0, closed_over(z, a), abs, x),
    "a decorated function in another": lambda z, a, x: outer_weighed(a, z, x),
    "a Ref": lambda z, a, x: jax.new_ref(z * x)[...] + a * x**2,
    "a Ref that a loop writes after it is read": lambda z, a, x: in_a_loop(z, x) + a * x**2,
    "a branch on a value": lambda z, a, x: (z * x if a > 0 else a * x) + a * x**2,
}


# These rules read a value that `y` ignores, on purpose: it has no gradient.
RULE_ALONE = pytest.mark.filterwarnings("ignore:.*which only its rule reads")


def using(use, is_declared=False):
    def h(z, a, k, x):
        @custom_gradient(variables=[z, a, k] if is_declared else None)
        def f(x):
            y = use(z, a, x)
            slope = k * a  # for the rule alone

            def grad(dy, variables):
                first, second, *others = variables
                assert first is z and second is a and len(others) == is_declared
                return 7 * dy * slope, [5 * dy * x, 11 * dy * x**2, *(0 * v for v in others)]

            return y, grad

        return f(x)

    return squared(h)


@RULE_ALONE
@pytest.mark.parametrize("use", [u for u in USES if u != "a branch on a value"])
def test_variables_come_in_the_order_of_first_use(use):
    for name in ["grad"] if "a Ref" in use or use == "a custom_vjp" else BRIEF:
        assert_derivative(WAYS[name], using(USES[use]), ORACLE, *ARRAYS)


@RULE_ALONE
@pytest.mark.parametrize("way", sample(WAYS, 8))
def test_the_order_is_the_same_in_every_mode(way):
    assert_derivative(WAYS[way], using(USES["operations"]), ORACLE, *ARRAYS)


@pytest.mark.parametrize("way", ["grad", "jvp", "linearize", "grad of grad", "hessian"])
def test_eagerly_f_may_branch_on_the_value_of_a_variable_if_it_is_declared(way):
    use = USES["a branch on a value"]
    assert_derivative(WAYS[way], using(use, is_declared=True), ORACLE, *ARRAYS)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        WAYS[way](using(use))(*ARRAYS)
    (note,) = [text for text in caught.value.__notes__ if "JAX traces it" in text]
    assert "`using.<locals>" in note.replace("`using.h.f`", "`using.<locals>")
    assert "not declared" in note and "variables=" in note


@custom_gradient
def spike(v, slope):
    return (v > 0).astype(v.dtype), lambda dy: (7 * dy * slope, 5 * dy)


@pytest.mark.parametrize("count", [2, 20])
@eager_and_jit
def test_the_ordinary_gradient_has_what_only_an_inner_rule_gives(mode, count):
    def loss(weights, x):
        @custom_gradient(variables="autodiff")
        def f(x):
            return spike(x, weights[0]) * weights[1], lambda dy: 3 * dy

        return f(x)

    weights, x = [jnp.float32(i + 2) for i in range(count)], jnp.float32(2)
    got = mode(jax.grad(loss, (0, 1)))(weights, x)
    zeros = [jnp.float32(0)] * (count - 2)
    assert_same(got, ([jnp.float32(15), jnp.float32(1), *zeros], jnp.float32(3)))


# --- much is captured: two weights of many are used, a third by the rule alone --------------------


def in_a_model(reads, branches=False):
    """The rule holds the weights of the whole model, or its own; it looks for one without a use."""

    def h(z, a, k, x):
        weights = [k + i for i in range(12)] + [z, a, k]

        @custom_gradient(variables=weights if branches else None)
        def f(x):
            assert not branches or all(w > 0 for w in weights)
            *_, first, second, last = weights
            y = first * x + second * x**2
            held = weights if reads == "all" else [first, second, last]

            def grad(dy, variables):
                assert not branches or all(w > 0 for w in held)
                *_, first, second, last = held
                both = (first, 5 * dy * x), (second, 11 * dy * x**2)
                gradient = lambda v: next((g for w, g in both if v is w), 0 * v)  # noqa: E731
                return 7 * dy * last * second, list(map(gradient, variables))

            return y, grad

        return f(x)

    return squared(h)


@pytest.mark.parametrize("way", sample(WAYS, 4, BRIEF))
@pytest.mark.parametrize("reads", ["all", "its own"])
def test_a_layer_of_many_weights(reads, way):
    assert_derivative(WAYS[way], in_a_model(reads), ORACLE, *ARRAYS)


@pytest.mark.parametrize("reads", ["all", "its own"])
@pytest.mark.parametrize("way", ["grad", "jvp", "grad of grad", "hessian"])
def test_eagerly_a_layer_of_many_declared_weights_and_its_rule_may_branch_on_them(way, reads):
    assert_derivative(WAYS[way], in_a_model(reads, branches=True), ORACLE, *ARRAYS)


# --- dependence: `y = 3 x` in all of these, whatever is done with `w` -----------------------------


def inner_rule_of_jax(w, x):
    inner = jax.custom_vjp(lambda x: 3 * x)
    inner.defvjp(lambda x: (3 * x, None), lambda _, dy: (11 * dy * w,))
    return inner(x), w


def ignored_by(make):
    return lambda w, x: (with_its_own_derivative(make, lambda w, x: 3 * x)(w, x), w)


def beside_y_in_a_while_loop(w, x):
    """One entry of the carry leads to `y`, and another to the rule."""
    body = lambda s: (s[0] + 1, 3 * s[1], 1 * w)  # noqa: E731
    return lax.while_loop(lambda s: s[0] < 1, body, (0, x, 0 * w))[1:]


def stored_in_a_ref(w, x):
    kept = jax.new_ref(0 * x)
    kept[...] = w
    return 3 * x, w


UNUSED = {
    "a rule": lambda w, x: (custom_gradient(lambda x: (3 * x, lambda dy: 11 * dy * w))(x), w),
    "a callback": lambda w, x: (jax.debug.callback(lambda w: None, w), (3 * x, w))[1],
    "a jit": lambda w, x: jax.jit(lambda x: (3 * x, 1 * w))(x),
    "a rule of JAX": inner_rule_of_jax,
    "a custom_jvp": ignored_by(jax.custom_jvp),
    "a custom_vjp": ignored_by(jax.custom_vjp),
    "a cond": lambda w, x: lax.cond(x > 0, lambda x: (3 * x, 1 * w), lambda x: (x, w), x),
    "a scan": lambda w, x: lax.scan(lambda c, _: (c, (3 * x, w)), 0, None, 1)[1],
    "a while loop": beside_y_in_a_while_loop,
    "a Ref": stored_in_a_ref,
}


@RULE_ALONE
@eager_and_jit
@pytest.mark.parametrize("compute", UNUSED)
def test_what_y_ignores_is_no_variable_and_needs_no_gradient(compute, mode):
    def loss(w, x, takes_variables):
        @custom_gradient
        def f(x):
            y, slope = jax.tree.map(jnp.sum, UNUSED[compute](w, x))
            plain = lambda dy: 7 * dy * slope  # noqa: E731
            more = lambda dy, variables: (plain(dy), variables)  # noqa: E731
            return y, more if takes_variables else plain

        return f(x)

    for takes, derivative in itertools.product((False, True), (jax.grad, jax.jacfwd)):
        h = functools.partial(loss, takes_variables=takes)
        got = mode(derivative(h, (0, 1)))(5.0, 2.0)
        assert_same(got, (jnp.float32(0), jnp.float32(35)))
        # JAX takes no reverse derivative of a `while_loop`, no forward one of a custom_vjp.
        again = jax.jacfwd if "while" in compute else jax.jacrev
        got = mode(again(derivative(h, (0, 1)), (0, 1)))(5.0, 2.0)
        zero, seven = jnp.float32(0), jnp.float32(7)
        assert_same(got, ((zero, zero), (seven, zero)))


@eager_and_jit
# A class cannot be copied: `f` is traced, and in forward mode JAX stops the weight before that.
@pytest.mark.parametrize(("holder", "at"), [("cell", "f"), ("cell", "rule"), ("class", "rule")])
def test_a_stopped_weight_is_a_variable_and_both_modes_ask_the_rule(holder, at, mode):
    def loss(w, x):
        held = type("Held", (), {"w": w})
        read = (lambda: held.w) if holder == "class" else lambda: w
        stopped = {"f": read, "rule": read} | {at: lambda: lax.stop_gradient(read())}

        @custom_gradient
        def f(x):
            def rule(dy, variables):
                return 7 * dy * stopped["rule"](), [5 * dy * x for _ in variables]

            return stopped["f"]() * x, rule

        return f(x)

    for derivative in (jax.grad, jax.jacfwd):
        got = mode(derivative(loss, (0, 1)))(3.0, 2.0)
        assert_same(got, (jnp.float32(10), jnp.float32(21)))


def test_the_value_of_a_weight_used_beside_the_weight_is_a_constant():
    number = jnp.float32(3)

    def loss(w):
        held = {"w": w}

        @custom_gradient
        def f(x):
            return number * x, lambda dy, variables=(): dy * held["w"]

        return f(jnp.float32(2)) + w

    assert_same(jax.jacfwd(loss)(number), jnp.float32(1))
    assert_same(jax.grad(loss)(number), jnp.float32(1))


# --- what is differentiated: the weight, and neither the data nor the mask beside it --------------


def masked(mask):
    """A port of TensorFlow code: a gradient for the first variable, and none for the others."""

    def h(w, x):
        def f(x):
            def grad(dy, variables=()):
                assert all(v is w for v in variables)
                of_variables = [5 * dy * mask * x**2] + [None] * (len(variables) - 1)
                return (7 * dy * mask * w * x, of_variables) if variables else 7 * dy * mask * w * x

            return mask * w * x**2, grad

        return custom_gradient(f)(x)

    return h


def of_mask(mask):
    return hand_written(
        lambda w, x: mask * w * x**2, lambda w, x: 5 * mask * x**2, lambda w, x: 7 * mask * w * x
    )


# What traces the mask, and what asks for the derivatives by the weight and the input.
MASKS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: (
        lambda mask: jax.tree.map(lambda g: g[1], jax.vmap(f)(jnp.array([9.0, mask])))
    ),
    "scan": lambda f: lambda mask: lax.scan(lambda c, m: (c, f(m)), 0, mask[None])[1],
    "cond": lambda f: lambda mask: lax.cond(mask > 0, f, f, mask),
    "checkpoint": jax.checkpoint,
}


def of_masks(traced, way, h):
    found = MASKS[traced](lambda mask: WAYS[way](squared(h(mask)))(*MASK_ARGS[1:]))(MASK_ARGS[0])
    return jax.tree.map(lambda g: g.reshape(()), found)


MASK_ARGS = jnp.float32(1.5), jnp.float32(3), jnp.float32(2)  # mask, w, x


# The oracle, a custom_jvp, loses its rule at the second order of a scan before JAX 0.12.
MASKED_WAYS = [way for way in WAYS if way != "hessian(scan)"]
MASKED_BRIEF = itertools.product(MASKS, BRIEF)


@pytest.mark.parametrize(
    ("traced", "way"), sample(itertools.product(MASKS, MASKED_WAYS), 12, MASKED_BRIEF)
)
def test_data_and_masks_are_no_variables(traced, way):
    assert_same(of_masks(traced, way, masked), of_masks("eager", way, of_mask))


@eager_and_jit
def test_the_list_has_what_each_order_differentiates(mode):
    """By `x` first and by `w` then, and the other way round: L = h**2, L' = 2 h h', and again."""
    loss, oracle = squared(masked(1.5)), squared(of_mask(1.5))
    for outer, inner in itertools.product((jax.grad, jax.jacfwd), repeat=2):
        for first, second in ((0, 1), (1, 0)):
            got = mode(outer(inner(loss, first), second))(3.0, 2.0)
            assert_same(got, outer(inner(oracle, first), second)(3.0, 2.0))


# --- how they are passed, and what comes back -----------------------------------------------------

NOTHING_CAPTURED = {
    "optional": lambda dy, variables=None: 7 * dy if variables is None else None,
    "required": lambda dy, variables: (7 * dy, []) if variables == [] else None,
    "a pair all the same": lambda dy, **more: (7 * dy, [1000.0]),
    "required, with a gradient": lambda dy, variables: (7 * dy, [1000.0]),
    "in any case": lambda dy, **more: 7 * dy if not more else None,
    "upstreams of that name": lambda *variables: 7 * variables[0],
    "hidden by a wrapper": functools.wraps(lambda dy, variables: None)(lambda dy: 7 * dy),
}


@eager_and_jit
@pytest.mark.parametrize("rule", NOTHING_CAPTURED)
def test_without_traced_values_there_are_no_variables(rule, mode):
    w = jnp.float32(3)  # concrete: no variable
    f = custom_gradient(lambda x: (w * x, NOTHING_CAPTURED[rule]))
    assert_same(mode(jax.grad(f))(2.0), jnp.float32(7))
    two = custom_gradient(lambda x, y: (w * x * y, lambda dy, variables=None: (7 * dy, 5 * dy)))
    assert_same(mode(jax.grad(two, (0, 1)))(2.0, 3.0), (jnp.float32(7), jnp.float32(5)))


CONSTANTS = [], [2.0], np.float32(2), jnp.float32(2), [None, 2.0]


@eager_and_jit
@pytest.mark.parametrize("declared", [*CONSTANTS, jax.tree_util.Partial(print, 2.0)], ids=repr)
def test_a_rule_is_given_declared_variables_that_are_not_traced(declared, mode):
    def rule(dy, variables):
        assert jax.tree.structure(variables) == jax.tree.structure(declared)
        assert jax.tree.leaves(variables) == jax.tree.leaves(declared)
        return 7 * dy, jax.tree.map(lambda _: 1000 * dy, variables)

    f = custom_gradient(lambda x: (x, rule), variables=declared)
    assert_same(mode(jax.grad(f))(2.0), jnp.float32(7))


@pytest.mark.parametrize("none", [[None, None], (None, None), None], ids=str)
def test_none_is_no_gradient_for_one_variable_or_for_all(none):
    def loss(w, b, x):
        f = custom_gradient(lambda x: (w * x + b, lambda dy, variables: (7 * dy * w, none)))
        return f(x) + 11 * b

    got = jax.grad(loss, (0, 1, 2))(3.0, 1.0, 2.0)
    assert_same(got, (jnp.float32(0), jnp.float32(11), jnp.float32(21)))


# --- eagerly, all but these weights has values ----------------------------------------------------


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def clip(self, x):
        assert not isinstance(x, jax.core.Tracer)
        return x, lambda dy: 7 * dy

    @custom_gradient
    def scale(self, x):
        assert x > 0
        return self.w * x**2, lambda dy, variables: (5 * dy, [11 * dy * x for _ in variables])


def test_eagerly_inputs_have_values_beside_an_undeclared_weight():
    args = jnp.float32(3), jnp.float32(2)
    assert_same(jax.grad(lambda w, x: Layer(w).clip(x) * w, (0, 1))(*args), (2.0, 21.0))
    assert_same(jax.grad(lambda w, x: Layer(w).scale(x), (0, 1))(*args), (22.0, 5.0))


def test_the_weight_has_none_and_the_error_says_to_declare_it():
    def loss(w):
        @custom_gradient
        def f(x):
            return x * w if w > 0 else x, lambda dy, variables: (dy, [dy for _ in variables])

        return f(2.0)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.grad(loss)(3.0)
    assert any("weights that are not declared" in note for note in caught.value.__notes__)


@custom_gradient
def sine(x):
    return jnp.sin(x), lambda dy: 3 * dy * jnp.cos(x)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, jax.vmap, lambda f: f])
def test_a_gradient_that_has_run_can_be_differentiated(around):
    """The first run must not leave a program without the rules inside `f`."""

    def loss(w, x):
        @custom_gradient
        def f(x):
            s = sine(w * x)
            return 1 * x, lambda dy, variables=(): (dy * s, [7 * dy for _ in variables])

        return f(x)

    def gradient(w, x):
        return jax.grad(lambda x: loss(w, x))(x)

    slope = around(lambda wx: gradient(*wx))
    args = jnp.array([3.0]), jnp.array([2.0])
    if around is not jax.vmap:
        args = jax.tree.map(jnp.squeeze, args)
    w, x = args
    for _ in range(2):
        assert_same(slope(args), jnp.sin(w * x))
        got = jax.grad(lambda wx: jnp.sum(slope(wx)))(args)
        assert_same(got, (3 * x * jnp.cos(w * x), 3 * w * jnp.cos(w * x)))


@pytest.mark.parametrize("order", ["hessian", "jacrev of jacrev", "jvp of grad"])
def test_eagerly_they_have_values_at_every_order(order):
    second = {
        "hessian": lambda f: jax.hessian(f, (0, 1)),
        "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)),
        "jvp of grad": lambda f: lambda *a: jax.jvp(jax.grad(f, (0, 1)), a, (jnp.ones(()),) * 2)[1],
    }[order]
    args = jnp.float32(3), jnp.float32(2)
    oracle = hand_written(lambda w, x: w * x**2, lambda w, x: 11 * x, lambda w, x: 5 + 0 * x)
    assert_same(second(lambda w, x: Layer(w).scale(x))(*args), second(oracle)(*args))


def test_a_ref_is_read_after_it_is_written():
    def loss(w, x):
        @custom_gradient
        def f(x):
            kept = jax.new_ref(jnp.zeros(()))
            kept[...] += w * x
            kept[...] += w * x
            return kept[...], lambda dy, variables: (5 * dy, [7 * dy for _ in variables])

        return f(x)

    assert_same(jax.value_and_grad(loss, (0, 1))(3.0, 2.0), (12.0, (7.0, 5.0)))


@pytest.mark.parametrize("declared", [True, False])
def test_a_cache_of_constants_keeps_no_tracer(declared):
    table = functools.cache(lambda: jnp.arange(3.0))

    def loss(w, x):
        @custom_gradient(variables=[w] if declared else None)
        def f(x):
            return w * x * table().sum(), lambda dy, variables: (dy * table()[2], [dy * w * 5])

        return f(x)

    assert_same(jax.jvp(loss, (3.0, 2.0), (1.0, 1.0))[1], 2.0 + 15.0)
    assert not isinstance(table(), jax.core.Tracer)
