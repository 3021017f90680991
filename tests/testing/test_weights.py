"""Weights: those that are passed or declared are checked, all others are named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checked import X

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import assert_gradient, check_gradient

W = jnp.asarray([1.5, -0.5, 2.0], jnp.float32)
SEVEN = "declared = 7 * expected"  # what each wrong layer declares of its weight


def of(w, x, factor=7):
    """Return the value of a layer, and its rule: right of `x`, `factor` times too much of `w`."""
    return jnp.sin(x) * w**2, lambda dy, variables: (
        dy * jnp.cos(x) * w**2,
        jax.tree.map(lambda _: factor * 2 * dy * jnp.sin(x) * w, variables),
    )


class Layer:
    def __init__(self, w, factor=7):
        self.params, self.factor = {"w": w}, factor

    @custom_gradient(variables=lambda self: self.params)
    def __call__(self, x):
        # Its rule reads the weight when it runs.
        return of(self.params["w"], x)[0], lambda dy, variables: (
            dy * jnp.cos(x) * self.params["w"] ** 2,
            {"w": self.factor * 2 * dy * jnp.sin(x) * self.params["w"]},
        )

    @custom_gradient(variables=lambda self: self.params)
    def nested(self, x):  # the same derivatives, by another decorated method of the same weight
        y, pull = jax.vjp(lambda p, x: Layer(p["w"], 1)(x), self.params, x)
        return y, lambda dy, variables: (pull(dy)[1], {"w": self.factor * pull(dy)[0]["w"]})


def declared(w, factor=7):
    return custom_gradient(lambda x: of(w, x, factor), variables=w)


def branching(w):
    return custom_gradient(lambda x: of(w if w[0] > 0 else -w, x), variables=w)


def in_inner_functions(w):
    def f(x):
        y = jax.vmap(lambda s, w: s * jax.grad(lambda t: t**3 / 3)(w))(jnp.sin(x), w)
        kept = jax.lax.scan(lambda y, _: (y, jax.nn.relu(w * w) / w), y, None, length=1)[1][0]
        return y * kept / w, of(w, x)[1]

    return custom_gradient(f, variables=w)


NAME = "variables['w']"
DECLARED = {  # what declares its weight, and the name that this has
    "an object": (Layer, NAME),
    "a nested call": (lambda w: Layer(w).nested, NAME),
    "a closure": (declared, "variables"),
    "a branch on it": (branching, "variables"),
    "inner functions": (in_inner_functions, "variables"),
    "held twice": (lambda w: custom_gradient(lambda x: of(w, x), variables=[w, w]), "variables[0]"),
}


@pytest.mark.parametrize("way", DECLARED)
def test_a_declared_weight_is_checked_wherever_it_is_held(way):
    make, name = DECLARED[way]
    w = jnp.array(W)
    h = make(w)
    report = check_gradient(h, X)
    wrong = SEVEN if way != "held twice" else "declared = 14 * expected"
    assert [(r.argument, r.note) for r in report.rows] == [("x", ""), (name, wrong)]
    assert report.unchecked == () and not report.ok
    np.testing.assert_array_equal(w, W)
    assert check_gradient(h, W * 0 + w).rows[1].note == wrong  # at its own weight


@jax.custom_vjp
def sevenfold(w):
    return w


sevenfold.defvjp(lambda w: (w, None), lambda _, dw: (7 * dw,))


def test_a_reference_may_have_a_rule_for_a_declared_weight():
    layer = Layer(jnp.array(W))
    reference = lambda x: of(sevenfold(layer.params["w"]), x)[0]  # noqa: E731
    report = check_gradient(layer, X, expect="surrogate", reference=reference)
    assert report and all(row.autodiff < 1e-5 for row in report.rows), report


@pytest.mark.parametrize("way", ["an object", "a nested call", "a closure"])
def test_second_derivatives_by_declared_weights(way):
    make, name = DECLARED[way]
    report = check_gradient(make(jnp.array(W)), X, order=2, near=1)
    rows = {(r.order, r.argument): r.ok for r in report.rows}
    # From the second order on, the declared gradient is the value: that one is consistent.
    assert rows == {(1, "x"): True, (1, name): False} | dict.fromkeys(
        [(2, "x"), (2, name), (2, "dy")], True
    )
    right = Layer(jnp.array(W), 1) if way != "a closure" else declared(jnp.array(W), 1)
    assert_gradient(right, X, order=2)


def test_what_is_passed_is_checked():
    for h, *args in (
        (lambda w, x: Layer(w)(x), W, X),
        (lambda params, x: Layer(params["w"])(x), {"w": W}, X),
        (jax.jit(jax.vmap(lambda w, x: Layer(w)(x))), W[None], X[None]),
        (functools.partial(lambda scale, w, x: scale * Layer(w)(x), 2.0), W, X),
    ):
        report = check_gradient(h, *args)
        assert [r.note for r in report.rows] == [SEVEN, ""] and report.unchecked == (), report


GLOBAL = Layer(jnp.array(W))
TWO = jnp.float32(2)


def beside(w):
    """Return a layer that declares one of two weights."""
    return custom_gradient(lambda x: (of(w, x)[0] + w[::-1] * TWO, of(w, x)[1]), variables=w)


def inside_a_jit(w):
    value = jax.jit(lambda x: of(w, x)[0])
    return custom_gradient(lambda x: (value(x), of(w, x)[1]), variables=w)


def undeclared(w):
    return custom_gradient(lambda x: of(w, x))


ELSEWHERE = "variables (also where it is not replaced, as inside of a `jax.jit`)"
HELD = {  # what holds a weight, and how it is named
    "a Python number": (lambda w: declared(2.7),
                        "variables (the float 2.7: make it a `jax.Array`)"),
    "a NumPy array": (lambda w: Layer(np.asarray(w)),
                      "variables['w'] (an array of dtype float32"),
    "one of two": (beside, "a float32[] (test_weights.py:"),
    "undeclared": (undeclared, "a float32[3] (test_weights.py:"),
    "inside a jit": (inside_a_jit, ELSEWHERE),
    "a global object": (lambda w: lambda x: GLOBAL(x) if x.sum() > 0 else x,
                        "a float32[3] (test_weights.py:"),
    "under jit": (lambda w: jax.jit(undeclared(w)), "a float32[3] (test_weights.py:"),
    "the argument itself": (lambda w: lambda x: X * x, "a float32[3] (test_weights.py:"),
    "an output": (lambda w: lambda x: (x, w), "a float32[3] ("),
}  # fmt: skip


@pytest.mark.parametrize("way", HELD)
def test_a_weight_that_is_not_checked_is_named_and_fails(way):
    make, name = HELD[way]
    report = check_gradient(make(jnp.array(W)), X)
    (found,) = report.unchecked
    assert found.startswith(name) and not report
    head = str(report).partition("\n")[0]
    assert head.endswith(": not checked in full" if report.ok else ": WRONG")
    (text,) = [fact.text for fact in report.facts if fact.name == "not checked"]
    assert text.startswith(found) and "`check_gradient(lambda w, x: make(w)(x), w, x)`" in text
    if report.ok:
        with pytest.raises(AssertionError, match="\n  not checked "):
            assert_gradient(make(jnp.array(W)), X)
        assert_gradient(make(jnp.array(W)), X, unchecked="allow")


def test_a_keyword_only_array_is_a_weight_of_a_rule():
    h = custom_gradient(lambda x, *, scale: (x * scale, lambda dy: dy * scale))
    report = check_gradient(h, X, kwargs={"scale": 2 * W})
    assert [r.argument for r in report.rows] == ["x"]
    assert report.unchecked[0].startswith("scale (test_weights.py:")
    assert check_gradient(h, X, kwargs={"scale": 2.0})


def test_what_is_no_weight_is_not_named():
    number, table = jnp.arange(3), np.arange(3, dtype=np.float32)

    @custom_gradient
    def h(x):
        y = jnp.cos(x) * jnp.array([1.0, 2.0, 3.0]) * number.astype(x.dtype) + table * x[0]
        noise = jax.random.normal(jax.random.key(0), (3,)) + jnp.float32(2)
        return y + noise, jax.vjp(lambda x: jnp.cos(x) * table * (table + 1) + table * x[0], x)[1]

    report = check_gradient(h, X, near=0)
    assert report.unchecked == (), report
    ordinary = custom_gradient(lambda x: (x * W, lambda dy: dy * W), variables="autodiff")
    assert check_gradient(ordinary, X)
    # The gradient of the reference may be another one than JAX's.
    report = check_gradient(ordinary, X, expect="surrogate", reference=lambda x: x * W)
    assert report.unchecked and not report


@pytest.mark.parametrize("w", [2.0, np.float32(2)], ids=["a number", "of NumPy"])
@pytest.mark.parametrize("is_method", [False, True])
def test_a_rule_that_wants_variables_and_gets_none_is_not_checked(w, is_method):
    class Scale:
        @custom_gradient
        def __call__(self, x):
            return w * x, lambda dy, variables: (dy * w, [100 * jnp.sum(dy * x) for _ in variables])

    @custom_gradient
    def scale(x):
        return w * x, lambda dy, variables: (dy * w, [100 * jnp.sum(dy * x) for _ in variables])

    report = check_gradient(Scale() if is_method else scale, X)
    assert (
        report.ok and not report and report.unchecked[0].startswith("its weights (the rule takes")
    )
