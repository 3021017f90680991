"""Weights that a function closes over, and `primal`: both are checked."""

import contextvars

import jax
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
    ("grads", "b", "w"),
    [
        (lambda v, x, dy: {"w": dy * 2 * v["w"] * x, "b": dy}, "", ""),
        (lambda v, x, dy: {"w": dy * 2 * v["w"] * x, "b": None}, FORGOTTEN, ""),
        (lambda v, x, dy: {"w": dy * 2 * x, "b": dy}, "", POWER.format("params['w']")),
        (
            lambda v, x, dy: {"w": dy, "b": dy * 2 * v["w"] * x},
            "swapped with `params['w']`?",
            "swapped with `params['b']`?",
        ),
    ],
    ids=["right", "forgotten", "power", "swapped"],
)
def test_declared_variables(grads, b, w):
    params = {"b": jnp.ones(3), "w": jnp.ones(3)}

    @custom_gradient(variables=params)
    def layer(x):
        w, b = params["w"], params["b"]
        return w**2 * x + b, lambda dy, variables: (dy * w**2, grads(variables, x, dy))

    report = quick(layer, X)
    assert notes(report) == {"x": "", "params['b']": b, "params['w']": w}
    assert all(r.type == "float32[3]" for r in report.rows)  # but judged in double precision:
    assert all(r.differences < 1e-8 for r in report.rows if r.ok)


def test_captured_variables():
    w, b = jnp.ones(3), jnp.ones(3)

    def layer(grads):
        return custom_gradient(
            lambda x: (w**2 * x + b, lambda dy, variables: (dy * w**2, grads(x, dy)))
        )

    report = quick(layer(lambda x, dy: [dy * 2 * w * x, dy]), X, transforms=True, order=2)
    assert [(r.order, r.argument, r.ok) for r in report.rows] == [
        (n, name, True) for n in (1, 2) for name in ("x", "b", "w")
    ]
    assert fact(report, "jit(vmap)").ok
    report = quick(layer(lambda x, dy: [dy * 2 * w * x]), X)
    assert not report.ok and "undeclared variables" in fact(report, "rule").text


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


def test_what_is_no_weight():
    w, table, index = jnp.ones(3), np.arange(3.0, dtype=np.float32), jnp.arange(3)

    @custom_gradient
    def constant(x):  # its rule does not take variables
        return w * x, lambda dy: dy * w

    assert notes(quick(constant, X)) == {"x": ""}

    @custom_gradient
    def layer(x):  # NumPy arrays are constants, and integers have no derivative
        y = w * x + table + index.astype(w.dtype)
        return y, lambda dy, variables: (dy * w, [dy * x])

    with jax.numpy_dtype_promotion("standard"):  # the default, which the tests make strict
        report = quick(layer, X)
    assert notes(report) == {"x": "", "w": ""} and report.unchecked == ()


def test_a_global_variable_is_reported_as_not_checked():
    @custom_gradient
    def f(x):
        return x * GLOBAL, lambda dy, variables: (dy * GLOBAL, [dy * x])

    declared = custom_gradient(f.__wrapped__, variables=[GLOBAL])
    for h, x in ((f, X), (f, GLOBAL), (declared, X)):
        report = quick(h, x)
        assert report.ok and notes(report) == {"x": ""}
        assert report.unchecked == ("GLOBAL (a global variable)",)


def test_a_global_variable_that_is_not_declared_is_no_weight():
    w = jnp.ones(3)

    @custom_gradient(variables=[w])  # so the derivative by the global variable is an error
    def f(x):
        return w * x * GLOBAL, lambda dy, variables: (dy * w * GLOBAL, [dy * x * GLOBAL])

    report = quick(f, X)
    assert report.ok and notes(report) == {"x": "", "w": ""} and report.unchecked == ()


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


@pytest.mark.parametrize("declared", [None, jnp.ones(2)], ids=["none", "ones"])
def test_declared_variables_that_the_value_ignores(declared):
    w, unused = jnp.ones(3), jnp.ones(2)

    @custom_gradient(variables=[w, unused])
    def f(x):
        return w * x, lambda dy, variables: (dy * w, [dy * x, declared])

    note = "" if declared is None else "expected no gradient"
    assert notes(quick(f, X)) == {"x": "", "w": "", "variables[1]": note}


@pytest.mark.parametrize("branches", [False, True])
def test_a_declared_variable_that_is_held_in_a_second_place_too(branches):
    w, context = jnp.ones(3), contextvars.ContextVar("w")
    context.set(w)

    @custom_gradient(variables=w)
    def f(x):
        scale = 1 if branches and x[0] > 0 else 2
        return scale * context.get() * x, lambda dy, variables: (dy * scale * w, 7 * dy * x)

    report = quick(f, X)
    assert report.ok and notes(report) == {"x": ""}
    why = "not seen to change the value" if branches else "held where it is not replaced"
    assert report.unchecked == (f"w ({why})",)


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


def test_declared_variables_that_can_be_called():
    scale = jax.tree_util.Partial(jnp.multiply, jnp.ones(3))

    @custom_gradient(variables=scale)
    def f(x):
        grad = lambda dy, v: (scale(dy), jax.tree.map(lambda _: 7 * dy * x, v))  # noqa: E731
        return scale(x), lambda dy, variables: grad(dy, variables)

    (name, text) = [*notes(quick(f, X)).items()][1]
    assert text == "declared = 7 x expected", name


def test_a_weight_of_a_jitted_helper():
    w = jnp.ones(3)
    product = jax.jit(lambda x: w * x)

    @custom_gradient(variables=w)
    def layer(x):
        return product(x), lambda dy, variables: (dy * w, 7 * dy * x)

    assert notes(quick(layer, X)) == {"x": "", "w": "declared = 7 x expected"}


def test_variables_that_have_to_stay_as_they_are():
    angle = jnp.float32(0.9)

    @custom_gradient(variables=angle)
    def layer(x):
        if angle > 1:
            raise ValueError("outside of the domain")
        return angle * x, lambda dy, variables: (dy * angle, jnp.vdot(dy, x))

    report = quick(layer, X)
    assert report.ok and notes(report) == {"x": ""}
    assert report.unchecked == ("angle (not seen to change the value)",)


def test_variables_of_a_function_that_branches_on_their_values():
    w = jnp.float32(2.0)

    @custom_gradient(variables=w)
    def f(x):
        scale = 1 if w > 0 else -1
        return scale * w * x, lambda dy, variables: (dy * scale * w, jnp.vdot(dy, scale * x))

    assert notes(quick(f, X)) == {"x": "", "w": ""}


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
