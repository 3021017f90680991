"""Messages about one gradient, of a wrong shape or kind, sentence by sentence."""

import jax
import jax.numpy as jnp
import pytest
from messages import gradient_message, message, prefix

from tfgrad_jax import custom_gradient

SHAPES = {
    "a missing sum": (
        (3,),
        (2, 3),
        " The forward pass broadcasts this input along axis 0 of the gradient: did you forget to "
        "sum over axis 0, as in `g.sum(axis=0)`?",
    ),
    "a missing sum over two axes": (
        (),
        (2, 3),
        " The forward pass broadcasts this input along axis (0, 1) of the gradient: did you forget "
        "to sum over axis (0, 1), as in `g.sum(axis=(0, 1))`?",
    ),
    "a missing sum that keeps the axis": (
        (2, 1),
        (2, 3),
        " The forward pass broadcasts this input along axis 1 of the gradient: did you forget to "
        "sum over axis 1, as in `g.sum(axis=1, keepdims=True)`?",
    ),
    "a missing transpose": ((2, 3), (3, 2), " Maybe a transpose is missing, `g.T`."),
    "a missing reshape": ((2, 3), (6,), " Maybe a reshape is missing, `g.reshape(2, 3)`."),
    "a missing broadcast": (
        (2, 3),
        (3,),
        " Maybe a broadcast is missing, `jnp.broadcast_to(g, (2, 3))`.",
    ),
    "anything else": ((2, 3), (4, 5), ""),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shape(name):
    shape, got, hint = SHAPES[name]

    def f(x):
        def grad(dy):
            return jnp.ones(got)

        return jnp.sum(x), grad

    assert gradient_message(ValueError, f, jnp.ones(shape)) == (
        f"{prefix(f)} returned a gradient of shape {got} for the input `x`; expected its own "
        f"shape, {shape}.{hint}"
    )


def test_wrong_shape_names_the_leaf():
    def f(x, params):
        def grad(dy):
            return None, {"w": [None, dy]}

        return jnp.sum(params["w"][1]), grad

    text = gradient_message(ValueError, f, 1.0, {"w": [jnp.ones(2), jnp.ones(3)]})
    assert "for the input `params['w'][1]`; expected its own shape, (3,)." in text


def test_variadic_inputs_have_names_too():
    def f(x, *rest):
        def grad(dy):
            return dy, dy, jnp.ones(5)

        return x, grad

    text = gradient_message(ValueError, f, 1.0, 2.0, 3.0)
    assert "for the input `rest[1]`; expected its own shape, ()." in text


def test_an_input_by_name_has_its_name():
    def f(x, y=1.0, z=2.0):
        def grad(dy):
            return dy, jnp.ones(5)

        return x, grad

    h = custom_gradient(f)
    text = message(ValueError, jax.grad(lambda x, z: h(x, z=z), (0, 1)), 1.0, 2.0)
    assert "for the input `z`; expected its own shape, ()." in text


REAL = "float32 and shape ()"
COMPLEX = "complex64 and shape ()"
KINDS = {
    "Python complex for real": (
        lambda dy: 1j,
        1.0,
        "the complex 1j",
        "Return its real part, `jnp.real(...)`, if that is what you mean.",
    ),
    "object": (
        lambda dy: object(),
        1.0,
        "an object of type object",
        "Return None if there is no gradient.",
    ),
    "callable": (
        lambda dy: len,
        1.0,
        "the callable `len`",
        "Maybe you wrote `return g` instead of `return g(dy)`.",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_wrong_kind(name):
    answer, x, described, hint = KINDS[name]
    wanted = COMPLEX if isinstance(x, complex) else REAL

    def f(x):
        def grad(dy):
            return answer(dy)

        return x, grad

    def loss(x):
        return jnp.real(custom_gradient(f)(x))

    assert message(TypeError, jax.grad(loss), x) == (
        f"{prefix(f)} returned {described} for the input `x`; expected an array of dtype "
        f"{wanted}. {hint}"
    )
