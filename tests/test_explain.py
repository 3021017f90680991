"""Every fact of `explain` against a number that was worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tfgrad_jax import custom_gradient, explain, grad_pass_through, recompute_grad

N, M = 4, 8
F = 4  # bytes of a float32
X, W, B = jnp.ones((N, M)), jnp.full((M, M), 0.5), jnp.ones((1, M))
TABLE = jnp.arange(3)
ERROR = "none: an error where it is differentiated"
UNUSED = "zero: y does not depend on it"


def kept(found):
    return {r.name: (r.bytes, r.origin) for r in found.residuals}


def gradients(found):
    return {c.name: c.gradient for c in found.captured}


def roles(found):
    return {i.name: i.role for i in found.inputs}


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


def test_a_careless_rule_keeps_what_it_could_compute():
    found = explain(careless, X)
    size = N * M * F
    assert kept(found) == {"y": (size, "output"), "slope": (size, "new"), "x": (size, "input")}
    assert found.kept_bytes == 3 * size and found.new_bytes == size


def test_a_careful_rule_keeps_the_output_alone():
    found = explain(careful, X)
    assert kept(found) == {"y": (N * M * F, "output")}
    assert found.new_bytes == 0 and found.forward_mode is True and found.obstacle == ""
    (row,) = found.residuals
    assert (row.shape, row.dtype) == ((N, M), "float32")


def test_an_activation_that_is_kept_twice():
    @custom_gradient
    def twice(x):
        y = jnp.exp(x)
        kept = {"half": y.astype(jnp.bfloat16), "again": [2 * y / 2]}
        same = y

        def grad(dy):
            return dy * (y + same + kept["again"][0] + kept["half"].astype(dy.dtype)) / 4

        return y, grad

    found, size = explain(twice, X), N * M
    (output,) = (r.name for r in found.residuals if r.origin == "output")
    assert output in ("y", "same")  # once, by one of its names
    assert kept(found) == {
        "kept['again'][0]": (4 * size, "new"),
        "kept['half']": (2 * size, "new"),
        output: (4 * size, "output"),
    }
    assert found.kept_bytes == 10 * size and found.new_bytes == 6 * size


def test_the_output_is_the_residual_itself():
    """That it costs nothing is so eagerly, and where one program has both passes."""
    held = []

    @custom_gradient
    def f(x):
        y = jnp.tanh(x)
        held.append(y)
        return y, lambda dy: dy * (1 - y**2)

    y, _ = jax.vjp(f, X)
    assert y.unsafe_buffer_pointer() == held[0].unsafe_buffer_pointer()


@pytest.mark.slow
def test_the_chunked_cross_entropy():
    tokens, features, vocabulary, chunks = 16, 4, 32, 4

    @custom_gradient
    def loss(x, w, labels):
        xs, targets = x.reshape(chunks, -1, features), labels.reshape(chunks, -1)

        def forward(total, chunk):
            x, labels = chunk
            logits = x @ w
            normalizer = jax.nn.logsumexp(logits, axis=-1)
            of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
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

    x, w, labels = (
        jax.ShapeDtypeStruct((tokens, features), jnp.float32),
        jax.ShapeDtypeStruct((features, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    found = explain(loss, x, w, labels)
    assert kept(found) == {
        "x": (tokens * features * F, "input"),
        "w": (features * vocabulary * F, "input"),
        "xs": (tokens * features * F, "new"),  # in chunks
        "targets": (tokens * 4, "new"),
        "normalizers": (tokens * F, "new"),
    }
    assert roles(found)["labels"] == "no derivative"
    # Autodiff keeps numbers for each token and word.
    assert found.autodiff_bytes > tokens * vocabulary * F
    assert found.new_bytes == tokens * (features * F + 4 + F)


@pytest.mark.slow
def test_the_reversible_stack():
    params = {"f": 0.5 * jnp.eye(M), "g": 0.3 * jnp.ones((M, M))}

    def branch(weight, x):
        return jnp.tanh(x @ weight)

    @custom_gradient(variables=params)
    def stack(x1, x2, depth=3):
        def layer(x1, x2):
            y1 = x1 + branch(params["f"], x2)
            return y1, x2 + branch(params["g"], y1)

        for _ in range(depth):
            x1, x2 = layer(x1, x2)
        y1, y2 = x1, x2

        def grad(dy1, dy2, variables):
            totals = jax.tree.map(jnp.zeros_like, variables)
            z1, z2 = y1, y2
            for _ in range(depth):
                g, pull_back = jax.vjp(branch, variables["g"], z1)
                dwg, through = pull_back(dy2)
                dy1, z2 = dy1 + through, z2 - g
                f, pull_back = jax.vjp(branch, variables["f"], z2)
                dwf, through = pull_back(dy1)
                dy2, z1 = dy2 + through, z1 - f
                totals = {"f": totals["f"] + dwf, "g": totals["g"] + dwg}
            return (dy1, dy2, None), totals

        return (y1, y2), grad

    sizes = {depth: explain(stack, X, X, depth) for depth in (1, 4)}
    for found in sizes.values():
        assert kept(found) == {
            "y1": (N * M * F, "output"),
            "y2": (N * M * F, "output"),
            "params['f']": (M * M * F, "captured"),
            "params['g']": (M * M * F, "captured"),
        }
        assert found.new_bytes == 0
        assert set(gradients(found).values()) == {"declared `variables`"}
    # Autodiff keeps at least the input of each matrix product.
    more = sizes[4].autodiff_bytes - sizes[1].autodiff_bytes
    assert more >= 2 * 3 * N * M * F
    assert roles(found)["depth"] == "setting"


def test_the_same_is_kept_as_what_a_differentiated_call_keeps():
    """The leaves of `jax.vjp` under `jit` are the residuals."""
    for h, found in ((careless, explain(careless, X)), (careful, explain(careful, X))):
        _, pull = jax.eval_shape(lambda x, h=h: jax.vjp(h, x), X)
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull)]
        assert sum(sizes) == found.kept_bytes


# --- what it closes over --------------------------------------------------------------------------


def test_declared_variables():
    params = {"w": W, "b": B}

    @custom_gradient(variables=params)
    def layer(x):
        def grad(dy, variables):
            return dy @ variables["w"].T, {"w": x.T @ dy, "b": dy.sum(0, keepdims=True)}

        return x @ params["w"] + params["b"], grad

    found = explain(layer, X)
    declared = "declared `variables`"
    assert gradients(found) == {"params['w']": declared, "params['b']": declared}
    assert kept(found) == {
        "x": (N * M * F, "input"),
        "params['b']": (M * F, "captured"),
        "params['w']": (M * M * F, "captured"),
    }
    assert {c.place for c in found.captured} == {"closure"}
    assert {c.type for c in found.captured} == {"float32[8,8]", "float32[1,8]"}


def test_undeclared_variables():
    w, only_for_the_rule, table = W, B, TABLE

    @custom_gradient
    def layer(x):
        def grad(dy, variables):
            assert len(variables) == 1
            return (dy * only_for_the_rule) @ w.T, [x.T @ dy]

        return x @ w + table[0].astype(x.dtype), grad

    found = explain(layer, X)
    assert gradients(found) == {
        "w": "undeclared `variables`",
        "only_for_the_rule": UNUSED,
        "table": "none: int32 has no derivative",
    }
    assert found.forward_mode is True
    assert kept(found)["only_for_the_rule"] == (M * F, "captured")


def test_no_gradient_for_what_is_closed_over():
    w = W

    def scaled(x, scale=B):
        return x * scale, lambda dy: dy @ w.T

    found = explain(custom_gradient(scaled), X)
    assert gradients(found) == {"scale": ERROR, "w": UNUSED}
    assert {c.name: c.place for c in found.captured} == {"scale": "default", "w": "closure"}

    def loss(scale):
        return custom_gradient(lambda x: scaled(x, scale))(X).sum()

    with pytest.raises(TypeError, match="differentiated with respect to values"):
        jax.grad(loss)(B)


def test_autodiff_of_what_is_closed_over():
    w = W

    @custom_gradient(variables="autodiff")
    def layer(x):
        return x @ w, lambda dy: dy @ w.T

    found = explain(layer, X)
    assert gradients(found) == {"w": "autodiff"}
    assert kept(found) == {"w": (M * M * F, "captured"), "x": (N * M * F, "input")}
    assert found.autodiff_bytes == found.kept_bytes  # a product keeps its operands


class Dense:
    def __init__(self, w, b):
        self.params = {"w": w, "b": b}
        self.name = "dense"
        self.itself = self

    @custom_gradient(variables=lambda self: self.params)
    def __call__(self, x):
        def grad(dy, variables):
            return dy @ variables["w"].T, {"w": x.T @ dy, "b": dy.sum(0, keepdims=True)}

        return x @ self.params["w"] + self.params["b"], grad

    @custom_gradient
    def plain(self, x, *, scale=2.0):
        return x @ self.params["w"] * scale, lambda dy: dy @ self.params["w"].T * scale

    @recompute_grad
    def again(self, x):
        return jnp.tanh(jnp.tanh(x @ self.params["w"]))


@pytest.mark.parametrize("bound", [True, False])
def test_methods(bound):
    dense = Dense(W, B)
    found = explain(dense.__call__, X) if bound else explain(Dense.__call__, dense, X)
    declared = "declared `variables`"
    assert gradients(found) == {"self.params['w']": declared, "self.params['b']": declared}
    assert {c.place for c in found.captured} == {"self"}
    assert roles(found) == {"x": "differentiable"}
    assert found.name == "Dense.__call__"


def test_a_rule_that_holds_its_object():
    found = explain(Dense(W, B).plain, X, scale=jnp.float32(3))
    assert gradients(found) == {
        "self.params['w']": ERROR,
        "self.params['b']": UNUSED,
        "scale": ERROR,
    }
    # The rule is traced: it keeps what it uses.
    assert kept(found) == {
        "self.params['w']": (M * M * F, "captured"),
        "scale": (F, "captured"),
    }
    setting = explain(Dense(W, B).plain, X, scale=3.0)
    assert roles(setting) == {"x": "differentiable", "scale": "setting"}


def test_a_rule_that_holds_an_opaque_object():
    class Box:
        __slots__ = ("u", "v")

    @custom_gradient
    def f(x):
        box = Box()
        box.u, box.v = jnp.sin(x), jnp.exp(x)
        return box.v, lambda dy: dy * box.v

    assert kept(explain(f, X)) == {"box.v": (N * M * F, "output")}


def test_functions_and_cells_that_are_shared():
    w = W

    def affine(x):
        return x @ w

    @custom_gradient
    def f(x):
        def through(dy):
            return dy @ w.T

        return affine(x), lambda dy: through(dy)

    found = explain(f, X)
    assert gradients(found) == {"w": ERROR} or gradients(found) == {"affine.w": ERROR}
    assert found.kept_bytes == M * M * F


def test_what_cannot_be_replaced_is_said():
    w = W
    product = jax.jit(lambda x: x @ w)
    found = explain(custom_gradient(lambda x: (product(x), lambda dy: dy)), X)
    assert [c.gradient for c in found.captured] == ["unknown: it cannot be replaced"]


def test_a_global_variable_is_a_constant():
    found = explain(custom_gradient(lambda x: (x * B, lambda dy: dy * B)), X)
    assert [(c.name, c.place) for c in found.captured] == [("B", "global")]
    assert found.captured[0].gradient == "constant: a global variable"


def test_written_inside_a_rule():
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
    found = explain(inner[-1], x)
    assert gradients(found) == {"x": "constant: written inside a rule"}


# --- the other two of the family ------------------------------------------------------------------


def test_recompute_grad():
    w = W

    @recompute_grad
    def block(x, depth=2):
        for _ in range(depth):
            x = jnp.sin(x @ w)
        return x

    found = explain(block, X, depth=3)
    assert kept(found) == {"w": (M * M * F, "captured"), "x": (N * M * F, "input")}
    assert gradients(found) == {"w": "autodiff"} and found.forward_mode is True
    # Autodiff: x and w, the input of each later product, and each cosine.
    assert found.autodiff_bytes == M * M * F + (1 + 2 + 3) * N * M * F
    assert explain(Dense(W, B).again, X).new_bytes == 0


def test_grad_pass_through():
    found = explain(grad_pass_through(jnp.round), X)
    assert found.residuals == () and found.kept_bytes == 0 and found.forward_mode is True
    b = B
    found = explain(grad_pass_through(lambda x: x * b), X)
    assert gradients(found) == {"b": "undeclared `variables`, the rule returns None"}


# --- arguments ------------------------------------------------------------------------------------


def test_arguments():
    @custom_gradient(convention="jax")
    def f(tree, index, bits, mode="sum", rate=0.5, *, scale, flag=True):
        y = {"p": tree["p"] * scale, "q": tree["q"][index] * rate}

        def grad(dy):
            dq = jnp.zeros_like(tree["q"]).at[index].add(dy["q"] * rate)
            return {"p": dy["p"] * scale, "q": dq}, None, None, None, None

        return y, grad

    tree = {"p": X, "q": np.ones(5, np.float32)}
    found = explain(f, tree, jnp.arange(2), 3, "max", 0.25, scale=B, flag=False)
    assert roles(found) == {
        "tree['p']": "differentiable",
        "tree['q']": "differentiable",
        "index": "no derivative",
        "bits": "setting",
        "mode": "setting",
        "rate": "setting, unless JAX differentiates it",
        "flag": "setting",
    }
    assert {i.name: i.type for i in found.inputs}["tree['p']"] == "float32[4,8]"
    assert gradients(found) == {"scale": ERROR} and found.captured[0].place == "keyword"


def test_an_input_without_a_gradient():
    found = explain(custom_gradient(lambda x, y: (x * y, lambda dy: (dy * y, None))), X, X)
    assert [i.role for i in found.inputs] == [
        "differentiable",
        "differentiable, the rule returns None",
    ]


def test_types_in_the_place_of_arrays():
    shapes = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    found = explain(careful, shapes)
    assert kept(found) == {"y": (512 * 1024 * 2, "output")}


def test_numbers_alone():
    found = explain(careful, 1.0)
    assert kept(found) == {"y": (F, "output")} and found.captured == ()
    assert [i.role for i in found.inputs] == ["setting, unless JAX differentiates it"]


# --- forward mode ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "obstacle"),
    [
        (lambda dy: jnp.sin(dy), "`sin`, which JAX cannot transpose"),
        (lambda dy: dy * dy, "`mul` of two upstreams"),
        (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    ],
)
def test_what_is_in_the_way_of_forward_mode(rule, obstacle):
    h = custom_gradient(lambda x: (x * x, rule))
    found = explain(h, X)
    line = rule.__code__.co_firstlineno
    assert found.forward_mode is False
    assert found.obstacle == f"{obstacle} (test_explain.py:{line})"
    with pytest.raises(TypeError, match=obstacle.partition(" ")[0]):
        jax.jvp(h, (X,), (X,))


@pytest.mark.timeout(60)
def test_a_rule_that_writes_to_a_ref():
    ref = jax.new_ref(jnp.zeros(M))

    @custom_gradient
    def logged(x):
        def grad(dy):
            ref[...] = dy.sum(0)
            return dy

        return x * 1, grad

    found = explain(logged, X)
    assert found.forward_mode is False and "`swap`" in found.obstacle
    assert [(c.type, c.gradient[:7]) for c in found.captured] == [("float32[8]", "unknown")]
    with pytest.raises(TypeError, match="`swap` of an upstream and a constant"):
        jax.jit(lambda x: jax.jvp(logged, (x,), (x,)))(X)


def test_a_rule_that_raises():
    def grad(dy):
        raise ValueError("not yet")

    found = explain(custom_gradient(lambda x: (x, grad)), X)
    assert found.forward_mode is None and "ValueError: not yet" in found.obstacle


# --- values and costs -----------------------------------------------------------------------------


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
        "t": (N * M * F, "new"),
    }
    assert gradients(found) == {"b": ERROR} and found.forward_mode is True
    assert found.costs == () and "branches on values" in found.notes[-1]
    with pytest.raises(TypeError, match=r"Pass arrays instead of jax\.ShapeDtypeStruct"):
        explain(f, jax.ShapeDtypeStruct((N, M), jnp.float32))


def test_a_rule_that_branches_on_values():
    @custom_gradient
    def f(x):
        n = x * 2
        return n + 1, lambda dy: dy * 2 if n.sum() > 0 else dy

    found = explain(f, X)
    assert kept(found) == {"n": (N * M * F, "new")} and found.forward_mode is True
    assert "branches on values" in found.notes[-1]
    assert jax.jvp(f, (X,), (X,))[1].sum() == 2 * N * M


def test_costs_of_a_product():
    """A product of N x M and M x M is 2 N M M operations; its gradient is one more of them."""

    @custom_gradient
    def product(x, w):
        return x @ w, lambda dy: (dy @ w.T, None)

    found = explain(product, X, W)
    costs = {c.of: c for c in found.costs}
    assert costs["value"].flops == 2 * N * M * M
    assert costs["value"].bytes_accessed == (2 * N * M + M * M) * F
    assert costs["value"].temp_bytes == 0
    assert costs["gradient"].flops == 2 * N * M * M
    assert costs["gradient by autodiff"].flops == 2 * 2 * N * M * M


def test_what_the_compiler_does_not_know():
    def f(x):
        return jax.pure_callback(lambda v: v, jax.typeof(x), x), lambda dy: dy

    cost = explain(custom_gradient(f), X).costs[0]
    assert cost.of == "value" and cost.flops in (None, 0.0)


def test_what_has_no_ordinary_derivative():
    @custom_gradient
    def root(a):
        x = lax.while_loop(lambda x: x * x > a + 1e-3, lambda x: (x + a / x) / 2, a)
        return x, lambda dy: dy / (2 * x)

    found = explain(root, jnp.float32(2))
    assert kept(found) == {"x": (F, "output")}
    assert found.autodiff is None and found.autodiff_bytes is None
    assert "plain autodiff does not work" in found.notes[0]
    assert [c.of for c in found.costs] == ["value", "gradient"]
    assert ["by", "autodiff", "unknown"] in [line.split() for line in str(found).splitlines()]


# --- the table and errors -------------------------------------------------------------------------


def test_the_table():
    lines = str(explain(careful, X)).splitlines()
    assert lines[0] == "Custom gradient of `careful`"
    assert [line.split() for line in lines[1:6]] == [
        ["inputs"],
        ["x", "float32[4,8]", "differentiable"],
        ["kept", "by", "the", "rule"],
        ["y", "float32[4,8]", "128", "B", "output"],
        ["in", "all", "128", "B", "of", "it", "0", "B", "new"],
    ]
    assert lines[-1] == "  forward mode: works"


@pytest.mark.parametrize(
    ("h", "remedy"),
    [
        (jnp.tanh, "Pass the decorated function itself, and its arguments."),
        (jax.jit(careful), r"explain\(h.__wrapped__, ...\)"),
        (functools.wraps(careful)(lambda x: careful(x)), "explain"),
        (3, "but got the int 3"),
    ],
)
def test_what_is_no_custom_gradient(h, remedy):
    with pytest.raises(TypeError, match=remedy):
        explain(h, X)


def test_arguments_that_do_not_fit():
    with pytest.raises(TypeError, match="do not fit its signature"):
        explain(careful, X, X)


def test_the_arguments_are_not_changed():
    dense = Dense(W, B)
    explain(dense.__call__, X)
    assert dense.params["w"] is W and dense.itself is dense
