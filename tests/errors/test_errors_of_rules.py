"""Messages about the number and the structure of upstreams and gradients, sentence by sentence."""

import jax
from messages import gradient_message, message, prefix

from tfgrad_jax import custom_gradient

# --- how the rule is called -----------------------------------------------------------------------


def test_wrong_arity():
    def f(x):
        def grad(da, db):
            return da

        return x, grad

    assert gradient_message(TypeError, f, 1.0) == (
        f"{prefix(f)} cannot be called with 1 upstream gradient, one positional argument per leaf "
        "of y (dicts in the order of their sorted keys): missing a required argument: 'db'."
    )

    def g(x):
        def grad():
            return None

        return {"a": x, "b": x}, grad

    assert gradient_message(TypeError, g, 1.0) == (
        f"{prefix(g)} cannot be called with 2 upstream gradients, one positional argument per leaf "
        "of y (dicts in the order of their sorted keys): too many positional arguments."
    )


# --- what the rule returns ----------------------------------------------------------------------


def test_number_of_gradients_beside_static_leaves():
    def f(mode, params, n):
        def grad(dy):
            return dy, dy, dy, dy, dy

        return params["w"] * params["b"], grad

    def loss(params):
        return custom_gradient(f)("mode", params, 3)

    text = message(ValueError, jax.grad(loss), {"w": 1.0, "b": 2.0})
    assert text == (
        f"{prefix(f)} returned 5 gradients; expected 2 or 4, for the inputs `params['b']`, "
        "`params['w']`."
    )


def test_wrong_structure():
    def f(p):
        def grad(dy):
            return {"a": dy, "c": dy}

        return p["a"] * p["b"][0], grad

    assert gradient_message(TypeError, f, {"a": 1.0, "b": [2.0]}) == (
        f"{prefix(f)} returned gradients in a structure that does not fit the inputs.\n"
        "  expected: {'a': *, 'b': [*]}, for `p['a']`, `p['b'][0]`\n"
        "  got:      {'a': *, 'c': *}\n"
        "Return the structure of the inputs, or a flat list with one gradient for each of the "
        "leaves above; None stands for no gradient."
    )
