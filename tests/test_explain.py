"""Each fact that `explain` reports, against a number worked out on paper."""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tfgrad_jax import custom_gradient, explain, grad_pass_through, recompute_grad

N, M, F = 4, 8, 4  # rows, columns, bytes of a float32
X, W, B = jnp.ones((N, M)), jnp.full((M, M), 0.5), jnp.ones((1, M))
RULE = "by the rule"
FIXED = "unknown: it cannot be replaced"
ERROR = "none: an error where it is differentiated"


def kept(found):
    return {r.name: (r.bytes, r.origin) for r in found.residuals}


def gradients(found):
    return {row.name: row.gradient for row in (*found.inputs, *found.captured)}


def line(f, offset):
    return f"test_explain.py:{f.__code__.co_firstlineno + offset}"


# --- what the rule keeps --------------------------------------------------------------------------


@custom_gradient
def careless(x):
    y = jnp.tanh(x)
    slope = 1 - y**2
    return y, lambda dy: dy * slope * (y > -1).astype(x.dtype)


@custom_gradient
def careful(x):
    y = jnp.tanh(x)
    return y, lambda dy: dy * (1 - y**2)


@custom_gradient
def twice(x):
    y = jnp.exp(x)
    kept = {"half": y.astype(jnp.bfloat16), "again": [2 * y / 2]}
    return y, lambda dy: dy * (y + kept["again"][0] + kept["half"].astype(dy.dtype)) / 3


@custom_gradient
def of_an_opaque_object(x):
    class Box:
        __slots__ = ("u", "v")

    box = Box()
    box.u, box.v = jnp.sin(x), jnp.exp(x)
    return box.v, lambda dy: dy * box.v


@custom_gradient
def with_a_jit(x):
    @jax.jit
    def power(x):
        return x**3

    cube = power(x)
    return cube + 1, lambda dy: 3 * dy * cube / x


@custom_gradient
def by_a_pull_back(x):
    y, pull = jax.vjp(lambda x: jnp.sin(x), x)
    return y, pull


SIZE = N * M * F
CASES = {
    careless: {"x": (SIZE, "input"), "y": (SIZE, "output"), "slope": (SIZE, "new")},
    careful: {"y": (SIZE, "output")},
    twice: {
        "y": (SIZE, "output"),
        "kept['half']": (SIZE // 2, "new"),
        "kept['again'][0]": (SIZE, "new"),
    },
    with_a_jit: {"x": (SIZE, "input"), "cube": (SIZE, "new")},
    by_a_pull_back: {f"`cos` ({line(by_a_pull_back.__wrapped__, 2)})": (SIZE, "new")},
    grad_pass_through(jnp.round): {},
}


@pytest.mark.parametrize("h", CASES, ids=lambda h: h.__name__)
def test_names_and_sizes_of_what_a_rule_keeps(h):
    found = explain(h, X)
    assert kept(found) == CASES[h]
    assert found.kept_bytes == sum(size for size, _ in CASES[h].values())
    assert found.new_bytes == sum(n for n, origin in CASES[h].values() if origin == "new")
    assert found.forward_mode is True and found.obstacle == ""
    _, pull = jax.eval_shape(lambda x: jax.vjp(h, x), X)
    assert found.kept_bytes == sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(pull))


def test_an_output_is_kept_at_no_cost():
    """The residual is the output itself."""
    held = []

    @custom_gradient
    def f(x):
        y = jnp.tanh(x)
        held.append(y)
        return y, lambda dy: dy * (1 - y**2)

    y, _ = jax.vjp(f, X)
    assert y.unsafe_buffer_pointer() == held[0].unsafe_buffer_pointer()


def test_the_chunked_cross_entropy_keeps_a_number_per_token():
    tokens, features, vocabulary, chunks = 16, 4, 32, 4

    @custom_gradient
    def loss(x, w, labels):
        xs, targets = x.reshape(chunks, -1, features), labels.reshape(chunks, -1)

        def forward(total, chunk):
            logits = chunk[0] @ w
            normalizer = jax.nn.logsumexp(logits, axis=-1)
            of_label = jnp.take_along_axis(logits, chunk[1][:, None], axis=-1)[:, 0]
            return total + jnp.sum(normalizer - of_label), normalizer

        total, normalizers = lax.scan(forward, jnp.zeros((), x.dtype), (xs, targets))

        def grad(dy):
            def backward(dw, chunk):
                x, labels, normalizer = chunk
                p = jnp.exp(x @ w - normalizer[:, None])
                d_logits = (p - jax.nn.one_hot(labels, vocabulary)) * (dy / tokens)
                return dw + x.T @ d_logits, d_logits @ w.T

            dw, dx = lax.scan(backward, jnp.zeros_like(w), (xs, targets, normalizers))
            return dx.reshape(x.shape), dw, None

        return total / tokens, grad

    shapes = (tokens, features), (features, vocabulary), (tokens,)
    dtypes = jnp.float32, jnp.float32, jnp.int32
    found = explain(loss, *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert kept(found) == {
        "x": (tokens * features * F, "input"),
        "w": (features * vocabulary * F, "input"),
        "xs": (tokens * features * F, "new"),  # in chunks
        "targets": (tokens * 4, "new"),
        "normalizers": (tokens * F, "new"),
    }
    assert gradients(found) == {"x": RULE, "w": RULE, "labels": "none: int32 has no derivative"}
    assert found.autodiff_bytes > tokens * vocabulary * F  # autodiff keeps the logits


def test_what_plain_autodiff_keeps():
    w = W

    @recompute_grad
    def block(x, depth=2):
        for _ in range(depth):
            x = jnp.sin(x @ w)
        return x

    found = explain(block, X, depth=3)
    assert kept(found) == {"w": (M * M * F, "captured"), "x": (SIZE, "input")}
    assert gradients(found) == {"x": "autodiff", "w": "autodiff"} and found.forward_mode is True
    # x and w, the input of each later product, and each cosine.
    assert found.autodiff_bytes == M * M * F + (1 + 2 + 3) * SIZE
    names = [r.name for r in found.autodiff if r.origin == "new"]
    assert set(names) == {f"`{op}` ({line(block.__wrapped__, 3)})" for op in ("sin", "cos")}


def test_what_has_no_ordinary_derivative():
    @custom_gradient
    def root(a):
        x = lax.while_loop(lambda x: x * x > a + 1e-3, lambda x: (x + a / x) / 2, a)
        return x, lambda dy: dy / (2 * x)

    found = explain(root, jnp.float32(2))
    assert kept(found) == {"x": (F, "output")}
    assert found.autodiff is None and found.autodiff_bytes is None
    assert list(found.costs()) == ["value", "gradient"]
    assert ["by", "autodiff", "unknown"] in [row.split() for row in str(found).splitlines()]


# --- what it closes over --------------------------------------------------------------------------


def layer(w, b, **options):
    @custom_gradient(**options)
    def layer(x):
        def grad(dy, variables=None):
            if variables is None:
                return dy @ w.T
            dw, db = x.T @ dy, dy.sum(0, keepdims=True)
            return dy @ w.T, {"w": dw, "b": db} if options else [dw, db]

        return x @ w + b, grad

    return layer


def test_gradients_of_closed_over_values():
    declared = layer(W, B, variables={"w": W, "b": B})
    undeclared = layer(W, B)
    inherited = layer(W, B, variables="autodiff")
    w = W
    scaled = custom_gradient(lambda x, scale=B: (x * scale, lambda dy: dy @ w.T))
    table = jnp.arange(3)
    looked_up = custom_gradient(lambda x: (x[table], lambda dy: x.at[table].set(dy)))
    for h, expected in (
        (declared, {"w": RULE, "b": RULE}),
        (undeclared, {"w": RULE, "b": RULE}),
        (inherited, {"w": "autodiff", "b": "autodiff"}),
        (scaled, {"scale": ERROR, "w": "zero"}),
        (looked_up, {"table": "none: int32 has no derivative"}),
        (grad_pass_through(lambda x: x * w[:1]), {"w": "zero"}),
        (custom_gradient(lambda x: (x * B, lambda dy: dy * B)), {"B": FIXED}),  # global
    ):
        assert gradients(explain(h, X)) == {"x": RULE, **expected}
    with pytest.raises(TypeError, match="differentiated with respect to values"):
        jax.grad(lambda v: custom_gradient(lambda x: (x * v, lambda dy: dy))(X).sum())(B)


class Plain:
    def __init__(self, w):
        self.layers, self.itself = [{"w": w}], self

    @custom_gradient(variables=lambda self: self.layers)
    def __call__(self, x):
        def grad(dy, variables):
            return dy @ variables[0]["w"].T, [{"w": x.T @ dy}]

        return x @ self.layers[0]["w"], grad

    @custom_gradient
    def scaled(self, x, *, scale=2.0):
        return x @ self.layers[0]["w"] * scale, lambda dy: dy @ self.layers[0]["w"].T * scale

    @recompute_grad
    def again(self, x):
        return jnp.tanh(jnp.tanh(x @ self.layers[0]["w"]))


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: jax.Array


class Pair(NamedTuple):
    w: jax.Array
    name: str


HOLDERS = [  # the name of a weight, what holds it, and how to get at it
    ("holder['w']", lambda w: {"w": w}, lambda holder: holder["w"]),
    ("holder[1]", lambda w: ("first", w), lambda holder: holder[1]),
    ("?", lambda w: collections.deque([w]), lambda holder: holder[0]),
    ("holder.w", Slots, lambda holder: holder.w),
    ("holder.w", Frozen, lambda holder: holder.w),
    ("holder.w", lambda w: Pair(w, "name"), lambda holder: holder.w),
    ("holder.layers[0]['w']", Plain, lambda holder: holder.layers[0]["w"]),
    ("holder.layers[0]['w']", lambda w: Plain(w).__call__, lambda h: h.__self__.layers[0]["w"]),
    ("holder.w", lambda w: lambda: w, lambda holder: holder()),
    ("holder.w", lambda w: jax.jit(lambda: w), lambda holder: holder()),
    ("holder.v", lambda w: lambda v=w: v, lambda holder: holder()),
    ("holder.v", lambda w: lambda *, v=w: v, lambda holder: holder()),
    ("holder.args[0]", lambda w: functools.partial(jnp.add, w), lambda holder: holder.args[0]),
    ("holder.w", lambda w: custom_gradient(lambda x: (x @ w, len)), lambda h: h._f(jnp.eye(M))[0]),
]


@pytest.mark.parametrize(("name", "hold", "get"), HOLDERS)
def test_a_weight_is_found_and_named_wherever_it_is_held(name, hold, get):
    holder = hold(W)
    found = explain(recompute_grad(lambda x: jnp.sin(x).sum() * jnp.sin(get(holder)).sum()), X)
    assert gradients(found) == {"x": "autodiff", name: "autodiff"}
    assert kept(found) == {"x": (SIZE, "input"), name: (M * M * F, "captured")}
    assert get(holder) is W or callable(holder)


@pytest.mark.parametrize("bound", [True, False])
def test_methods_and_keywords(bound):
    model = Plain(W)
    found = explain(model.__call__, X) if bound else explain(Plain.__call__, model, X)
    assert gradients(found) == {"x": RULE, "self.layers[0]['w']": RULE}
    assert found.name == "Plain.__call__"
    found = explain(model.scaled, X, scale=jnp.float32(3))
    assert gradients(found) == {"x": RULE, "self.layers[0]['w']": ERROR, "scale": ERROR}
    assert kept(found) == {"self.layers[0]['w']": (M * M * F, "captured"), "scale": (F, "input")}
    assert gradients(explain(model.scaled, X, scale=3.0)) == {
        "x": RULE,
        "self.layers[0]['w']": ERROR,
    }
    assert explain(model.again, X).new_bytes == 0
    assert model.layers[0]["w"] is W and model.itself is model


def test_what_cannot_be_copied_stays_as_it_is():
    w, ref = W, jax.new_ref(jnp.zeros(M))
    product = jax.custom_vjp(lambda x: x @ w)
    product.defvjp(lambda x: (x @ w, w), lambda w, dy: (dy @ w.T,))

    @custom_gradient
    def logged(x):
        def grad(dy):
            ref[...] = dy.sum(0)
            return dy

        return product(x), grad

    found = explain(logged, X)
    assert gradients(found) == {"x": RULE, "product.w": FIXED}
    assert found.forward_mode is False and "`swap`" in found.obstacle
    np.testing.assert_array_equal(ref[...], np.zeros(M))


def test_written_inside_a_rule_what_it_closes_over_is_a_constant():
    inner = []

    @custom_gradient
    def outer(x):
        def grad(dy):
            @custom_gradient
            def scaled(t):
                return t * x, lambda dt: dt * x

            inner.append(scaled)
            return scaled(dy)

        return x * x, grad

    x = jnp.float32(2)
    jax.vjp(outer, x)[1](x)  # eagerly: it closes over the number
    assert gradients(explain(inner[-1], x)) == {"t": RULE, "x": "zero"}


# --- nothing leaks --------------------------------------------------------------------------------


def of_scan(w):
    def step(x, _):
        return jnp.sin(x @ w), None

    @custom_gradient(variables="autodiff")
    def stack(x):
        y, pull = jax.vjp(lambda x: lax.scan(step, x, None, length=3)[0], x)
        return y, lambda dy: pull(7 * dy)[0]

    return stack


def under_scan(w):
    @custom_gradient(variables={"w": w})
    def inner(x):
        return x @ w, lambda dy, variables: (7 * dy @ variables["w"].T, {"w": x.T @ dy})

    @custom_gradient(variables="autodiff")
    def outer(x):
        y = lax.scan(lambda x, _: (inner(x), None), x, None, length=2)[0]
        return y, lambda dy: 5 * dy

    return outer


def of_jit(w):
    @jax.jit
    def product(x, w):
        return x @ w

    return custom_gradient(lambda x: (product(x, w), lambda dy: 7 * product(dy, w.T)))


def of_checkpoint(w):
    inner = recompute_grad(lambda x: jnp.sin(x @ w))
    return custom_gradient(lambda x: (inner(x), lambda dy: 5 * dy))


@pytest.mark.parametrize("make", [of_scan, under_scan, of_jit, of_checkpoint, Plain])
def test_explaining_twice_changes_nothing_for_the_function_itself(make):
    h, fresh = make(W), make(W)
    h, fresh = (h.__call__, fresh.__call__) if make is Plain else (h, fresh)
    first = explain(h, X)
    assert str(explain(h, X)) == str(first) and first.costs()["value"]["flops"] > 0
    for run in (lambda h: h(X), lambda h: jax.grad(lambda x: h(x).sum())(X)):
        np.testing.assert_array_equal(run(h), run(fresh))
        np.testing.assert_array_equal(jax.jit(run, static_argnums=0)(h), run(fresh))


# --- arguments ------------------------------------------------------------------------------------


def test_arguments_of_all_kinds():
    @custom_gradient(convention="jax")
    def f(tree, index, bits, mode="sum", rate=0.5, *, scale, flag=True):
        y = {"p": tree["p"] * scale, "q": tree["q"][index] * rate}

        def grad(dy):
            dq = jnp.zeros_like(tree["q"]).at[index].add(dy["q"] * rate)
            return {"p": dy["p"] * scale, "q": dq}, None, None, None, None

        return y, grad

    tree = {"p": X, "q": np.ones(5, np.float32)}
    found = explain(f, tree, jnp.arange(2), 3, "max", 0.25, scale=B, flag=False)
    assert gradients(found) == {
        "tree['p']": RULE,
        "tree['q']": RULE,
        "index": "none: int32 has no derivative",
        "scale": ERROR,
    }
    assert found.inputs[0].type == "float32[4,8]" and found.captured == []


def test_a_gradient_that_is_none_is_zero():
    found = explain(custom_gradient(lambda x, y: (x * y, lambda dy: (dy * y, None))), X, X)
    assert gradients(found) == {"x": RULE, "y": "zero"}


def test_types_or_numbers_in_the_place_of_arrays():
    found = explain(careful, jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16))
    assert kept(found) == {"y": (512 * 1024 * 2, "output")}
    assert explain(careful, 1.0).inputs == []  # a setting, unless JAX differentiates it


# --- forward mode, values and costs ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "obstacle"),
    [
        (lambda dy: jnp.sin(dy), "`sin`, which JAX cannot transpose"),
        (lambda dy: dy * dy, "`mul` of two upstreams"),
        (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    ],
)
def test_the_operation_and_the_line_in_the_way_of_forward_mode(rule, obstacle):
    h = custom_gradient(lambda x: (x * x, rule))
    found = explain(h, X)
    assert found.forward_mode is False and found.obstacle == f"{obstacle} ({line(rule, 0)})"
    assert str(found).endswith(f"forward mode: no: {found.obstacle}")
    with pytest.raises(TypeError, match=obstacle.partition(" ")[0]):
        jax.jvp(h, (X,), (X,))


def test_a_rule_that_raises():
    def grad(dy):
        raise ValueError("not yet")

    found = explain(custom_gradient(lambda x: (x, grad)), X)
    assert found.forward_mode is None and "ValueError: not yet" in found.obstacle


def test_a_function_that_branches_on_values():
    b = B

    @custom_gradient
    def f(x):
        scale = 2.0 if x.sum() > 0 else 3.0
        mask, t = x > 0, jnp.sin(x)
        return t * b * scale, lambda dy: dy * b * mask.astype(dy.dtype) * t * scale

    found = explain(f, X)
    assert kept(found) == {
        "b": (M * F, "captured"),
        "mask": (N * M, "new"),
        "t": (SIZE, "new"),
    }
    assert gradients(found) == {"x": RULE, "b": ERROR}
    assert found.forward_mode is True and found.costs() == {}
    with pytest.raises(TypeError, match=r"Pass arrays instead of jax\.ShapeDtypeStruct"):
        explain(f, jax.ShapeDtypeStruct((N, M), jnp.float32))


def test_a_rule_that_branches_on_values():
    @custom_gradient
    def f(x):
        n = x * 2
        return n + 1, lambda dy: dy * 2 if n.sum() > 0 else dy

    found = explain(f, X)
    assert kept(found) == {"n": (SIZE, "new")} and found.forward_mode is True
    assert jax.jvp(f, (X,), (X,))[1].sum() == 2 * N * M


def test_costs_of_a_product():
    """A product of N x M and M x M is 2 N M M operations; its gradient is one more of them."""
    found = explain(custom_gradient(lambda x, w: (x @ w, lambda dy: (dy @ w.T, None))), X, W)
    costs = found.costs()
    assert {of: cost["flops"] for of, cost in costs.items()} == {
        "value": 2 * N * M * M,
        "gradient": 2 * N * M * M,
        "gradient by autodiff": 2 * 2 * N * M * M,
    }
    assert costs["value"]["bytes accessed"] == (2 * N * M + M * M) * F
    assert costs["value"]["temporary bytes"] == 0


# --- the table and errors -------------------------------------------------------------------------


def test_the_table():
    lines = str(explain(careful, X)).splitlines()
    assert [row.split() for row in lines[:6]] == [
        "Custom gradient of `careful`".split(),
        ["inputs", "gradient"],
        ["x", "float32[4,8]", "by", "the", "rule"],
        ["kept", "by", "the", "rule"],
        ["y", "float32[4,8]", "128", "B", "output"],
        ["in", "all", "128", "B", "of", "it", "0", "B", "new"],
    ]
    assert lines[-1] == "  forward mode: works"


@pytest.mark.parametrize(
    ("h", "args", "remedy"),
    [
        (jnp.tanh, [X], "Pass the decorated function itself, and its arguments."),
        (jax.jit(careful), [X], r"explain\(h.__wrapped__, ...\)"),
        (functools.wraps(careful)(lambda x: careful(x)), [X], "explain"),
        (3, [X], "but got the int 3"),
        (careful, [X, X], "do not fit its signature"),
    ],
)
def test_what_cannot_be_explained(h, args, remedy):
    with pytest.raises(TypeError, match=remedy):
        explain(h, *args)
