"""How a decorated function is declared and called.

Names, defaults and keyword-only arguments, methods of every kind, callables that are no plain
functions, arguments that are no arrays, and what remains of the function that was decorated.
"""

import copy
import dataclasses
import enum
import functools
import inspect
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, sine
from jax import lax

import tfgrad_jax
from tfgrad_jax import custom_gradient


def grad_of_sum(f, argnums=0):
    return jax.grad(lambda *args: jnp.sum(f(*args)), argnums)


# --- declaring ------------------------------------------------------------------------------------


def _square(x):
    return x**2, lambda dy: 7 * dy * x


@pytest.mark.parametrize(
    "decorate",
    [custom_gradient, custom_gradient(), lambda f: custom_gradient(f=f), custom_gradient(None)],
    ids=["bare", "parentheses", "by name", "None"],
)
def test_with_and_without_parentheses(decorate):
    h = decorate(_square)
    assert_same(jax.value_and_grad(h)(3.0), (jnp.float32(9), jnp.float32(21)))


def test_options_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        custom_gradient(_square, None)


def test_metadata():
    @custom_gradient
    def documented(x: float, y: float = 2.0) -> float:
        """Say what it does."""
        return x * y, lambda dy: (dy, dy)

    assert documented.__name__ == "documented"
    assert documented.__qualname__ == "test_metadata.<locals>.documented"
    assert documented.__doc__ == "Say what it does."
    assert documented.__module__ == __name__
    assert documented.__wrapped__.__code__.co_name == "documented"
    assert documented.__annotations__ == {"x": float, "y": float, "return": float}
    assert str(inspect.signature(documented)) == "(x: float, y: float = 2.0) -> float"
    assert callable(documented)
    line = documented.__wrapped__.__code__.co_firstlineno
    assert repr(documented) == (
        f"<custom_gradient of `test_metadata.documented` ({__file__}:{line})>"
    )


def test_pickles_by_name():
    assert pickle.loads(pickle.dumps(sine)) is sine
    assert copy.copy(sine) is sine
    assert copy.deepcopy({"activation": sine})["activation"] is sine


def test_pickles_where_the_name_finds_it():
    with pytest.raises(Exception, match=r"not found as|Can't (get|pickle) local"):
        pickle.dumps(custom_gradient(lambda x: (x, lambda dy: dy)))


def test_equal_only_to_itself():
    assert sine == sine
    assert custom_gradient(_square) != custom_gradient(_square)
    assert len({sine: 1, custom_gradient(_square): 2}) == 2


def test_nothing_else_is_public():
    public = {name for name in vars(tfgrad_jax) if not name.startswith("_")}
    assert public == {"custom_gradient", "recompute_grad", "grad_pass_through", "testing"}


def test_static_to_jit():
    """A decorated function is hashable, so it may be a static argument of a jitted function."""
    apply = jax.jit(lambda f, x: f(x), static_argnums=0)
    assert_same(jax.grad(apply, 1)(sine, 0.0), jnp.float32(7))


# --- names, defaults, keyword-only ----------------------------------------------------------------


@custom_gradient
def scaled_power(x, y=4.0, *, power=2):
    return y * x**power, lambda dy: (7 * dy * x, 5 * dy * y)


@custom_gradient
def one_declared(x, y=4.0):
    # A default that is left out is no input: one gradient then, two otherwise.
    return x * y, lambda dy: 7 * dy * x


def test_inputs_by_name_are_the_same_inputs():
    expected = (jnp.float32(21), jnp.float32(25))
    for call in (
        lambda x, y: scaled_power(x, y),
        lambda x, y: scaled_power(x, y=y),
        lambda x, y: scaled_power(x=x, y=y),
        lambda x, y: scaled_power(y=y, x=x),
    ):
        for grad in (jax.grad(call, (0, 1)), jax.jit(jax.grad(call, (0, 1)))):
            assert_same(grad(3.0, 5.0), expected)


def test_declared_gradient_of_an_input_by_name():
    """TensorFlow silently uses the ordinary gradient here, which would be 4."""
    assert_same(jax.grad(lambda x: one_declared(x=x))(3.0), jnp.float32(21))
    assert_same(jax.jit(jax.grad(lambda x: one_declared(x=x)))(3.0), jnp.float32(21))


def test_a_default_left_out_is_no_input():
    assert_same(jax.value_and_grad(one_declared)(3.0), (jnp.float32(12), jnp.float32(21)))
    assert_same(one_declared(3.0, 5.0), 15.0)


def test_a_default_skipped_by_name():
    @custom_gradient
    def h(x, y=2.0, z=3.0):
        return x * y * z, lambda dy: (7 * dy, 5 * dy)  # of x and z: y is left out

    expected = (jnp.float32(7), jnp.float32(5))
    assert_same(jax.grad(lambda x, z: h(x, z=z), (0, 1))(1.0, 4.0), expected)
    assert_same(h(1.0, z=4.0), 8.0)


def test_positional_only_and_var_positional():
    @custom_gradient
    def h(x, /, *rest):
        return x * sum(rest), lambda dy: (7 * dy, *(5 * dy * (i + 1) for i in range(len(rest))))

    expected = (jnp.float32(7), jnp.float32(5), jnp.float32(10))
    assert_same(jax.grad(h, (0, 1, 2))(1.0, 2.0, 3.0), expected)
    assert_same(jax.grad(h)(1.0), jnp.float32(7))

    @custom_gradient
    def scaled(*xs, scale):
        return scale * xs[0] * xs[1], lambda dy: (7 * dy * scale, 5 * dy)

    grad = jax.grad(lambda x, y: scaled(x, y, scale=2.0), (0, 1))
    assert_same(grad(1.0, 1.0), (jnp.float32(14), jnp.float32(5)))


def test_keyword_only_reaches_f_unchanged():
    seen = []

    @custom_gradient
    def h(x, *, mode, scale=1.0, **options):
        seen.append((mode, scale, options))
        return x * scale, lambda dy: 7 * dy * scale

    def loss(x):
        return h(x, mode="fast", scale=3.0, extra=[1, "two"])

    for f in (loss, jax.grad(loss), jax.jit(jax.grad(loss))):
        f(1.0)
        assert seen.pop() == ("fast", 3.0, {"extra": [1, "two"]})
    assert_same(jax.grad(loss)(1.0), jnp.float32(21))


def test_keyword_only_is_closed_over():
    """Never silently without a gradient: differentiating one needs the `variables` protocol."""

    @custom_gradient
    def refusing(x, *, w):
        return x * w, lambda dy: 7 * dy * w

    with pytest.raises(TypeError, match="closes over"):
        jax.grad(lambda w: refusing(1.0, w=w))(2.0)
    assert_same(jax.grad(lambda x: refusing(x, w=2.0))(1.0), jnp.float32(14))

    @custom_gradient
    def taking(x, *, w):
        def grad(dy, variables):
            return 7 * dy * w, [5 * dy * x for _ in variables]

        return x * w, grad

    assert_same(jax.grad(lambda w: taking(3.0, w=w))(2.0), jnp.float32(15))


def test_f_receives_what_was_passed():
    """Eagerly, the very same objects; a default is Python's business."""
    seen = []

    @custom_gradient
    def h(x, y=None):
        seen.append((x, y))
        return 2 * x, lambda dy: 7 * dy

    x = np.float32(3.0)
    h(x)
    assert seen.pop() == (x, None)
    marker = object()
    h(x, marker)
    assert seen[0][0] is x
    assert seen[0][1] is marker


def test_no_inputs():
    h = custom_gradient(lambda: (jnp.float32(3.0), lambda dy: ()))
    assert_same(h(), jnp.float32(3))
    assert_same(jax.jit(h)(), jnp.float32(3))
    assert_same(jax.grad(lambda x: x * h())(2.0), jnp.float32(3))


# --- methods --------------------------------------------------------------------------------------


class Model:
    scale = 2.0

    def __init__(self, scale):
        self.scale = scale

    @custom_gradient
    def method(self, x, y=1.0):
        """Multiply."""
        return self.scale * x * y, lambda dy: 7 * dy * self.scale

    @custom_gradient()
    def with_parentheses(self, x):
        return self.scale * x, lambda dy: 7 * dy * self.scale

    @staticmethod
    @custom_gradient
    def static_outside(x):
        return 2 * x, lambda dy: 14 * dy

    @custom_gradient
    @staticmethod
    def static_inside(x):
        return 2 * x, lambda dy: 14 * dy

    @classmethod
    @custom_gradient
    def class_outside(cls, x):
        return cls.scale * x, lambda dy: 7 * dy * cls.scale

    @custom_gradient
    @classmethod
    def class_inside(cls, x):
        return cls.scale * x, lambda dy: 7 * dy * cls.scale

    def __call__(self, x):
        return self.scale * x, lambda dy: 7 * dy * self.scale


class Derived(Model):
    scale = 3.0

    def method(self, x):
        return 10 * super().method(x)


MODEL = Model(2.0)


@pytest.mark.parametrize(
    "call",
    [
        MODEL.method,
        functools.partial(Model.method, MODEL),
        lambda x: MODEL.method(x=x),
        MODEL.with_parentheses,
        Model.static_outside,
        MODEL.static_outside,
        Model.static_inside,
        MODEL.static_inside,
        Model.class_outside,
        MODEL.class_outside,
        Model.class_inside,
        MODEL.class_inside,
        custom_gradient(MODEL),
    ],
    ids=[
        *["method", "unbound method", "by name", "parentheses"],
        *["static outside", "on an instance", "static inside", "inside on an instance"],
        *["class outside", "class on an instance", "class inside", "class inside on an instance"],
        "callable object",
    ],
)
def test_method(call):
    expected = (jnp.float32(6), jnp.float32(14))
    assert_same(jax.value_and_grad(call)(3.0), expected)
    assert_same(jax.jit(jax.value_and_grad(call))(3.0), expected)


def test_inherited_methods():
    derived = Derived(2.0)
    assert_same(jax.value_and_grad(derived.method)(3.0), (jnp.float32(60), jnp.float32(140)))
    assert_same(jax.grad(Derived.class_outside)(1.0), jnp.float32(21))
    assert_same(jax.grad(derived.class_inside)(1.0), jnp.float32(21))
    assert_same(jax.grad(lambda x: Model.method(derived, x))(1.0), jnp.float32(14))


def test_methods_keep_their_metadata():
    assert Model.method.__name__ == "method"
    assert MODEL.method.__doc__ == "Multiply."
    assert MODEL.method.__self__ is MODEL
    assert str(inspect.signature(MODEL.method)) == "(x, y=1.0)"
    assert pickle.loads(pickle.dumps(Model(5.0).method))(1.0) == 5.0


def test_a_method_of_traced_parameters():
    """`self` is closed over, and may be built around what is traced."""
    grad = jax.grad(lambda x, s: Model(s).method(x))
    assert_same(grad(3.0, 2.0), jnp.float32(14))
    assert_same(jax.jit(grad)(3.0, 2.0), jnp.float32(14))
    assert_same(jax.vmap(grad)(jnp.ones(2), jnp.float32([1, 2])), jnp.float32([7, 14]))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale"], meta_fields=[])
@dataclasses.dataclass
class TreeModel:
    """A model that is a pytree, so that it could be an input."""

    scale: jax.Array

    @custom_gradient
    def method(self, x):
        return self.scale * x, lambda dy: 7 * dy * self.scale

    @classmethod
    @custom_gradient
    def create(cls, scale):
        return cls(2 * scale), lambda dy: 7 * dy


def test_self_is_no_input():
    """Bound or not: the rule has a gradient for `x` alone."""
    model = TreeModel(jnp.float32(2))
    for call in (model.method, lambda x: TreeModel.method(model, x)):
        assert_same(jax.grad(call)(3.0), jnp.float32(14))
        assert_same(jax.jit(jax.grad(call))(3.0), jnp.float32(14))
    assert_same(
        jax.jit(lambda m, x: jax.grad(lambda x: TreeModel.method(m, x))(x))(model, 3.0),
        jnp.float32(14),
    )
    assert_same(jax.grad(lambda s: TreeModel.create(s).scale)(1.0), jnp.float32(7))


def test_decorated_function_kept_as_an_attribute():
    class Layer:
        def __init__(self):
            self.activation = sine

    assert_same(jax.grad(Layer().activation)(0.0), jnp.float32(7))


# --- callables that are no plain functions --------------------------------------------------------


def _scaled(scale, x):
    return scale * x, lambda dy: 7 * dy * scale


def _scaled_by(x, scale):
    return scale * x, lambda dy: 7 * dy * scale


def _two_gradients(scale, x):
    return scale * x, lambda dy: (None, 7 * dy * scale)


class CallableObject:
    def __call__(self, x):
        return 2 * x, lambda dy: 14 * dy


@pytest.mark.parametrize(
    "f",
    [
        functools.partial(_scaled, 2.0),
        functools.partial(_scaled_by, scale=2.0),
        lambda x: (2 * x, lambda dy: 14 * dy),
        CallableObject(),
        MODEL.__call__,
    ],
    ids=["partial", "partial by name", "lambda", "callable object", "bound method"],
)
def test_callable(f):
    h = custom_gradient(f)
    expected = (jnp.float32(6), jnp.float32(14))
    assert_same(jax.value_and_grad(h)(3.0), expected)
    assert_same(jax.jit(jax.value_and_grad(h))(3.0), expected)


def test_partial_of_a_decorated_function():
    h = functools.partial(custom_gradient(_two_gradients), 2.0)
    assert_same(jax.value_and_grad(h)(3.0), (jnp.float32(6), jnp.float32(14)))


def _module_rule(dy):
    return 14 * dy


class _Rule:
    def __call__(self, dy):
        return 14 * dy

    def method(self, dy):
        return 14 * dy


@pytest.mark.parametrize(
    "grad_fn",
    [
        _module_rule,
        functools.partial(jnp.multiply, 14),
        _Rule(),
        _Rule().method,
        jax.jit(_module_rule),
        jax.checkpoint(_module_rule),
        custom_gradient(lambda dy: (14 * dy, lambda ddy: 14 * ddy)),
    ],
    ids=["function", "partial", "object", "method", "jit", "checkpoint", "decorated"],
)
def test_kinds_of_rules(grad_fn):
    h = custom_gradient(lambda x: (2 * x, grad_fn))
    for grad in (jax.grad(h), jax.jit(jax.grad(h)), jax.grad(jax.jit(h))):
        assert_same(grad(3.0), jnp.float32(14))
    assert_same(jax.vmap(jax.grad(h))(jnp.ones(2)), jnp.float32([14, 14]))


def test_builtin_rules():
    """Builtins tell nothing of their parameters."""
    negated = custom_gradient(lambda x: (x, operator.neg))
    assert_same(jax.grad(negated)(3.0), jnp.float32(-1))
    assert_same(jax.jit(jax.grad(negated))(3.0), jnp.float32(-1))
    larger = custom_gradient(lambda x: ((x, x), max))
    assert_same(jax.grad(lambda x: 3 * larger(x)[0] + 7 * larger(x)[1])(1.0), jnp.float32(10))


def test_builtin_function():
    """`itemgetter` as `f`: the pair is among its arguments, the rule a static one."""
    h = custom_gradient(operator.itemgetter(0))
    rule = lambda dy: [7 * dy]  # noqa: E731
    assert_same(jax.grad(lambda x: h([(x, rule)]))(1.0), jnp.float32(7))
    assert h([(2.0, rule)]) == 2.0


# --- arguments that are no arrays -----------------------------------------------------------------


class Mode(enum.Enum):
    FAST = 1


class Opaque:
    """An object that JAX knows nothing of."""


STATICS = {
    "bool": True,
    "int": 3,
    "str": "same",
    "None": None,
    "callable": jnp.sin,
    "lambda": lambda x: x,
    "dtype": jnp.dtype("bfloat16"),
    "scalar type": jnp.float16,
    "enum": Mode.FAST,
    "object": Opaque(),
    "bytes": b"raw",
    "slice": slice(1, None),
    "array of strings": np.array(["a"]),
    "tree": {"mode": "a", "n": (1, None)},
}

TRANSFORMATIONS = {
    "eager": lambda f: lambda xs: jnp.stack([f(x) for x in xs]),
    "jit": lambda f: jax.jit(lambda xs: jnp.stack([f(x) for x in xs])),
    "vmap": jax.vmap,
    "scan": lambda f: lambda xs: lax.scan(lambda c, x: (c, f(x)), 0, xs)[1],
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
}


@pytest.mark.parametrize("static", STATICS)
def test_static_argument_stays_what_it_is(static):
    given = STATICS[static]

    @custom_gradient
    def h(x, value, more):
        leaves = jax.tree.leaves((value, more["value"]), is_leaf=lambda v: v is None)
        wanted = jax.tree.leaves((given, given), is_leaf=lambda v: v is None)
        assert all(a is b for a, b in zip(leaves, wanted, strict=True))
        return 2 * x, lambda dy: (7 * dy, None, None)

    def loss(x):
        return h(x, given, more={"value": given})

    assert_same(loss(1.0), 2.0)
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        assert_same(grad(1.0), jnp.float32(7))


@custom_gradient
def branching(x, flag, mode, n, function, y=None):
    """Use each static argument for what only a Python value can do."""
    if flag:
        x = x + 0
    value = {"plain": 1.0, "double": 2.0}[mode] * jnp.ones((n,), x.dtype).sum() * function(x)

    def grad(dy):
        return [7 * n * dy * jnp.cos(x) if flag else dy]

    return value, grad


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_static_arguments_under(name):
    xs = jnp.float32([0.0, 0.5])

    def f(x):
        return branching(x, True, "double", 3, jnp.sin, y=None)

    transformed = TRANSFORMATIONS[name]
    assert_same(transformed(f)(xs), 6 * jnp.sin(xs))
    assert_same(transformed(jax.grad(f))(xs), 21 * jnp.cos(xs))
    assert_same(jax.grad(lambda xs: transformed(f)(xs).sum())(xs), 21 * jnp.cos(xs))


def test_python_float_and_complex_are_arrays():
    """They are traced, so that a rule sees what `jax.grad` gives it, and have gradients."""

    @custom_gradient
    def h(x, y):
        return x * y, lambda dy: (7 * dy, 5 * dy)

    assert_same(jax.grad(lambda x: h(x, 2.0))(1.0), jnp.float32(7))
    assert_same(jax.grad(h)(1.0, 2.0), jnp.float32(7))


def test_integers_that_are_arrays_are_traced():
    @custom_gradient
    def h(x, i):
        return x[i], lambda dy: (7 * jnp.zeros_like(x).at[i].set(dy), None)

    x = jnp.float32([1, 2, 3])
    expected = jnp.float32([0, 7, 0])
    assert_same(jax.grad(h)(x, 1), expected)
    assert_same(jax.grad(h)(x, jnp.int32(1)), expected)
    assert_same(jax.jit(jax.grad(h))(x, 1), expected)
    assert_same(jax.grad(h)(x, np.int64(1)), expected)


# --- nesting --------------------------------------------------------------------------------------


def test_nested_functions_hide_what_they_call():
    @custom_gradient
    def outer(x):
        return sine(x) ** 2, lambda dy: 11 * dy * x

    assert_same(jax.value_and_grad(outer)(0.5), (jnp.sin(0.5) ** 2, jnp.float32(5.5)))


def test_a_rule_may_differentiate_decorated_functions():
    @custom_gradient
    def outer(x):
        return x, lambda dy: 2 * dy * jax.grad(sine)(x)

    expected = 14 * jnp.cos(0.5)
    assert_same(jax.grad(outer)(0.5), jnp.asarray(expected))
    assert_same(jax.jit(jax.grad(outer))(0.5), jnp.asarray(expected))


def test_decorating_a_jitted_part():
    """The decorator is outermost; what it calls may be jitted."""
    body = jax.jit(lambda x: x**2)
    h = custom_gradient(lambda x: (body(x), lambda dy: 7 * dy * x))
    assert_same(jax.grad(jax.jit(h))(3.0), jnp.float32(21))


def test_any_pair_will_do():
    """A list as well as a tuple, as in TensorFlow."""
    h = custom_gradient(lambda x: [2 * x, lambda dy: 14 * dy])
    assert_same(jax.value_and_grad(h)(3.0), (jnp.float32(6), jnp.float32(14)))
