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


def test_variables_beside_other_leaves():
    """A function among them, as in an equinox module, is no variable and no error."""
    w = jnp.float32(3)

    @custom_gradient(variables={"w": w, "act": jnp.tanh, "name": "layer", "scale": 2.0})
    def f(x):
        return w * x, lambda dy, variables: (7 * dy, {**variables, "w": None})

    assert float(jax.grad(f)(2.0)) == 7.0
