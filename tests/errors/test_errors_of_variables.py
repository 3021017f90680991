"""Messages about the gradients of variables, sentence by sentence."""

import jax
import jax.numpy as jnp
import pytest
from messages import place

from tfgrad_jax import custom_gradient


def error_of(returned, variables=None, exception=ValueError):
    """Return the decorated function and the message of the error of what its rule returns."""
    made = []

    def loss(w, b, x):
        def f(x):
            def grad(dy, variables):
                return returned(dy, x)

            return (w * x).sum() + b, grad

        made[:] = [custom_gradient(f, variables=variables and variables(w, b))]
        return made[0](x)

    with pytest.raises(exception) as caught:
        jax.grad(loss, (0, 1, 2))(jnp.ones(3), 1.0, jnp.ones(3))
    return made[0], str(caught.value)


def text(f, tail):
    """Return the golden text: whose rule it is, then the tail."""
    rule = f"`error_of.loss.f.grad` ({place(f, 1)})"
    return f"The gradient function {rule} of `error_of.loss.f` ({place(f)}) {tail}"


def test_error_for_a_wrong_number():
    f, message = error_of(lambda dy, x: (7 * dy * x, [5 * dy * x]))
    assert message == text(
        f,
        "returned 1 gradient; expected 2, for the variables `variables[0]`, `variables[1]`. "
        "Return None for every variable that has no gradient.",
    )
    f, message = error_of(lambda dy, x: (7 * dy * x, [5 * dy * x, dy, dy]))
    assert message == text(
        f, "returned 3 gradients; expected 2, for the variables `variables[0]`, `variables[1]`."
    )


def test_error_for_no_pair():
    for returned, came in [
        (lambda dy, x: 7 * dy * x, "an array of dtype float32 and shape (3,)"),
        (lambda dy, x: (x, [x, dy], None), "a tuple of length 3"),
        (lambda dy, x: None, "None"),
    ]:
        f, message = error_of(returned, exception=TypeError)
        assert message == text(
            f,
            "was called with `variables=` and must return a pair (grad_xs, grad_vars): the "
            f"gradients of the inputs and those of the variables. It returned {came}.",
        )


def test_error_for_a_wrong_shape():
    f, message = error_of(lambda dy, x: (7 * dy * x, [5 * dy, dy]))
    assert message == text(
        f,
        "returned a gradient of shape () for the variable `variables[0]`; expected its own "
        "shape, (3,). Maybe a broadcast is missing, `jnp.broadcast_to(g, (3,))`.",
    )


def test_error_for_a_wrong_kind():
    f, message = error_of(lambda dy, x: (7 * dy * x, [x.astype(int), dy]), exception=TypeError)
    assert message == text(
        f,
        "returned an array of dtype int32 and shape (3,) for the variable `variables[0]`; "
        "expected an array of dtype float32 and shape (3,). Convert it, `.astype(float32)`, or "
        "return None for no gradient.",
    )


def test_error_for_a_wrong_structure_of_declared_variables():
    f, message = error_of(
        lambda dy, x: (7 * dy * x, {"w": 5 * dy * x, "typo": dy}),
        lambda w, b: {"w": w, "b": b},
        TypeError,
    )
    assert message == text(
        f,
        "returned gradients in a structure that does not fit the variables.\n"
        "  expected: {'b': *, 'w': *}, for `variables['b']`, `variables['w']`\n"
        "  got:      {'typo': *, 'w': *}\n"
        "Return the structure of the variables, or a flat list with one gradient for each of "
        "the leaves above; None stands for no gradient.",
    )
    f, message = error_of(lambda dy, x: (7 * dy * x, [dy]), lambda w, b: {"w": w, "b": b})
    assert message == text(
        f,
        "returned 1 gradient; expected 2, for the variables `variables['b']`, `variables['w']`. "
        "Return None for every variable that has no gradient.",
    )


class Keeper:
    """An object that keeps an array, as a Keras Variable does."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    ("variables", "described"),
    [
        (["w", "b"], "the str 'w'"),
        ("w", "the str 'w'"),
        ({"w": Keeper(jnp.ones(2))}, "an object of type Keeper"),
    ],
    ids=["names", "name", "keeper"],
)
def test_error_for_variables_that_are_no_arrays(variables, described):
    def f(x):
        return x, lambda dy, variables: (dy, None)

    with pytest.raises((TypeError, ValueError)) as caught:
        jax.grad(custom_gradient(f, variables=variables))(1.0)
    assert described in str(caught.value) or variables == "w"


def test_variables_beside_other_leaves():
    """A function among them, as in an equinox module, is no variable and no error."""
    w = jnp.float32(3)

    @custom_gradient(variables={"w": w, "act": jnp.tanh, "name": "layer", "scale": 2.0})
    def f(x):
        return w * x, lambda dy, variables: (7 * dy, {**variables, "w": None})

    assert float(jax.grad(f)(2.0)) == 7.0


def test_a_function_of_variables_that_fails():
    class Model:
        @custom_gradient(variables=lambda self: self.params)
        def method(self, x):
            return x, lambda dy, variables: (dy, None)

    with pytest.raises(AttributeError, match="params") as caught:
        jax.grad(Model().method)(1.0)
    note = caught.value.__notes__[0]
    assert "`variables` of `test_a_function_of_variables_that_fails.Model.method` (" in note
    assert "called with the instance" in note
