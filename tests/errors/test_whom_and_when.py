"""Whom a message names, wherever the error is raised."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient, recompute_grad

TWO = "returned 2 gradients; expected 1, for the input `x`"


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
        return x, lambda dy: (dy, dy)


class Rule:
    def __call__(self, dy):
        return dy, dy


def two(x, scale=1.0):
    return scale * x, lambda dy: (dy, dy)


def rule_object(x):
    return x, Rule()


def renamed(x):
    def rule(dy):
        return dy, x

    rule.__qualname__ = "Rule"
    return x, rule


NAMED = {
    "callable object": (custom_gradient(Callable()), Callable.__call__, "Callable"),
    "partial": (custom_gradient(functools.partial(two, scale=2.0)), two, "two"),
    "rule that is an object": (custom_gradient(rule_object), rule_object, "rule_object"),
    "rule with another name": (custom_gradient(renamed), renamed, "renamed"),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("kind", NAMED)
def test_a_message_names_what_the_user_wrote(kind, mode):
    h, f, name = NAMED[kind]
    text = said(ValueError, mode(jax.grad(lambda x: h(x))), 1.0)
    assert f" of `{name}` ({place(f)}) {TWO}" in text
    if f in (rule_object, renamed):
        at = place(Rule.__call__) if f is rule_object else place(f, 1)
        assert text.startswith(f"The rule `Rule` ({at})")


def test_a_message_names_the_leaf_as_the_user_would_write_it():
    variadic = custom_gradient(lambda x, *rest: (x, lambda dy: (dy, dy, jnp.ones(5))))

    nested = custom_gradient(lambda params, x: (x, lambda dy: ({"w": [None, dy]}, None)))
    text = said(ValueError, jax.grad(nested), {"w": [jnp.ones(2), jnp.ones(3)]}, 1.0)
    assert "for the input `params['w'][1]`; expected float32[3], or None." in text
    text = said(ValueError, jax.grad(variadic, (0, 2)), 1.0, 2.0, 3.0)
    assert "for the input `rest[1]`; expected float32[], or None." in text
    by_name = custom_gradient(lambda x, y=1.0, z=2.0: (x, lambda dy: (dy, jnp.ones(5))))
    text = said(ValueError, jax.grad(lambda x, z: by_name(x, z=z), (0, 1)), 1.0, 2.0)
    assert "for the input `z`; expected float32[], or None." in text
    beside = custom_gradient(lambda mode, x: (x.sum(), lambda dy: (None, jnp.ones(5))))
    text = said(ValueError, jax.grad(lambda x: beside("m", x)), jnp.ones(3))
    assert text.endswith("float32[5] for the input `x`; expected float32[3], or None.")
    static = custom_gradient(lambda mode, p, n: (p[0] * p[1], lambda dy: (dy,) * 5))
    text = said(ValueError, jax.grad(lambda p: static("m", p, 3)), [1.0, 2.0])
    assert "5 gradients; expected 2, for the inputs `p[0]`, `p[1]`. Return `(None, [..." in text


# --- wherever it is raised ------------------------------------------------------------------------

ARGS = jnp.ones((3, 2)), jnp.ones(2), jnp.array([True, False, True]), jnp.ones(3)


def uncovered(w, b, mask, x):
    @custom_gradient
    def f(x):
        z = jnp.where(mask, x, 0)
        z = helper(z)
        y = z + b
        unused = w.sum() * b.sum()
        return y, lambda dy: 7 * dy @ w.T * unused

    def helper(z):
        return z @ w

    uncovered.f = f
    return f(x).sum()


def wrong_shape(w, b, mask, x):
    return jnp.sum(custom_gradient(lambda x: (x, lambda dy: jnp.ones(2)))(x))


AROUND = {
    "grad": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda *args: lax.cond(args[1][0] > 0, f, f, *args),
    "scan": lambda f: lambda *args: lax.scan(lambda c, _: (c + f(*args), None), 0.0, None, 1)[0],
    "vmap": lambda f: lambda *args: jax.vmap(f)(*(a[None] for a in args))[0],
}


@eager_and_jit
@pytest.mark.parametrize("around", AROUND)
def test_an_error_is_the_same_under_every_transformation(around, mode):
    text = said(ValueError, mode(jax.grad(AROUND[around](wrong_shape), 3)), *ARGS)
    assert text.endswith("float32[2] for the input `x`; expected float32[3], or None.")
    text = said(TypeError, mode(jax.grad(AROUND[around](uncovered))), *ARGS)
    assert "is differentiated with respect to values that it closes over" in text


@eager_and_jit
def test_the_derivative_of_a_gradient_asks_for_no_gradient_of_the_function(mode):
    """The rule is ordinary code, and `w` and `b` are residuals of it."""
    w, b, *_ = ARGS
    rule = lambda w, b: jnp.sum(7 * jnp.ones(2) @ w.T * w.sum() * b.sum())  # noqa: E731
    by_x = lambda *args: jnp.sum(jax.grad(uncovered, 3)(*args))  # noqa: E731
    assert_same(mode(by_x)(*ARGS), jnp.float32(504))  # 3 entries of 7 * 2 * 12
    assert_same(mode(jax.grad(by_x, (0, 1)))(*ARGS), jax.grad(rule, (0, 1))(w, b))


def test_captured_values_are_named_as_written_with_type_and_line_of_use():
    """Those that are differentiated alone, each with the line of `f` that leads to its use."""
    lines = {
        0: f"  `w`: float32[3,2], first used at {place(uncovered, 4)}",
        1: f"  `b`: float32[2], first used at {place(uncovered, 5)}",
    }
    for argnums in (0, 1, (0, 1)):
        text = said(TypeError, jax.jit(jax.grad(uncovered, argnums)), *ARGS)
        assert text.startswith(f"`uncovered.f` ({place(uncovered.f)}) is differentiated")
        wanted = [lines[i] for i in np.atleast_1d(argnums)]
        assert [line for line in text.splitlines() if line.startswith("  ")] == wanted

    def unused(w, x):
        f = unused.f = custom_gradient(lambda x: (w, lambda dy: 7 * dy))
        return f(x)

    assert_same(jax.grad(unused, 1)(3.0, 2.0), jnp.float32(7))
    text = said(TypeError, jax.grad(unused), 3.0, 2.0)
    assert "  `w`: float32[]\n" in text  # returned as it is: by no operation
    lost = lambda w, x: custom_gradient(lambda x: (w * x, lambda dy: 7 * dy))(x)  # noqa: E731
    mapped = jax.grad(lambda w, xs: jax.vmap(lambda x: lost(w, x))(xs).sum())
    assert "float32[], first used at" in said(TypeError, mapped, jnp.float32(3), jnp.ones(2))


class Layer:
    def __init__(self, w):
        self.w, self.blocks = w, [{"b": 2 * w}]

    @custom_gradient
    def one(self, x):
        return self.w * x, lambda dy: dy

    @custom_gradient
    def more(self, x):
        return self.w * x + self.blocks[0]["b"], lambda dy: dy


def closed_over(w, scale):
    return custom_gradient(lambda x, *, scale: (w * x * scale, lambda dy: dy))(2.0, scale=scale)


def held_by_class(w, _):
    Held = type("Held", (), {"w": w})
    return custom_gradient(lambda x: (Held.w * x, lambda dy: dy))(2.0)


def passed(w, v):
    layer = Layer(v)
    h = custom_gradient(lambda act, layer, x: (act(x) + layer.blocks[0]["b"], lambda dy: dy))
    return h(lambda x: w * x, layer, 2.0)


@eager_and_jit
@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda w, _: Layer(w).one(2.0), ["self.w"]),
        (lambda w, _: Layer(w).more(2.0), ["self.w", "self.blocks[0]['b']"]),
        (lambda w, v: custom_gradient(lambda x: (w * v * x, lambda dy: dy))(2.0), ["w", "v"]),
        (closed_over, ["w", "scale"]),
        (held_by_class, ["Held.w"]),
        (passed, ["args[1].blocks[0]['b']", "args[0].w"]),
    ],
    ids=["attribute", "attributes", "variables", "keyword", "class", "argument"],
)
def test_captured_values_are_named_wherever_they_are(loss, names, mode):
    text = said(TypeError, mode(jax.grad(loss, (0, 1))), 3.0, 5.0)
    for name in names:
        assert f"\n  `{name}`: float32[], first used at" in text


def test_of_functions_in_each_other_the_innermost_is_named():
    @custom_gradient
    def inner(x):
        return jax.pure_callback(np.asarray, x, x), lambda dy: 7 * dy * x

    outer = custom_gradient(lambda x: (inner(x), lambda dy: 7 * dy * x))
    text = said(ValueError, jax.jit(jax.grad(jax.grad(jax.grad(outer)))), 1.0)
    assert f"`{inner.__qualname__.replace('<locals>.', '')}` ({place(inner)}) computes" in text
    assert text.count("cannot differentiate") == 1


# --- code that needs a value ----------------------------------------------------------------------

READS = {
    "bool": (jax.errors.TracerBoolConversionError, lambda v: 1 if v > 0 else 2),
    "float": (jax.errors.ConcretizationTypeError, float),
    "range": (jax.errors.TracerIntegerConversionError, lambda v: range(v.astype(int))),
    "numpy": (jax.errors.TracerArrayConversionError, np.asarray),
    "into numpy": (ValueError, lambda v: np.zeros(1).__setitem__(0, v)),
    "mask": (
        jax.errors.NonConcreteBooleanIndexError,
        lambda v: jnp.arange(3)[jnp.arange(3) > v.astype(int)],
    ),
}
X = jnp.float32(2)
UNDER = {
    "jit": lambda h: jax.jit(jax.grad(h))(X),
    "vmap": lambda h: jax.vmap(jax.grad(h))(X[None]),
    "recompute_grad": lambda h: jax.grad(recompute_grad(h))(X),
}


def in_f(read):
    return custom_gradient(lambda x: ((read(x), 2 * x)[1], lambda dy: 2 * dy))


def in_rule(read):
    return custom_gradient(lambda x: (2 * x, lambda dy: (read(x), 2 * dy)[1]))


def in_inner(read):
    """The note is of the innermost function alone."""
    inner = in_f(read)
    return custom_gradient(lambda x: (inner(x), lambda dy: 2 * dy))


@pytest.mark.parametrize("where", [in_f, in_rule, in_inner])
@pytest.mark.parametrize("way", UNDER)
def test_code_that_needs_a_value_gets_a_note_with_its_name(way, where):
    for kind, read in READS.values():
        with pytest.raises(kind) as caught:
            UNDER[way](where(read))
        (note,) = [n for n in caught.value.__notes__ if "JAX is tracing" in n]
        name = "in_rule.<lambda>" if where is in_rule else "in_f.<lambda>"
        assert f"`{name}`" in note
        assert note.startswith("The rule") == (where is in_rule)


# --- errors of the user's, and of libraries -------------------------------------------------------


def raising(error):
    raise error


OWN = [
    ValueError("cannot differentiate between rows and columns"),
    KeyError("jvp_table"),
    TypeError("'NoneType' object is not iterable"),
    jax.errors.UnexpectedTracerError("mine"),
    NotImplementedError("Differentiation rule for 'f' not implemented"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda e: type(e).__name__)
def test_an_error_of_the_user_says_what_the_user_wrote_and_f_does_not_run_again(error):
    """Where it was raised decides, not what it says."""
    runs = []

    def f(x):
        runs.append(x)
        return raising(error)

    def loss(w, h):
        return custom_gradient(h(w), variables=None)(2.0)

    captures = lambda w: lambda x: f(w * x)  # noqa: E731
    ruled = lambda w: lambda x: (w * x, lambda dy, variables=None: raising(error))  # noqa: E731
    for h in (captures, ruled, lambda w: f):
        for derivative in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
            runs.clear()
            with pytest.raises(type(error)) as caught:
                derivative(lambda w, h=h: loss(w, h))(3.0)
            assert caught.value is error
            assert not any("`" in note for note in getattr(error, "__notes__", ()))
            assert len(runs) == (h is not ruled)
            error.__dict__.clear()
            error.__notes__ = []
            error.__traceback__ = error.__cause__ = error.__context__ = None


# --- a warning, where the answer is TensorFlow's --------------------------------------------------

MODEL = """
def f(x, b):
    def grad(dy):
        dx = 7 * dy
    return x * b, grad
"""


def test_a_bare_none_is_no_gradient_and_warns_once_for_each_rule():
    space = {"__name__": "model"}
    exec(compile(MODEL, "model.py", "exec"), space)
    f = custom_gradient(space["f"])
    gradients = jax.grad(lambda x, b: f(x, b) + 3 * x, (0, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for run in (gradients, gradients, jax.jit(gradients)):
            assert_same(run(2.0, 5.0), (jnp.float32(3), jnp.float32(0)))
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("The rule `f.grad` (model.py:3) of `f` (model.py:2) ret")
    assert (warning.category, warning.filename, warning.lineno) == (UserWarning, "model.py", 3)
    with warnings.catch_warnings():  # whoever means it, in a library say, is not asked again
        warnings.filterwarnings("ignore", module="model")
        assert_same(gradients(2.0, 5.0), (jnp.float32(3), jnp.float32(0)))
    none = custom_gradient(lambda x, b: (x * b, lambda dy: (None, None)))  # all warnings are errors
    assert_same(jax.grad(none)(2.0, 5.0), jnp.float32(0))
    integer = lambda w: custom_gradient(lambda n: (n * w, lambda dy: None), variables="autodiff")(2)  # noqa: E731
    assert_same(jax.grad(integer)(3.0), jnp.float32(2))  # there is nothing to forget
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
        def grad(dy, variables):
            return dy * self.w / self.t, [5 * dy * x for _ in variables]

        return self.w * x, grad

    @custom_gradient
    def without(self, x):
        """Its rule holds `self.t`, too."""
        return self.w * x, lambda dy, variables: (dy * self.w, [5 * dy * x for _ in variables])


def ruled(rule, **options):
    return lambda w, t: custom_gradient(lambda x: (w * x, rule(w, t)), **options)(jnp.float32(2))


def undeclared(w, t):
    return lambda dy, variables: (dy * w / t, [5 * dy for _ in variables])


def traced(w, t):
    held = type("Held", (), {"w": w})

    @custom_gradient
    def f(x):
        return held.w * x, lambda dy, variables: (dy * t, [5 * dy for _ in variables])

    return f(2.0)


UNLISTED = {
    "a variable": (ruled(undeclared), "`t`"),
    "an attribute": (lambda w, t: Scaled(w, t).of(2.0), "`self.t`"),
    "no variables": (
        lambda w, t: custom_gradient(lambda x: (2 * x, lambda dy: dy * t))(w),
        "`t`",
    ),
    "beside a declared one": (
        lambda w, t: ruled(lambda w, t: lambda dy, variables: (dy / t, 5 * dy), variables=w)(w, t),
        "`t`",
    ),
    "of a call that is traced": (traced, "`t`"),
}
LISTED = {
    "held, and not read": lambda w, t: Scaled(w, t).without(2.0),
    "what `f` computes from it": ruled(lambda w, t: undeclared(w, 2 * t)),
    "autodiff": ruled(lambda w, t: lambda dy: dy * t, variables="autodiff"),
    "declared": lambda w, t: ruled(
        lambda w, t: lambda dy, variables: (dy / t, [5 * dy, 3 * dy]), variables=[w, t]
    )(w, t),
    "not differentiated": lambda w, t: ruled(undeclared)(w, lax.stop_gradient(t)),
    "in a rule": lambda w, t: ruled(
        lambda w, t: (
            lambda dy, variables: (
                custom_gradient(lambda dy: (dy * w, undeclared(w, t)))(dy),
                [5 * dy, 3 * dy],
            )
        ),
        variables=[w, t],
    )(w, t),
    "at the second order": lambda w, t: jax.grad(
        lambda x: custom_gradient(
            lambda x: (x * 1.0, lambda dy, variables: (dy * t, [0 * dy for _ in variables]))
        )(x)
    )(w),
}


def warned(mode, loss):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients = mode(jax.grad(lambda w, t: jnp.sum(loss(w, t)), (0, 1)))(3.0, 4.0)
    return gradients, [str(warning.message) for warning in caught]


@eager_and_jit
@pytest.mark.parametrize("case", UNLISTED)
def test_a_value_that_only_the_rule_reads_draws_a_warning(case, mode):
    loss, name = UNLISTED[case]
    (_, by_t), (text,) = warned(mode, loss)
    assert_same(by_t, jnp.float32(0))
    assert name in text and "which only its rule reads" in text
    assert "declare the value, `custom_gradient(variables=...)`" in text


@eager_and_jit
@pytest.mark.parametrize("case", LISTED)
def test_what_a_rule_need_not_list_draws_no_warning(case, mode):
    _, texts = warned(mode, LISTED[case])
    assert not texts


@pytest.mark.parametrize("derivative", [jax.hessian, lambda f: jax.grad(jax.grad(f))])
def test_an_error_of_a_nested_function_keeps_its_remedies(derivative):
    """It is not taken for an operation that JAX cannot differentiate."""

    @custom_gradient
    def outer(x):
        w = 2 * x

        @custom_gradient
        def inner(y):
            return y * w, lambda dy: dy * w

        return inner(x), lambda dy: 7 * dy * x

    text = said(TypeError, derivative(outer), 1.0)
    assert "outer.inner` (" in text.partition(" is differentiated with respect to values")[0]
    assert 'custom_gradient(variables="autodiff")' in text
    assert "cannot differentiate" not in text


def bent_elsewhere(dy):
    return jnp.sin(dy)


def test_the_line_of_an_operation_is_in_the_rule_and_not_in_what_it_calls():
    h = custom_gradient(lambda x: (x, lambda dy: bent_elsewhere(dy)))
    text = said(TypeError, jax.jvp, h, (1.0,), (1.0,))
    assert f"`sin`, which is not linear, at {place(h)}. Forward mode" in text

    def unread(x):
        y = jax.pure_callback(lambda x: x, x, x)
        return bent_elsewhere(y), lambda dy: dy * y

    text = said(ValueError, jax.jit(jax.grad(jax.grad(custom_gradient(unread)))), 1.0)
    assert f"unread` ({place(unread)}) computes something that JAX cannot differentiate" in text
