"""Messages about the options, the call and what `f` returns, sentence by sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import at, message, text

from tfgrad_jax import custom_gradient

# --- declaring ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("with_logs", "write to a Ref"),
        ("with_accums", "add to a Ref"),
        ("remat", "recompute_grad"),
        ("nondiff_argnums", "reaches the function as it is"),
        ("forward_mode", "both modes always work"),
        ("varibles", "`variables`, `primal` and `convention`"),
    ],
)
def test_unknown_option(option, instead):
    for f in (None, lambda x: (x, lambda dy: dy)):
        with pytest.raises(TypeError, match=f"no option '{option}'") as caught:
            custom_gradient(f, **{option: True})
        assert instead in text(caught)


def test_above_jit():
    def f(x):
        return 3 * x, lambda dy: 7 * dy

    with pytest.raises(TypeError, match=r"`@jax\.jit` above `@custom_gradient`") as caught:
        custom_gradient(jax.jit(f))
    assert "test_above_jit.f` (" in text(caught)
    assert float(jax.grad(jax.jit(custom_gradient(f)))(2.0)) == 7.0  # what it says to do


# --- calling --------------------------------------------------------------------------------------


def test_a_call_that_does_not_fit_a_method():
    class Model:
        @custom_gradient
        def predict(self, x):
            return x, lambda dy: dy

    text = message(TypeError, Model().predict)
    assert text == (
        f"{at(Model.predict.__wrapped__)} was called with arguments that do not fit its "
        "signature, (x): missing a required argument: 'x'."
    )


# --- what f returns -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (None, "None"),
        (2.0, "the float 2.0"),
        ((1.0, 2.0, 3.0), "a tuple of length 3"),
        ([1.0], "a list of length 1"),
        (object(), "an object of type object"),
        (jnp.ones(3), "an array of dtype float32 and shape (3,)"),
        (len, "the callable `len`"),
    ],
    ids=["None", "float", "triple", "one", "object", "array", "callable"],
)
def test_no_pair(result, described):
    def lonely(x):
        return result

    expected = (
        f"{at(lonely)} must return a pair (y, grad_fn): its value and the function that computes "
        f"its gradient. It returned {described}. Maybe you wrote `return y` instead of "
        "`return y, grad_fn`."
    )
    h = custom_gradient(lonely)
    assert message(TypeError, h, 1.0) == expected
    assert message(TypeError, jax.grad(h), 1.0) == expected


@pytest.mark.parametrize(
    ("grad_fn", "described"),
    [
        (None, "None"),
        (7.0, "the float 7.0"),
        (np.ones(2), "an array of dtype float64 and shape (2,)"),
        ({"x": 1}, "an object of type dict"),
    ],
    ids=["None", "float", "array", "dict"],
)
def test_rule_not_callable(grad_fn, described):
    def careless(x):
        return x, grad_fn

    expected = (
        f"{at(careless)} must return a pair (y, grad_fn) whose second element is a function, but "
        f"the second element is {described}. Maybe you wrote `return y, grad(dy)` instead of "
        "`return y, grad`, or returned y alone."
    )
    h = custom_gradient(careless)
    assert message(TypeError, h, 1.0) == expected
    assert message(TypeError, jax.grad(h), 1.0) == expected


@pytest.mark.parametrize(
    ("y", "described"),
    [
        ("text", "the str 'text' among its outputs"),
        ({"a": 1.0, "b": ["text"]}, "the str 'text' among its outputs at y['b'][0]"),
        ((object(), 1.0), "an object of type object among its outputs at y[0]"),
        (np.array(["a"]), "an array of dtype <U1 and shape (1,) among its outputs"),
    ],
    ids=["str", "in a tree", "object", "array of strings"],
)
def test_output_that_is_no_array(y, described):
    def wordy(x):
        return y, lambda *dys: None

    expected = (
        f"{at(wordy)} returned {described}; every leaf of y must be an array or a number. "
        "Return other values from an undecorated function around it."
    )
    h = custom_gradient(wordy)
    assert message(TypeError, h, 1.0) == expected
    assert message(TypeError, jax.grad(h), 1.0) == expected
