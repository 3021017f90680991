"""Each fact that `explain` reports, against a number worked out on paper."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tfgrad_jax import custom_gradient, explain, grad_pass_through, recompute_grad

N, M, F = 4, 8, 4  # rows, columns, bytes of a float32
X, W = jnp.ones((N, M)), jnp.full((M, M), 0.5)
OF_X, OF_W = N * M * F, M * M * F
RULE = "by the rule"


def kept(found):
    return {r.name: (r.bytes, r.origin) for r in found.residuals}


@custom_gradient
def careful(x):
    y = jnp.tanh(x)
    return {"a": y, "b": 2.0}, lambda dy, _: dy * (1 - y**2)


@custom_gradient
def careless(x):
    y = jnp.tanh(x)
    slope = (1 - y**2).astype(jnp.bfloat16)
    return 2 * y, lambda dy: dy * slope.astype(dy.dtype) * 2


class Scale:
    def __init__(self, w):
        self.w = w

    @custom_gradient(variables=lambda self: self.w)
    def __call__(self, x):
        return x @ self.w, lambda dy, variables: (dy @ self.w.T, x.T @ dy)


LINE = careless.__wrapped__.__code__.co_firstlineno + 3
SIN_SIN = recompute_grad(lambda x: jnp.sin(jnp.sin(x)))
SLOPE = f"`convert_element_type` (test_explain.py:{LINE}:12)"
KEPT = {
    "an output": (careful, {"y['a']": (OF_X, "output")}),
    "what it computes": (careless, {SLOPE: (OF_X // 2, "new")}),
    "nothing": (grad_pass_through(jnp.round), {}),
    "its input": (custom_gradient(lambda x: (x * x, lambda d: 2 * x * d)), {"x": (OF_X, "input")}),
    "to compute again": (SIN_SIN, {"x": (OF_X, "input")}),
    "a constant": (custom_gradient(lambda x: (x @ W, lambda dy: dy @ W.T)), {}),
}


@pytest.mark.parametrize("kind", KEPT)
def test_names_and_sizes_of_what_is_kept(kind):
    h, expected = KEPT[kind]
    found = explain(h, X)
    assert kept(found) == expected
    assert found.kept_bytes == sum(size for size, _ in expected.values())
    assert found.new_bytes == sum(n for n, origin in expected.values() if origin == "new")
    assert (found.forward_mode, found.obstacle) == (True, "")
    leaves = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(h, x)[1], X))
    assert found.kept_bytes == sum(v.size * v.dtype.itemsize for v in leaves)
    assert found == explain(h, jax.ShapeDtypeStruct(X.shape, X.dtype))


def test_prints_as_a_table():
    lines = str(explain(careless, jnp.ones((512, 512)))).splitlines()
    assert lines[0] == "Custom gradient of `careless`"
    assert lines[1].split() == ["inputs", "gradient"]
    assert lines[2].split() == ["x", "float32[512,512]", "by", "the", "rule"]
    assert lines[3] == "  kept for the backward pass"
    assert lines[4].split()[2:] == ["bfloat16[512,512]", "524,288", "B", "new"]
    assert lines[5].split() == ["total", "524,288", "B", "of", "which", "524,288", "B", "new"]
    assert lines[6] == "  forward mode: works" and len(lines) == 7


def test_the_gradients_of_arguments_of_all_kinds():
    @custom_gradient(convention="jax")
    def f(tree, index, bits, mode="sum", rate=0.5, *, flag=True):
        y = {"p": tree["p"] * 2, "q": tree["q"][index] * rate}

        def grad(dy):
            dq = jnp.zeros_like(tree["q"]).at[index].add(dy["q"] * rate)
            return {"p": None, "q": dq}, None, None, None, jnp.sum(dy["q"])

        return y, grad

    found = explain(f, {"p": X, "q": jnp.ones(5)}, jnp.arange(2), 3, "max", 0.25, flag=False)
    assert [tuple(row) for row in found.inputs] == [
        ("tree['p']", "float32[4,8]", "zero"),
        ("tree['q']", "float32[5]", RULE),
        ("index", "int32[2]", "none: int32 has no derivative"),
        ("rate", "float32[]", RULE),
    ]
    assert [tuple(row) for row in explain(careful, 1.0).inputs] == [("x", "float32[]", RULE)]
    assert explain(jnp.sin, X).inputs[0].gradient == "autodiff"


def test_methods_layers_and_partials():
    layer = Scale(W)
    for h, *args in ((layer, X), (layer.__call__, X), (Scale.__call__, layer, X)):
        found = explain(h, *args)
        assert found.name == "Scale.__call__" and found.inputs[0].gradient == RULE
        assert kept(found) == {"x": (OF_X, "input")} or found.kept_bytes == OF_X + OF_W
    assert explain(functools.partial(layer.__call__), X).inputs[0].name == "x"


def test_what_is_in_the_way_of_forward_mode():
    found = explain(custom_gradient(lambda x: (x * x, lambda dy: jnp.clip(dy, -1, 1))), X)
    assert found.forward_mode is False and "`max`, which is not linear" in found.obstacle
    assert str(found).endswith(f"forward mode: no: {found.obstacle}")


def test_an_error_of_the_function_stays_as_it_is():
    branches = custom_gradient(lambda x: (x if x.sum() > 0 else -x, lambda dy: dy))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        explain(branches, X)
    with pytest.raises(ZeroDivisionError):
        explain(custom_gradient(lambda x: (x, lambda dy: 1 / 0)), X)


def test_residuals_show_how_they_are_sharded_over_an_explicit_mesh():
    kinds, by = (jax.sharding.AxisType.Explicit,) * 2, jax.sharding.PartitionSpec(("a", "b"), None)
    with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)):
        (row,) = explain(careful, jax.device_put(X, by)).residuals
    assert row.type == "float32[4@(a,b),8]"
