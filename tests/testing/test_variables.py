"""Weights that a function closes over, and `primal`: both are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import fact, quick

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.slow

X = jnp.asarray([0.5, -1.2, 2.0])
ONES = jnp.ones(3)
GLOBAL = jnp.ones(3)


def of(report):
    """Return whether each row is right, and its note."""
    return {row.argument: (row.ok, row.note) for row in report.rows}


def declared_layer(grads):
    params = {"b": jnp.ones(3), "w": jnp.ones(3)}

    @custom_gradient(variables=params)
    def layer(x):
        w, b = params["w"], params["b"]
        return w**2 * x + b, lambda dy, variables: (dy * w**2, grads(variables, x, dy))

    return layer


RIGHT = {"x": (True, ""), "variables['b']": (True, ""), "variables['w']": (True, "")}
FORGOTTEN = "declared no gradient, expected one: forgotten among those of `variables`?"
POWER = "at points[1]: wrong power: declared = 1 x expected x `{}`**-1"


def test_declared_variables():
    right = declared_layer(lambda v, x, dy: {"w": dy * 2 * v["w"] * x, "b": dy})
    assert of(quick(right, X)) == RIGHT
    forgotten = declared_layer(lambda v, x, dy: {"w": dy * 2 * v["w"] * x, "b": None})
    assert of(quick(forgotten, X)) == {**RIGHT, "variables['b']": (False, FORGOTTEN)}
    power = declared_layer(lambda v, x, dy: {"w": dy * 2 * x, "b": dy})
    assert quick(power, X, near=0).ok
    note = POWER.format("variables['w']")
    assert of(quick(power, X)) == {**RIGHT, "variables['w']": (False, note)}
    swapped = declared_layer(lambda v, x, dy: {"w": dy, "b": dy * 2 * v["w"] * x})
    note = "swapped with `variables['{}']`?"
    assert of(quick(swapped, X)) == {
        "x": (True, ""),
        "variables['b']": (False, note.format("w")),
        "variables['w']": (False, note.format("b")),
    }


def captured_layer(grads):
    w, b = jnp.ones(3), jnp.ones(3)

    @custom_gradient
    def layer(x):
        return w**2 * x + b, lambda dy, variables: (dy * w**2, grads(variables, x, dy))

    return layer


def test_captured_variables():
    right = captured_layer(lambda v, x, dy: [dy * 2 * v[0] * x, dy])
    assert of(quick(right, X)) == {"x": (True, ""), "w": (True, ""), "b": (True, "")}
    power = captured_layer(lambda v, x, dy: [dy * 2 * x, dy])
    note = POWER.format("w")
    assert of(quick(power, X)) == {"x": (True, ""), "w": (False, note), "b": (True, "")}
    report = quick(captured_layer(lambda v, x, dy: [dy * 2 * v[0] * x]), X)
    assert not report.ok and "expected 2, for the variables" in fact(report, "rule").text


class Model:
    def __init__(self):
        self.params = {"w": jnp.ones(3)}

    @custom_gradient(variables=lambda self: self.params)
    def right(self, x):
        w = self.params["w"]
        return w**3 * x, lambda dy, variables: (dy * w**3, {"w": dy * 3 * w**2 * x})

    @custom_gradient(variables=lambda self: self.params)
    def wrong(self, x):
        w = self.params["w"]
        return w**3 * x, lambda dy, variables: (dy * w**3, {"w": dy * 3 * w * x})


def test_variables_of_an_instance():
    model = Model()
    w = model.params["w"]
    assert of(quick(model.right, X)) == {"x": (True, ""), "variables['w']": (True, "")}
    note = POWER.format("variables['w']")
    assert of(quick(model.wrong, X)) == {"x": (True, ""), "variables['w']": (False, note)}
    assert model.params["w"] is w  # as it was


def helper(x):
    return GLOBAL * x


@custom_gradient
def of_a_global(x):
    # The rule reads the global variable too, long after the function ran.
    return helper(x) * GLOBAL, lambda dy, variables: (dy * GLOBAL**2, [dy * 2 * GLOBAL * x])


@custom_gradient
def wrong_of_a_global(x):
    return helper(x) * GLOBAL, lambda dy, variables: (dy * GLOBAL**2, [dy * 2 * x])


def test_global_variables():
    before = GLOBAL
    report = quick(of_a_global, X, order=2)
    assert [(r.order, r.argument, r.ok) for r in report.rows] == [
        (1, "x", True), (1, "GLOBAL", True), (2, "x", True), (2, "GLOBAL", True),
    ]  # fmt: skip
    note = POWER.format("GLOBAL")
    assert of(quick(wrong_of_a_global, X)) == {"x": (True, ""), "GLOBAL": (False, note)}
    assert GLOBAL is before


def test_variables_in_the_precision_of_the_judges():
    right = declared_layer(lambda v, x, dy: {"w": dy * 2 * v["w"] * x, "b": dy})
    for row in quick(right, X).rows:
        assert row.differences < 1e-8 and row.type == "float32[3]"


def test_variables_with_every_check():
    layer = captured_layer(lambda v, x, dy: [dy * 2 * v[0] * x, dy])
    report = quick(layer, X, transforms=True, order=2)
    assert report.ok, report
    assert [fact(report, n).ok for n in ("jit", "vmap")] == [True] * 2
    assert {r.argument for r in report.rows if r.order == 2} == {"x", "w", "b"}


def test_what_is_no_weight():
    w, table = jnp.ones(3), np.arange(3.0, dtype=np.float32)

    @custom_gradient
    def constant(x):  # its rule does not take variables
        return w * x, lambda dy: dy * w

    assert of(quick(constant, X)) == {"x": (True, "")}

    @custom_gradient
    def layer(x):  # NumPy arrays are constants
        return w * x + table, lambda dy, variables: (dy * w, [dy * x])

    assert of(quick(layer, X)) == {"x": (True, ""), "w": (True, "")}


def test_variables_that_cannot_be_replaced():
    w = jnp.ones(3)
    product = jax.jit(lambda x: w * x)

    @custom_gradient(variables=w)
    def layer(x):
        return product(x), lambda dy, variables: (dy * w, dy * x)

    report = quick(layer, X)
    assert of(report) == {"x": (True, "")}
    expected = "not checked: variables; not seen to change the value"
    assert (fact(report, "variables").ok, fact(report, "variables").text) == (None, expected)


def test_variables_that_have_to_stay_as_they_are():
    angle = jnp.float32(0.9)

    @custom_gradient(variables=angle)
    def layer(x):
        if not isinstance(angle, jax.core.Tracer) and angle > 1:
            raise ValueError("outside of the domain")
        return angle * x, lambda dy, variables: (dy * angle, jnp.vdot(dy, x))

    report = quick(layer, X)
    assert report.ok and of(report) == {"x": (True, "")}
    assert fact(report, "variables").text.startswith("not checked: variables")


def test_variables_of_a_function_that_branches_on_their_values():
    class Branching:
        def __init__(self):
            self.w = jnp.float32(2.0)

        @custom_gradient(variables=lambda self: self.w)
        def f(self, x):
            w = self.w
            scale = 1 if w > 0 else -1
            return scale * w * x, lambda dy, variables: (dy * scale * w, jnp.vdot(dy, scale * x))

    report = quick(Branching().f, X)
    assert report.ok and report.rows[0].argument == "x"


@pytest.mark.parametrize(
    ("primal", "text"),
    [
        (lambda x: x * x * x, "agrees with the function's value"),
        (lambda x: x**2, "disagrees with the function's value"),
        (lambda x: (x**3,), "has another structure, shape or dtype than the value"),
        (lambda x: jnp.sum(x**3), "has another structure, shape or dtype than the value"),
        (lambda x: x.undefined, "'"),
    ],
)
def test_primal(primal, text):
    @custom_gradient(primal=primal)
    def h(x):
        return x**3, lambda dy: dy * 3 * x**2

    report = quick(h, ONES)  # x**2 and x**3 agree there
    found = fact(report, "primal")
    assert (found.ok, report.ok) == (text.startswith("agrees"),) * 2
    assert found.text.startswith(text)
    assert [row.ok for row in report.rows] == [True]  # the rule is that of `h`, not of `primal`


def test_primal_of_a_method():
    class Scaled:
        scale = 3.0

        @custom_gradient(primal=lambda self, x: self.scale * x)
        def f(self, x):
            return self.scale * x, lambda dy: self.scale * dy

    assert fact(quick(Scaled().f, X), "primal").ok
