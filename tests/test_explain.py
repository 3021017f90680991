"""Each fact that `explain` reports, against a number worked out on paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tfgrad_jax import custom_gradient, explain, grad_pass_through, recompute_grad

N, M, F = 4, 8, 4  # rows, columns, bytes of a float32
X, W, B = jnp.ones((N, M)), jnp.full((M, M), 0.5), jnp.ones((1, M))
OF_X, OF_W = N * M * F, M * M * F
RULE = "by the rule"
ERROR = "none: an error where it is differentiated"


def kept(found):
    return {r.name: (r.bytes, r.origin) for r in found.residuals}


def gradients(found):
    return {row.name: row.gradient for row in (*found.inputs, *found.captured)}


def line(f, offset=0):
    return f"test_explain.py:{f.__code__.co_firstlineno + offset}"


@custom_gradient
def careful(x):
    y = jnp.tanh(x)
    return y, lambda dy: dy * (1 - y**2)


@custom_gradient
def with_containers(x):
    y = jnp.exp(x)
    kept = {"half": y.astype(jnp.bfloat16), "again": [2 * y / 2]}
    return y, lambda dy: dy * (y + kept["again"][0] + kept["half"].astype(dy.dtype)) / 3


@custom_gradient
def with_a_number(x):
    y = jnp.tanh(x)
    return (y, 2.0), lambda dy, _: dy * (1 - y**2)


@custom_gradient
def with_a_pull_back(x):
    y, pull = jax.vjp(jnp.sin, x)
    return y, pull


KEPT = {
    careful: {"y": (OF_X, "output")},
    with_a_number: {"y": (OF_X, "output")},
    with_containers: {
        "y": (OF_X, "output"),
        "kept['half']": (OF_X // 2, "new"),
        "kept['again'][0]": (OF_X, "new"),
    },
    with_a_pull_back: {f"`cos` ({line(with_a_pull_back.__wrapped__, 2)})": (OF_X, "new")},
    grad_pass_through(jnp.round): {},
}


@pytest.mark.parametrize("h", KEPT, ids=lambda h: h.__name__)
def test_names_and_sizes_of_what_a_rule_keeps(h):
    found = explain(h, X)
    assert kept(found) == KEPT[h]
    assert found.kept_bytes == sum(size for size, _ in KEPT[h].values())
    assert found.new_bytes == sum(n for n, origin in KEPT[h].values() if origin == "new")
    assert (found.forward_mode, found.obstacle) == (True, "")
    leaves = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(h, x)[1], X))
    assert found.kept_bytes == sum(v.size * v.dtype.itemsize for v in leaves)


def test_the_output_is_told_from_what_is_new_where_a_weight_has_a_gradient():
    w = jnp.float32(2)

    def f(x):
        y = w * jnp.exp(x)
        return y, lambda dy, variables=(): (dy * y, [jnp.sum(dy * y) / w]) if variables else dy * y

    expected = {"w": (4, "captured"), "y": (OF_X, "output")}
    assert kept(explain(custom_gradient(f), X)) == expected
    assert kept(explain(custom_gradient(f, variables="autodiff"), X))["y"] == (OF_X, "output")


def test_what_plain_autodiff_keeps():
    w = W

    @recompute_grad
    def block(x, depth=2):
        for _ in range(depth):
            x = jnp.sin(x @ w)
        return x

    found = explain(block, X, depth=3)
    assert kept(found) == {"w": (OF_W, "captured"), "x": (OF_X, "input")}
    assert gradients(found) == {"x": "autodiff", "w": "autodiff"} and found.forward_mode is True
    # x and w, the input of each later product, and each cosine.
    assert found.autodiff_bytes == OF_W + (1 + 2 + 3) * OF_X
    names = {r.name for r in found.autodiff if r.origin == "new"}
    assert names == {f"`{name}` ({line(block.__wrapped__, 3)})" for name in ("sin", "cos")}


@jax.jit
def back(dy):
    return lax.cond(dy.sum() > 0, lambda dy: dy @ W.T, lambda dy: dy @ COUNTS.astype(dy.dtype), dy)


COUNTS, UNUSED = jnp.arange(M * M).reshape(M, M), jnp.ones(M)
T = jnp.ones(M)  # has the name of an attribute


def test_an_array_in_a_global_variable_is_kept_and_not_new():
    def linear(x):
        return x @ W, lambda dy: dy @ W.T

    def branches(x):
        return x @ W if x.sum() > 0 else x, lambda dy: dy @ W.T

    x, w = (OF_X, "input"), (OF_W, "captured")
    jitted = custom_gradient(lambda x: (x, lambda dy: back(dy) + 0 * len(UNUSED)))
    for h, expected in (
        (recompute_grad(lambda x: jnp.tanh(x @ W)), {"x": x, "W": w}),
        (custom_gradient(lambda x: jax.vjp(lambda x: x @ W, x)), {"W": w}),
        (custom_gradient(linear), {"W": w}),
        (custom_gradient(branches), {"W": w}),
        (custom_gradient(lambda x: (x @ W, lambda dy: dy)), {}),
        (jitted, {"W": w, "COUNTS": w}),
    ):
        found = explain(h, X)
        assert (kept(found), found.new_bytes) == (expected, 0)
        assert {row.gradient for row in found.captured} == {"unknown: a global variable"}
    assert explain(custom_gradient(lambda x: (x.T.T, lambda dy: dy.T.T)), X).captured == []


def test_forward_mode_of_what_is_recomputed():
    clipped = custom_gradient(lambda x: (2 * x, lambda dy: jnp.clip(dy, -1, 1)))
    block = recompute_grad(lambda x: jnp.sin(clipped(x)))
    found = explain(block, X)
    assert found.forward_mode is False and "which is not linear" in found.obstacle
    with pytest.raises(TypeError, match="not linear"):
        jax.jvp(block, (X,), (X,))


def test_what_has_no_ordinary_derivative():
    @custom_gradient
    def root(a):
        x = lax.while_loop(lambda x: x * x > a + 1e-3, lambda x: (x + a / x) / 2, a)
        return x, lambda dy: dy / (2 * x)

    found = explain(root, jnp.float32(2))
    assert kept(found) == {"x": (F, "output")}
    assert found.autodiff is None and found.autodiff_bytes is None
    rows = [" ".join(row.split()) for row in str(found).splitlines()]
    assert "by autodiff unknown" in rows and "total 4 B of which 0 B new" in rows


def dense(w, b, **options):
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
    w = W

    def scaled(x, scale=B):
        return x * scale, lambda dy: dy @ w.T

    for h, expected in (
        (dense(W, B, variables={"w": W, "b": B}), {"w": RULE, "b": RULE}),
        (dense(W, B), {"w": RULE, "b": RULE}),
        (dense(W, B, variables="autodiff"), {"w": "autodiff", "b": "autodiff"}),
        (custom_gradient(scaled), {"scale": ERROR, "w": "zero"}),
        (
            grad_pass_through(lambda x: x * w[:1] * B),
            {"w": "zero", "B": "unknown: a global variable"},
        ),
    ):
        assert gradients(explain(h, X)) == {"x": RULE, **expected}
    with pytest.raises(TypeError, match="differentiated with respect to values"):
        jax.grad(lambda v: custom_gradient(lambda x: scaled(x, v))(X).sum())(B)


class Model:
    def __init__(self, w):
        self.layers, self.itself = [{"w": w}], self

    @custom_gradient(variables=lambda self: self.layers)
    def __call__(self, x):
        w = self.layers[0]["w"]
        return x @ w, lambda dy, variables: (7 * dy @ w.T, [{"w": x.T @ dy}])

    @custom_gradient
    def scaled(self, x, *, scale=2.0):
        return x @ self.layers[0]["w"] * scale, lambda dy: dy @ self.layers[0]["w"].T * scale


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


class Lock(Slots):
    def __del__(self):  # so it is not copied
        pass


HOLDERS = [  # the name of a weight, what holds it, and how to get at it
    ("holder['w']", lambda w: {"w": w}, lambda holder: holder["w"]),
    ("holder[0]", lambda w: [w], lambda holder: holder[0]),
    ("holder.w", Slots, lambda holder: holder.w),
    ("holder.layers[0]['w']", Model, lambda holder: holder.layers[0]["w"]),
    ("holder.layers[0]['w']", lambda w: Model(w).__call__, lambda h: h.__self__.layers[0]["w"]),
    ("holder.w", lambda w: lambda: w, lambda holder: holder()),
    ("holder.w", lambda w: jax.jit(lambda: w), lambda holder: holder()),
    ("holder.v", lambda w: lambda v=w: v, lambda holder: holder()),
    ("holder.v", lambda w: lambda *, v=w: v, lambda holder: holder()),
    ("holder.args[0]", lambda w: functools.partial(jnp.add, w), lambda holder: holder.args[0]),
    ("holder.w", lambda w: dense(w, 0, variables="autodiff"), lambda h: h(jnp.eye(M))),
]


def test_what_a_policy_keeps_is_named_by_its_operation():
    block = recompute_grad(lambda x: jnp.sin(x @ W), policy=jax.checkpoint_policies.dots_saveable)
    line = block.__wrapped__.__code__.co_firstlineno
    new = [r for r in explain(block, jnp.ones((2, W.shape[0]))).residuals if r.origin == "new"]
    assert [r.name for r in new] == [f"`dot_general` (test_explain.py:{line})"]


@pytest.mark.parametrize(("name", "hold", "get"), HOLDERS, ids=[name for name, *_ in HOLDERS])
def test_a_weight_is_found_and_named_wherever_it_is_held(name, hold, get):
    holder = hold(W)
    found = explain(grad_pass_through(lambda x: x * jnp.sin(get(holder)).sum()), X)
    assert gradients(found) == {"x": RULE, name: "zero"}
    assert found.autodiff_bytes >= OF_W  # it is differentiated there: each cosine is kept
    np.testing.assert_array_equal(get(holder), W)


def test_methods_and_keywords():
    model, name = Model(W), "self.layers[0]['w']"
    for h, *args in ((model, X), (model.__call__, X), (Model.__call__, model, X)):
        found = explain(h, *args)
        assert gradients(found) == {"x": RULE, name: RULE} and found.name == "Model.__call__"
    found = explain(model.scaled, X, scale=jnp.float32(3))
    assert gradients(found) == {"x": RULE, name: ERROR, "scale": ERROR}
    assert kept(found) == {name: (OF_W, "captured"), "scale": (F, "input")}
    assert gradients(explain(model.scaled, X, scale=3.0)) == {"x": RULE, name: ERROR}
    partial = functools.partial(Model.scaled, model, scale=3.0)
    assert gradients(explain(partial, X)) == {"x": RULE, name: ERROR}
    assert model.layers[0]["w"] is W and model.itself is model


def test_what_cannot_be_copied_stays_as_it_is():
    lock, ref = Lock(W), jax.new_ref(jnp.zeros(M))

    @custom_gradient
    def logged(x):
        def grad(dy):
            ref[...] = dy.sum(0)
            return dy

        return x @ lock.w, grad

    found, why = explain(logged, X), "unknown: `Lock` defines `__del__`: not copied"
    assert gradients(found) == {"x": RULE, "lock.w": why}
    assert found.forward_mode is False and "`swap`" in found.obstacle
    np.testing.assert_array_equal(ref[...], np.zeros(M))


def of_scan(w):
    def step(x, _):
        return jnp.sin(x @ w), None

    def f(x):
        y, pull = jax.vjp(lambda x: lax.scan(step, x, None, length=3)[0], x)
        return y, lambda dy: pull(7 * dy)[0]

    return custom_gradient(f)


def of_jit(w):
    product = jax.jit(lambda x: x @ w)
    return custom_gradient(lambda x: (product(x), lambda dy: 7 * product(dy)))


@pytest.mark.parametrize(
    "make", [of_scan, of_jit, lambda w: Model(w).__call__], ids=["scan", "jit", "method"]
)
def test_explaining_twice_changes_nothing_for_the_function_itself(make):
    h, fresh = make(W), make(W)
    first = explain(h, X)
    assert str(explain(h, X)) == str(first)
    for run in (lambda h: h(X), lambda h: jax.grad(lambda x: h(x).sum())(X)):
        np.testing.assert_array_equal(run(h), run(fresh))
        np.testing.assert_array_equal(jax.jit(run, static_argnums=0)(h), run(fresh))


def test_arguments_of_all_kinds():
    @custom_gradient(convention="jax")
    def f(tree, index, bits, mode="sum", rate=0.5, *, scale, flag=True):
        y = {"p": tree["p"] * scale, "q": tree["q"][index] * rate}

        def grad(dy):
            dq = jnp.zeros_like(tree["q"]).at[index].add(dy["q"] * rate)
            return {"p": None, "q": dq}, None, None, None, None

        return y, grad

    tree = {"p": X, "q": np.ones(5, np.float32)}
    found = explain(f, tree, jnp.arange(2), 3, "max", 0.25, scale=B, flag=False)
    assert gradients(found) == {
        "tree['p']": "zero",
        "tree['q']": RULE,
        "index": "none: int32 has no derivative",
        "scale": ERROR,
    }
    found = explain(careful, jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16))
    assert kept(found) == {"y": (512 * 1024 * 2, "output")}
    assert explain(careful, 1.0).inputs == []  # a setting, unless JAX differentiates it
    with_ref = custom_gradient(lambda x, ref: (x * ref[...], lambda dy: (7 * dy, None)))
    assert gradients(explain(with_ref, X, jax.new_ref(X))) == {"x": RULE}
    index = custom_gradient(lambda x: (jnp.argmax(x), lambda dy: None))
    with pytest.warns(UserWarning, match="no output that has a gradient"):
        assert gradients(explain(index, X)) == {"x": "zero"}
    with pytest.raises(TypeError, match=r"Pass the decorated function itself, .*h\.__wrapped__"):
        explain(jax.jit(recompute_grad(jnp.sin)), X)


OBSTACLES = [
    (lambda dy: jnp.sin(dy), "`sin`, which is not linear"),
    (lambda dy: dy * dy, "`mul` of two upstreams"),
    (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    (lambda dy: X, "a gradient that is not zero and does not depend on the upstreams"),
]


@pytest.mark.parametrize(("rule", "obstacle"), OBSTACLES, ids=[text for _, text in OBSTACLES])
def test_the_operation_and_the_line_in_the_way_of_forward_mode(rule, obstacle):
    h = custom_gradient(lambda x: (x * x, rule))
    found = explain(h, X)
    assert found.forward_mode is False and found.obstacle == f"{obstacle} ({line(rule)})"
    assert str(found).endswith(f"forward mode: no: {found.obstacle}")
    with pytest.raises(TypeError, match=obstacle.partition(",")[0]):
        jax.jvp(h, (X,), (X,))


def test_the_line_is_that_of_the_operation_not_of_the_rule():
    w = jnp.float32(2)

    def grad(dy):
        scaled = 2 * w * dy
        return jnp.clip(scaled, -1, 1)

    found = explain(custom_gradient(lambda x: (w * x, grad)), X)
    assert found.obstacle.endswith(f"(in `clip`) ({line(grad, 2)})")


def test_a_rule_that_raises():
    found = explain(custom_gradient(lambda x: (x, lambda dy: 1 / 0)), X)
    assert found.forward_mode is None
    assert found.obstacle == "the rule raised ZeroDivisionError: division by zero"


def test_a_function_that_branches_on_values():
    b = 2 * B

    @custom_gradient
    def f(x):
        scale = 2.0 if x.sum() > 0 else 3.0
        mask, t = x > 0, jnp.sin(x)
        return t * b * B * scale, lambda dy: dy * b * B * mask.astype(dy.dtype) * t * scale

    found = explain(f, X)
    new = {"mask": (N * M, "new"), "t": (OF_X, "new")}
    assert kept(found) == {"b": (M * F, "captured"), "B": (M * F, "captured"), **new}
    assert gradients(found) == {"x": RULE, "b": ERROR, "B": "unknown: a global variable"}
    assert found.forward_mode is True


def test_an_output_of_a_function_that_branches_on_values_is_none_that_is_new():
    def branches(x):
        y = jnp.tanh(x) if x.sum() > 0 else x
        return y, lambda dy: dy * (1 - y**2)

    assert kept(explain(custom_gradient(branches), X)) == {"y": (OF_X, "output")}


def test_an_output_of_another_decorated_function_has_the_name_of_its_operation():
    @custom_gradient
    def outer(x):
        y, pull = jax.vjp(careful, x)
        return 2 * y, lambda dy: pull(2 * dy)

    # The line is that of the call in `outer`.
    assert kept(explain(outer, X)) == {f"`tanh` ({line(outer.__wrapped__, 2)})": (OF_X, "new")}


def test_a_rule_that_branches_on_values():
    @custom_gradient
    def f(x):
        n = x * 2
        return n + 1, lambda dy: dy * 2 if n.sum() > 0 else dy

    found = explain(f, X)
    assert kept(found) == {"n": (OF_X, "new")} and found.forward_mode is True
    assert jax.jvp(f, (X,), (X,))[1].sum() == 2 * N * M


def test_residuals_show_how_they_are_sharded_over_an_explicit_mesh():
    kinds, by = (jax.sharding.AxisType.Explicit,) * 2, jax.sharding.PartitionSpec(("a", "b"), None)
    with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)):
        (row,) = explain(careful, jax.device_put(X, by)).residuals
    assert row.type == "float32[4@(a,b),8]"
