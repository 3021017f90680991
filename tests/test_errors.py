"""Every message of the decorator, sentence by sentence, eagerly and under `jit`.

A message names the function with its file and line, so the expected texts are built around the
place where the function of the test is written.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient


def at(f):
    """Name a function the way a message does."""
    code = f.__code__
    return f"`{f.__qualname__.replace('<locals>.', '')}` ({__file__}:{code.co_firstlineno})"


def message(kind, call, *args):
    """Return the text that a call raises, having compared it with that under `jit`."""
    with pytest.raises(kind) as eager:
        call(*args)
    assert type(eager.value) is kind
    with pytest.raises(kind) as jitted:
        jax.jit(call)(*args)
    assert _text(jitted) == _text(eager)
    return _text(eager)


def _text(caught):
    return str(caught.value)


def gradient_message(kind, f, *args, **options):
    """Return what the gradient of the sum of `f` with respect to all arguments raises."""
    h = custom_gradient(f, **options)

    def loss(*args):
        return sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(h(*args)))

    return message(kind, jax.grad(loss, tuple(range(len(args)))), *args)


def prefix(f, rule_name="grad"):
    """Return how each message about the rule of `f` starts."""
    code = next(c for c in f.__code__.co_consts if getattr(c, "co_name", None) == rule_name)
    name = f.__qualname__.replace("<locals>.", "")
    rule = f"`{name}.{rule_name}` ({__file__}:{code.co_firstlineno})"
    return f"The gradient function {rule} of {at(f)}"


# --- declaring ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (3, "the int 3"),
        ("f", "the str 'f'"),
        (jnp.ones(2), "an array of dtype float32 and shape (2,)"),
        ((1, 2), "a tuple of length 2"),
        (object(), "an object of type object"),
    ],
    ids=["int", "str", "array", "tuple", "object"],
)
def test_not_callable(value, described):
    with pytest.raises(TypeError) as caught:
        custom_gradient(value)
    assert _text(caught) == (
        f"custom_gradient decorates a function that returns a pair (y, grad_fn), but got "
        f"{described}, which is not callable. Maybe you wrote `custom_gradient(f(x))` instead of "
        "`custom_gradient(f)(x)`."
    )


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"convention": "torch"}, "convention='torch'; expected 'tf' or 'jax'."),
        ({"forward_mode": 1}, "forward_mode=1; expected True or False."),
        (
            {"variables": "ordinary"},
            "variables='ordinary'; expected None, a pytree, a function or 'autodiff'.",
        ),
    ],
    ids=["convention", "forward_mode", "variables"],
)
def test_bad_option(option, expected):
    for declare in (custom_gradient, lambda **o: custom_gradient(lambda x: x, **o)):
        with pytest.raises(ValueError, match="custom_gradient got") as caught:
            declare(**option)
        assert _text(caught) == f"custom_gradient got {expected}"


# --- calling --------------------------------------------------------------------------------------


def test_a_call_that_does_not_fit():
    def scaled(x, y=1.0, *, mode="a"):
        return x * y, lambda dy: (dy, dy)

    h = custom_gradient(scaled)
    start = (
        f"{at(scaled)} was called with arguments that do not fit its signature, "
        "(x, y=1.0, *, mode='a'): "
    )
    assert message(TypeError, lambda x: h(x, x, x), 1.0) == f"{start}too many positional arguments."
    assert message(TypeError, lambda x: h(y=x), 1.0) == f"{start}missing a required argument: 'x'."
    assert message(TypeError, lambda x: h(x, x=x), 1.0) == (
        f"{start}multiple values for argument 'x'."
    )
    assert message(TypeError, lambda x: h(x, z=x), 1.0) == (
        f"{start}got an unexpected keyword argument 'z'."
    )


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
        ((1.0, len), "the callable `len` among its outputs at y[1]"),
        ((object(), 1.0), "an object of type object among its outputs at y[0]"),
        (np.array(["a"]), "an array of dtype <U1 and shape (1,) among its outputs"),
    ],
    ids=["str", "in a tree", "callable", "object", "array of strings"],
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


def test_wrong_arity_in_jax_convention():
    def f(x):
        def grad(da, db):
            return da

        return (x, x), grad

    assert gradient_message(TypeError, f, 1.0, convention="jax") == (
        f"{prefix(f)} cannot be called with one argument, the upstream gradients in the structure "
        "of y: missing a required argument: 'db'."
    )


# --- what the rule returns ----------------------------------------------------------------------


def test_too_many_gradients():
    def f(x, y):
        def grad(dy):
            return dy, dy, dy

        return x * y, grad

    assert gradient_message(ValueError, f, 1.0, 2.0) == (
        f"{prefix(f)} returned 3 gradients; expected 2, for the inputs `x`, `y`."
    )


def test_too_many_gradients_for_one_input():
    def f(x):
        def grad(dy):
            return dy, dy

        return x, grad

    assert gradient_message(ValueError, f, 1.0) == (
        f"{prefix(f)} returned 2 gradients; expected 1, for the inputs `x`. `x` is one array: "
        "return one gradient of its shape."
    )


def test_too_few_gradients():
    def f(x, y, z):
        def grad(dy):
            return dy, dy

        return x * y * z, grad

    assert gradient_message(ValueError, f, 1.0, 2.0, 3.0) == (
        f"{prefix(f)} returned 2 gradients; expected 3, for the inputs `x`, `y`, `z`. Return None "
        "for every input that has no gradient."
    )


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


def test_structure_that_is_too_deep():
    def f(x, y):
        def grad(dy):
            return dy, [dy, dy]

        return x * y, grad

    text = gradient_message(TypeError, f, 1.0, 2.0)
    assert "  expected: (*, *), for `x`, `y`\n  got:      (*, [*, *])\n" in text


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
    text = message(ValueError, jax.grad(lambda x, z: h(x, z=z)), 1.0, 2.0)
    assert "for the input `z`; expected its own shape, ()." in text


REAL = "float32 and shape ()"
COMPLEX = "complex64 and shape ()"
KINDS = {
    "complex for real": (
        lambda dy: dy * 1j,
        1.0,
        f"an array of dtype {COMPLEX}",
        "Return its real part, `jnp.real(...)`, if that is what you mean.",
    ),
    "Python complex for real": (
        lambda dy: 1j,
        1.0,
        "the complex 1j",
        "Return its real part, `jnp.real(...)`, if that is what you mean.",
    ),
    "real for complex": (
        lambda dy: jnp.real(dy),
        1j,
        f"an array of dtype {REAL}",
        "Convert it, `.astype(complex64)`, if it really has no imaginary part.",
    ),
    "integers": (
        lambda dy: jnp.int32(3),
        1.0,
        "an array of dtype int32 and shape ()",
        "Convert it, `.astype(float32)`, or return None for no gradient.",
    ),
    "array of booleans": (
        lambda dy: dy > 0,
        1.0,
        "an array of dtype bool and shape ()",
        "Convert it, `.astype(float32)`, or return None for no gradient.",
    ),
    "bool": (lambda dy: True, 1.0, "the bool True", "Return None if there is no gradient."),
    "str": (lambda dy: "none", 1.0, "the str 'none'", "Return None if there is no gradient."),
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


# --- whose rule it is -----------------------------------------------------------------------------


class Model:
    @custom_gradient
    def method(self, x):
        return x, lambda dy: (dy, dy)


class CallableObject:
    def __call__(self, x):
        return x, lambda dy: (dy, dy)


def _partial(scale, x):
    return scale * x, lambda dy: (dy, dy)


@pytest.mark.parametrize(
    ("h", "code", "name"),
    [
        (Model().method, Model.method.__wrapped__, "Model.method"),
        (custom_gradient(CallableObject()), CallableObject.__call__, "CallableObject"),
        (custom_gradient(functools.partial(_partial, 2.0)), _partial, "_partial"),
    ],
    ids=["method", "callable object", "partial"],
)
def test_names_of_callables(h, code, name):
    line = code.__code__.co_firstlineno
    text = message(ValueError, jax.grad(h), 1.0)
    assert f" of `{name}` ({__file__}:{line}) returned 2 gradients" in text


def test_name_of_a_function_under_another_decorator():
    """The function that the user wrote, not the wrapper that a decorator put around it."""

    def logged(f):
        @functools.wraps(f)
        def wrapper(*args):
            return f(*args)

        return wrapper

    def f(x):
        def grad(dy):
            return dy, dy

        return x, grad

    text = gradient_message(ValueError, logged(f), 1.0)
    assert text.startswith(f"{prefix(f)} returned 2 gradients")

    def lonely(x):
        return None

    text = message(TypeError, custom_gradient(logged(lonely)), 1.0)
    assert text.startswith(f"{at(lonely)} must return a pair")


def test_name_of_a_rule_that_is_no_plain_function():
    class Rule:
        def __call__(self, dy):
            return dy, dy

    def f(x):
        return x, Rule()

    text = gradient_message(ValueError, f, 1.0)
    line = Rule.__call__.__code__.co_firstlineno
    assert re.match(rf"The gradient function `.*Rule` \({re.escape(__file__)}:{line}\) of", text)


def test_errors_are_raised_when_differentiated_only():
    """The value of a function with a wrong rule is still its value."""
    h = custom_gradient(lambda x: (2 * x, lambda dy: (dy, dy)))
    assert h(1.0) == 2.0
    assert jax.jit(h)(1.0) == 2.0


@pytest.mark.parametrize(
    "transformation",
    [
        jax.grad,
        lambda h: jax.vmap(jax.grad(h)),
        lambda h: jax.grad(lambda xs: jnp.sum(jax.vmap(h)(xs))),
        lambda h: jax.grad(lambda xs: jax.lax.scan(lambda c, x: (c + h(x), None), 0.0, xs)[0]),
        lambda h: jax.grad(lambda xs: jnp.sum(jax.checkpoint(jax.vmap(h))(xs))),
    ],
    ids=["grad", "vmap of grad", "grad of vmap", "scan", "checkpoint"],
)
def test_errors_under_transformations(transformation):
    def f(x):
        def grad(dy):
            return jnp.ones(2)

        return x, grad

    x = jnp.ones(()) if transformation is jax.grad else jnp.ones(3)
    with pytest.raises(ValueError, match="expected its own shape") as caught:
        transformation(custom_gradient(f))(x)
    assert _text(caught).startswith(prefix(f))
