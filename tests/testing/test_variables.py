"""Weights that a function closes over, and `primal`: both are checked."""

import jax.numpy as jnp
import numpy as np
import pytest
from checking import ONES, X, fact, half_square, notes, quick

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import check_gradient

GLOBAL = jnp.ones(3)
FORGOTTEN = "declared no gradient, expected one: forgotten among those of `variables`?"
POWER = "at points[1]: declared = 1 x expected x `{}`**-1"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({}, {}),
        ({"b": lambda w, x, dy: None}, {"b": FORGOTTEN}),
        ({"w": lambda w, x, dy: dy * 2 * x}, {"w": POWER.format("params['w']")}),
        (
            {"w": lambda w, x, dy: dy, "b": lambda w, x, dy: dy * 2 * w * x},
            {"b": "swapped with `params['w']`?", "w": "swapped with `params['b']`?"},
        ),
        ({"unused": lambda w, x, dy: jnp.ones(2)}, {"unused": "expected no gradient"}),
    ],
    ids=["right", "forgotten", "power", "swapped", "unused"],
)
def test_declared_variables(wrong, expected):
    params = {"b": jnp.ones(3), "unused": jnp.ones(2), "w": jnp.ones(3)}
    right = {"b": lambda w, x, dy: dy, "unused": lambda w, x, dy: None}
    grads = {**right, "w": lambda w, x, dy: dy * 2 * w * x, **wrong}

    @custom_gradient(variables=params)
    def layer(x):  # the derivative by the global variable, which is not declared, is an error
        w, b = params["w"], params["b"]

        def grad(dy, variables):
            return dy * w**2, {name: g(variables["w"], x, dy) for name, g in grads.items()}

        return w**2 * x * GLOBAL + b, grad

    report = quick(layer, X)
    assert notes(report) == {"x": "", **{f"params['{n}']": expected.get(n, "") for n in params}}
    assert all(r.type.startswith("float32[") for r in report.rows)  # judged in double precision:
    assert all(r.differences < 1e-8 for r in report.rows if r.ok) and report.unchecked == ()


def test_captured_variables():
    w, b = jnp.ones(3), jnp.ones(3)

    @custom_gradient
    def layer(x):
        return w**2 * x + b, lambda dy, variables: (dy * w**2, [dy * 2 * w * x, dy])

    report = quick(layer, X, transforms=True, order=2)
    expected = [(n, name, True) for n in (1, 2) for name in ("x", "b", "w")]
    rows = [(r.order, r.argument, r.ok) for r in report.rows]
    assert rows == [*expected, (2, "dy", True)]
    assert fact(report, "jit(vmap)").ok


def test_a_rule_that_needs_all_weights_to_be_differentiated_is_noted():
    w = jnp.ones(3)

    @custom_gradient
    def for_all(x):
        return w * x, lambda dy, variables=None: (dy * w, [dy * x for _ in variables])

    @custom_gradient
    def for_some(x):
        return w * x, lambda dy, variables=None: (dy * w, [dy * x for _ in variables or []])

    report = quick(for_all, X)
    found = fact(report, "frozen weights")
    assert report.ok and found.ok is None and "NoneType" in found.text
    report = quick(for_some, X)
    assert report.ok and "frozen weights" not in [f.name for f in report.facts]


class Model:
    def __init__(self):
        self.params = {"w": jnp.ones(3)}

    @custom_gradient(variables=lambda self: self.params)
    def right(self, x):
        SEEN.append(MODEL.params["w"])
        w = self.params["w"]
        return w**3 * x, lambda dy, variables: (dy * w**3, {"w": dy * 3 * w**2 * x})

    @custom_gradient
    def undeclared(self, x):
        w = self.params["w"]
        return w**3 * x, lambda dy, variables: (dy * w**3, [dy * 3 * w * x])


MODEL, SEEN = Model(), []


def test_variables_of_an_instance():
    w = MODEL.params["w"]
    name = "self.params['w']"
    for report in quick(MODEL.right, X), quick(Model.right, MODEL, X):
        assert notes(report) == {"x": "", name: ""}
    assert notes(quick(MODEL.undeclared, X)) == {"x": "", name: POWER.format(name)}
    with pytest.raises(TypeError, match="missing a required argument: 'self'"):
        quick(Model.right)
    # Nothing is written to what the user holds, at any time.
    assert len(SEEN) > 10 and all(seen is w for seen in SEEN)


def test_a_default_that_is_passed_or_declared_is_checked():
    w, rate, index = jnp.ones(3), 0.5, jnp.arange(3)

    def f(x, w=w, rate=rate, index=index):
        def grad(dy, variables=None):
            dx, dw = dy * w * rate, 7 * dy * x * rate
            return (dx, dw) if variables is None else (dx, [dw])

        return x * w * rate, grad

    passed, declared = quick(custom_gradient(f), X, w), quick(custom_gradient(f, variables=[w]), X)
    for report in (passed, declared):
        assert notes(report) == {"x": "", "w": "declared = 7 x expected"}
        assert report.unchecked == ()


def test_a_keyword_that_the_rule_gives_no_gradient_is_a_setting():
    h = custom_gradient(lambda x, *, scale: (x * scale, lambda dy: dy * scale))
    assert notes(quick(h, X, kwargs={"scale": 2 * X})) == {"x": ""}
    h = custom_gradient(h.__wrapped__, variables="autodiff")
    assert notes(quick(h, X, kwargs={"scale": 2 * X})) == {"x": "", "scale": ""}
    found = notes(quick(lambda x, *, scale: x * half_square(scale), X, kwargs={"scale": X}))
    assert found == {"x": "", "scale": "declared = 0.5 x expected"}  # no rule is known there
    assert notes(quick(lambda x, *, scale: x * scale, X, kwargs={"scale": 2.0})) == {"x": ""}


def test_a_reference_reads_the_same_weights_or_they_are_named():
    layer = Model()
    right = check_gradient(layer.undeclared, X, reference=lambda x: layer.params["w"] ** 3 * x)
    assert notes(right)["self.params['w']"] and right.unchecked == ()
    report = quick(layer.undeclared, X, reference=lambda x: np.ones(3, np.float32) * x)
    assert notes(report) == {"x": ""}
    assert report.unchecked == ("self.params['w'] (the reference does not read it)",)
    w = jnp.ones(3)
    scaled = custom_gradient(lambda x: (w * x, lambda dy, variables: (dy * w, [dy * x])))
    report = quick(scaled, X, reference=lambda x: GLOBAL * x)
    why = "GLOBAL (a global variable)", "w (the reference does not read it)"
    assert report.unchecked == why


@pytest.mark.parametrize(
    ("primal", "text"),
    [
        (lambda x: x * x * x, "agrees with the function's value"),
        (lambda x: x**2, "disagrees with the function's value"),
        (lambda x: (x**3,), ""),  # JAX says it in its own words
        (lambda x: jnp.sum(x**3), "has another shape or dtype than the value"),
        (lambda x: (x**3).astype(jnp.bfloat16), "has another shape or dtype than the value"),
        (lambda x: x.undefined, "'"),
    ],
    ids=["right", "wrong", "a tuple", "another shape", "another dtype", "raises"],
)
def test_primal(primal, text):
    class Cube:
        @custom_gradient(primal=lambda self, x: primal(x))
        def of(self, x):
            return x**3, lambda dy: dy * 3 * x**2

    report = quick(Cube().of, ONES)  # x**2 and x**3 agree there
    found = fact(report, "primal")
    assert (found.ok, report.ok) == (text.startswith("agrees"),) * 2
    assert found.text.startswith(text)
    assert notes(report) == {"x": ""}  # the rule is that of `h`, not of `primal`
