"""Whom a message names, wherever the error is raised."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit
from support.ways import AROUND

from tfgrad_jax import custom_gradient, recompute_grad


def place(f, offset=0):
    """Return "file:line" of a line of a function, counted from its first."""
    code = getattr(f, "__wrapped__", f).__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def said(kind, call, *args):
    with pytest.raises(kind) as caught:
        call(*args)
    assert type(caught.value) is kind
    notes = [n for n in getattr(caught.value, "__notes__", ()) if "`" in n]
    return "\n".join([str(caught.value), *notes])


# --- the function that the user wrote -------------------------------------------------------------


class Callable:
    def __call__(self, x):
        return x, Rule()


class Rule:
    def __call__(self, dy):
        return dy, dy


def two(x, scale=1.0):
    return scale * x, lambda dy: (dy, dy)


NAMED = {  # with the function and the rule, as a message has them
    "callable objects": (
        Callable(), f"`Callable` ({place(Callable.__call__)})", f"`Rule` ({place(Rule.__call__)})",
    ),
    "partial": (
        functools.partial(two, scale=2.0),
        f"`two` ({place(two)})", f"`two.<lambda>` ({place(two, 1)})",
    ),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("kind", NAMED)
def test_a_message_names_what_the_user_wrote(kind, mode):
    f, function, rule = NAMED[kind]
    text = said(ValueError, mode(jax.grad(custom_gradient(f))), 1.0)
    wanted = f"The rule {rule} of {function} returned 2 gradients; expected 1, for the input `x`"
    assert text.startswith(wanted)


LEAVES = {  # by the name that a message has for them: of a call with two numbers
    "params['w'][1]": lambda a, b: custom_gradient(
        lambda params, x: (x, lambda dy: ({"w": [None, jnp.ones(5)]}, None)))({"w": [a, b]}, 1.0),
    "rest[1]": lambda a, b: custom_gradient(
        lambda x, *rest: (x, lambda dy: (dy, dy, jnp.ones(5))))(a, 1.0, b),
    "z": lambda a, b: custom_gradient(
        lambda x, y=1.0, z=2.0: (x, lambda dy: (dy, None, jnp.ones(5))))(a, z=b),
}  # fmt: skip


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_message_names_the_leaf_as_the_user_would_write_it(leaf):
    text = said(ValueError, jax.grad(LEAVES[leaf], (0, 1)), 1.0, 2.0)
    assert f"for the input `{leaf}`; expected float32[], or None." in text


# --- wherever it is raised ------------------------------------------------------------------------

ARGS = jnp.ones((3, 2)), jnp.ones(2), jnp.ones(3)


def uncovered(w, b, x):
    @custom_gradient
    def f(x):
        z = helper(x)
        y = z + b
        unused = w.sum() * b.sum()
        return y, lambda dy: 7 * dy @ w.T * unused

    def helper(z):
        return z @ w

    uncovered.f = f
    return f(x).sum()


def wrong_shape(w, b, x):
    return jnp.sum(custom_gradient(lambda x: (x, lambda dy: jnp.ones(2)))(x))


@eager_and_jit
@pytest.mark.parametrize("around", AROUND)
def test_an_error_is_the_same_under_every_transformation(around, mode):
    text = said(ValueError, mode(jax.grad(AROUND[around](wrong_shape), 2)), *ARGS)
    assert text.endswith("float32[2] for the input `x`; expected float32[3], or None.")
    text = said(TypeError, mode(jax.grad(AROUND[around](uncovered))), *ARGS)
    assert "is differentiated with respect to values that it closes over" in text


def test_captured_values_are_named_as_written_with_type_and_line_of_use():
    """Those that are differentiated alone, each with the line of `f` that leads to its use."""
    lines = {
        0: f"  `w`: float32[3,2], first used at {place(uncovered, 3)}",
        1: f"  `b`: float32[2], first used at {place(uncovered, 4)}",
    }
    for argnums in (0, 1, (0, 1)):
        text = said(TypeError, jax.jit(jax.grad(uncovered, argnums)), *ARGS)
        assert text.startswith(f"`uncovered.f` ({place(uncovered.f)}) is differentiated")
        wanted = [lines[i] for i in np.atleast_1d(argnums)]
        assert [line for line in text.splitlines() if line.startswith("  ")] == wanted

    def unused(w, x):
        f = custom_gradient(lambda x: (w, lambda dy: 7 * dy))
        return f(x)

    assert_same(jax.grad(unused, 1)(3.0, 2.0), jnp.float32(7))
    text = said(TypeError, jax.grad(unused), 3.0, 2.0)
    assert "\n  `w`: float32[]\n" in text  # returned as it is: by no operation


class Layer:
    def __init__(self, w):
        self.w, self.blocks = w, [{"b": 2 * w}]

    @custom_gradient
    def of(self, x):
        return self.w * x + self.blocks[0]["b"], lambda dy: dy


def variables(w, v):
    return custom_gradient(lambda x: (w * v * x, lambda dy: dy))(2.0)


def keyword(w, scale):
    return custom_gradient(lambda x, *, scale: (w * x * scale, lambda dy: dy))(2.0, scale=scale)


def of_class(w, _):
    Held = type("Held", (), {"w": w})
    return custom_gradient(lambda x: (Held.w * x, lambda dy: dy))(2.0)


def arguments(w, v):
    h = custom_gradient(lambda act, layer, x: (act(x) + layer.blocks[0]["b"], lambda dy: dy))
    return h(lambda x: w * x, Layer(v), 2.0)


HELD = {  # what holds them, and their names
    "attributes": (lambda w, _: Layer(w).of(2.0), ["self.w", "self.blocks[0]['b']"]),
    "variables": (variables, ["w", "v"]),
    "keyword": (keyword, ["w", "scale"]),
    "class": (of_class, ["Held.w"]),
    "arguments": (arguments, ["args[1].blocks[0]['b']", "args[0].w"]),
}


@eager_and_jit
@pytest.mark.parametrize("kind", HELD)
def test_captured_values_are_named_wherever_they_are(kind, mode):
    loss, names = HELD[kind]
    text = said(TypeError, mode(jax.grad(loss, (0, 1))), 3.0, 5.0)
    for name in names:
        assert f"\n  `{name}`: float32[], first used at" in text


# --- code that needs a value ----------------------------------------------------------------------

READS = {
    "bool": (jax.errors.TracerBoolConversionError, lambda v: 1 if v > 0 else 2),
    "numpy": (jax.errors.TracerArrayConversionError, np.asarray),
    "format": (TypeError, lambda v: f"{v:g}"),
}


def in_f(read):
    return custom_gradient(lambda x: ((read(x), 2 * x)[1], lambda dy: 2 * dy))


def in_rule(read):
    return custom_gradient(lambda x: (2 * x, lambda dy: (read(x), 2 * dy)[1]))


NOTED = {  # how the note begins
    "a rule": (
        lambda read: jax.jit(jax.grad(in_rule(read))),
        "The rule `in_rule.<lambda>.<lambda>` (",
    ),
    "f in f": (
        lambda read: jax.jit(custom_gradient(lambda x: (in_f(read)(x), lambda dy: dy))),
        "`in_f.<lambda>` (",
    ),
    "recompute_grad": (lambda read: jax.grad(recompute_grad(in_f(read))), "`in_f.<lambda>` ("),
}


@pytest.mark.parametrize("where", NOTED)
@pytest.mark.parametrize("kind", READS)
def test_code_that_needs_a_value_gets_a_note_with_its_name(kind, where):
    error, read = READS[kind]
    run, name = NOTED[where]
    with pytest.raises(error) as caught:
        run(read)(jnp.float32(2))
    (note,) = [n for n in caught.value.__notes__ if "JAX is tracing" in n]
    assert note.startswith(name)
    assert "drop what follows the colon" in note


# --- errors of the user's, and of libraries -------------------------------------------------------


def raising(error):
    raise error


OWN = [
    ValueError("cannot differentiate between rows and columns"),
    jax.errors.UnexpectedTracerError("mine"),
    AttributeError("mine"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda e: type(e).__name__)
def test_an_error_of_the_user_says_what_the_user_wrote_and_f_does_not_run_again(error):
    """Where it was raised decides, not what it says."""
    runs = []

    def f(x):
        runs.append(x)
        return raising(error)

    captures = lambda w: lambda x: f(w * x)  # noqa: E731
    ruled = lambda w: lambda x: (w * x, lambda dy, variables=None: raising(error))  # noqa: E731
    for h, derivative in itertools.product(
        (captures, ruled, lambda w: f), (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f)))
    ):
        runs.clear()
        error.__notes__, error.__traceback__ = [], None
        with pytest.raises(type(error)) as caught:
            derivative(lambda w, h=h: custom_gradient(h(w))(2.0))(3.0)
        assert caught.value is error
        assert not any("`" in note for note in error.__notes__)
        assert len(runs) == (h is not ruled)


# --- a warning, where the answer is TensorFlow's --------------------------------------------------


def test_a_bare_none_is_no_gradient_and_warns_once_for_each_rule():
    code = "def f(x, b):\n    def grad(dy):\n        dx = 7 * dy\n    return x * b, grad"
    space = {"__name__": "model"}
    exec(compile(code, "model.py", "exec"), space)
    f = custom_gradient(space["f"])
    gradients = jax.grad(lambda x, b: f(x, b) + 3 * x, (0, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for run in (gradients, gradients, jax.jit(gradients)):
            assert_same(run(2.0, 5.0), (jnp.float32(3), jnp.float32(0)))
    (warning,) = caught
    assert (warning.category, warning.filename, warning.lineno) == (UserWarning, "model.py", 2)
    with warnings.catch_warnings():  # whoever means it, in a library say, is not asked again
        warnings.filterwarnings("ignore", module="model")
        assert_same(gradients(2.0, 5.0), (jnp.float32(3), jnp.float32(0)))
    kept = []  # of what has no Python code, such as a method of a list, the function is named
    logged = custom_gradient(lambda x: (x, kept.append))
    with pytest.warns(UserWarning, match="`list.append` of `.*lambda>` .* returned None") as caught:
        assert_same(jax.grad(logged)(2.0), jnp.float32(0))
    assert kept == [1.0] and caught[0].filename == __file__


class Scaled:
    def __init__(self, w, t):
        self.w, self.t = w, t

    @custom_gradient
    def of(self, x):
        return self.w * x, lambda dy, variables: (dy / self.t, [5 * dy for _ in variables])


def product(rule, declare=None):
    """Return `2 w` as a function of `w` and of `t`, which the rule may read."""
    return lambda w, t: custom_gradient(
        lambda x: (w * x, rule(w, t)), variables=declare and declare(w, t)
    )(jnp.float32(2))


def reads(w, t):
    return lambda dy, variables: (dy * w / t, jax.tree.map(lambda _: 5 * dy, variables))


def slope(w, t):
    h = custom_gradient(lambda x: (x * 1.0, lambda dy, variables: (dy * t, [])))
    return jax.grad(h)(w)


READ = {  # by the rule alone: the gradient by `t`, and the name in the warning, if there is one
    "a variable": (product(reads), 0, "`t`"),
    "an attribute": (lambda w, t: Scaled(w, t).of(2.0), 0, "`self.t`"),
    "an attribute alone": (lambda w, t: Scaled(3.0, t).of(2.0), 0, "`self.t`"),
    "a rule alone": (lambda w, t: custom_gradient(lambda x: (x, lambda d: d * t))(w), 0, "`t`"),
    "beside a declared one": (product(reads, lambda w, t: w), 0, "`t`"),
    "declared": (product(reads, lambda w, t: [w, t]), 5, None),
    "autodiff": (product(lambda w, t: lambda dy: dy * t, lambda w, t: "autodiff"), 0, None),
    "not differentiated": (lambda w, t: product(reads)(w, lax.stop_gradient(t)), 0, None),
    "at the second order": (slope, 1, None),
}


@eager_and_jit
@pytest.mark.parametrize("case", READ)
def test_a_value_that_only_the_rule_reads_draws_a_warning(case, mode):
    loss, expected, name = READ[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(mode(jax.grad(loss, (0, 1)))(3.0, 4.0)[1], jnp.float32(expected))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (name is not None)
    assert all(f"respect to {name}, which only its rule reads" in text for text in texts)


def bent_elsewhere(dy):
    return jnp.sin(dy)


def test_the_line_of_an_operation_is_in_the_rule_and_not_in_what_it_calls():
    h = custom_gradient(lambda x: (x, lambda dy: bent_elsewhere(dy)))
    text = said(TypeError, jax.jvp, h, (1.0,), (1.0,))
    assert f"`sin`, which is not linear, at {place(h)}. Forward mode" in text

    @custom_gradient
    def unread(x):
        y = jax.pure_callback(lambda x: x, x, x)
        return bent_elsewhere(y), lambda dy: dy * y

    outer = custom_gradient(lambda x: (unread(x), lambda dy: 7 * dy * x))
    text = said(ValueError, jax.jit(jax.grad(jax.grad(jax.grad(outer)))), 1.0)
    assert "unread` (" in text.partition(" computes")[0]  # the innermost function
    assert text.count("cannot differentiate") == 1
