"""How a decorated function may be called: by name, with defaults, as a method, with settings.

In the tables, `x` has the gradient 7, the next input 5, the third 3, whatever the values are.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit
from support.ways import WAYS, assert_derivative, hand_written, squared

from tfgrad_jax import custom_gradient


def named(x, y=4.0, *, power=2):
    return y * x**power, lambda dy: (7 * dy, 5 * dy)


def full(x, y=2.0, z=3.0, mode="m", key=None):
    """Give gradients for all arguments, whichever are left out."""
    return x * y * z, lambda dy: (7 * dy, 5 * dy, 3 * dy, None, None)


TABLE = np.ones(2)
CALLS = {  # a function, a call of it with two differentiated numbers, and their gradients
    "by position": (named, lambda h, a, b: h(a, b), (7, 5)),
    "in another order": (named, lambda h, a, b: h(y=b, x=a, power=3), (7, 5)),
    "the last ones left out": (full, lambda h, a, b: h(a, b), (7, 5)),
    "one between left out": (full, lambda h, a, b: h(a, z=b), (7, 3)),
    "a default beside a tree": (
        lambda p, c=2.0, n=None: (c * p["a"], lambda d: ({"a": 7 * d, "b": 5 * d}, 3 * d, 99 * d)),
        lambda h, a, b: h({"a": a, "b": b}), (7, 5)),
    "flat, a default left out": (
        lambda p, c=2.0: (p[0] * p[1] * c, lambda d: [7 * d, 5 * d, 3 * d]),
        lambda h, a, b: h([a, b]), (7, 5)),
    "an array between left out": (
        lambda x, table=TABLE, y=1.0: (x * y, lambda d: (7 * d, d * jnp.ones(2), 5 * d)),
        lambda h, a, b: h(a, y=b), (7, 5)),
    "variadic with options": (
        lambda x, /, *rest, **options: (x * sum(rest, options["start"]), lambda d: [7 * d, 5 * d]),
        lambda h, a, b: h(a, b, start=1.0, other="o"), (7, 5)),
    "beside unasked variables": (
        lambda x, scale=2.0: (x * scale, lambda d, variables=None: ((7 * d, 5 * d), [])),
        lambda h, a, b: h(a, b), (7, 5)),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("call", CALLS)
def test_an_argument_has_its_gradient_however_it_is_passed(call, mode):
    f, run, expected = CALLS[call]
    f = functools.partial(run, custom_gradient(f))
    expected = tuple(map(jnp.float32, expected))
    assert_same(mode(jax.grad(f, (0, 1)))(2.0, 3.0), expected)
    assert_same(jax.grad(mode(f), (0, 1))(jnp.float32(2), jnp.float32(3)), expected)
    assert_same(mode(jax.grad(f))(2.0, 3.0), expected[0])


@eager_and_jit
def test_keyword_only_arguments_are_closed_over_and_reach_f_unchanged(mode):
    """Never silently without a gradient: differentiating one needs `variables`."""
    seen = []

    @custom_gradient
    def h(x, *, w, mode="m", **options):
        seen.append((mode, options))
        return x * w, lambda dy, variables: (7 * dy * w, [5 * dy * x for _ in variables])

    grad = mode(jax.grad(lambda x, w: h(x, w=w, mode="fast", extra=[1, "two"]), (0, 1)))
    assert_same(grad(3.0, 2.0), (jnp.float32(14), jnp.float32(15)))
    assert all(s == ("fast", {"extra": [1, "two"]}) for s in seen)


def test_a_parameter_may_be_named_self():
    """Not of a method: `self` by name reaches `f`, as any other keyword."""
    h = custom_gradient(lambda x, **options: (x * options["self"], lambda dy: 7 * dy))
    assert h(3.0, self=2.0) == 6.0
    assert_same(jax.grad(lambda x: h(x, self=2.0))(3.0), jnp.float32(7))


# --- methods --------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale"], meta_fields=[])
@dataclasses.dataclass
class Model:
    """A pytree, so that `self` could be an input."""

    scale: float = 2.0

    @custom_gradient
    def method(self, x, y=1.0):
        """Multiply."""
        return self.scale * x * y, lambda dy: 7 * dy * self.scale


def test_a_method_without_its_instance_is_an_error():
    with pytest.raises(TypeError, match=r", \(self, x, y=1.0\): missing .*'self'"):
        Model.method()


@eager_and_jit
def test_self_is_read_at_each_call(mode):
    model = Model(3.0)
    assert_same(mode(jax.grad(model.method))(2.0), jnp.float32(21))
    model.scale = 4.0
    assert_same(mode(jax.grad(lambda x: model.method(x)))(2.0), jnp.float32(28))


# --- settings: what JAX is not tracing reaches f as it is -----------------------------------------


SETTINGS = {
    "int": 7, "float": 7.0, "complex": 7 + 0j, "bool": True, "big int": 10**30, "str": "seven",
    "None": None, "enum": lax.Precision.HIGH, "dtype": jnp.bfloat16, "function": jnp.tanh,
    "object": object(), "type": Model, "slice": slice(1, 7), "nan": float("nan"),
    "array": jnp.arange(3.0), "integers": jnp.arange(3), "key": jax.random.key(0),
    "NumPy array": np.arange(3.0), "NumPy scalar": np.float32(2), "strings": np.array(["a"]),
}  # fmt: skip


ORACLE = hand_written(lambda x: x**2, lambda x: 7 * x)
X = jnp.float32(2)


@pytest.mark.parametrize("way", ["grad", "hessian", "jit(jacfwd)", "grad(checkpoint)"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_reaches_f_as_it_is(setting, way):
    """The very object, by position, by name and in a container."""
    given = SETTINGS[setting]
    seen = []

    @custom_gradient
    def h(x, setting, options, more):
        seen.extend((setting, options["deep"][1], more))
        return x**2, lambda dy: (7 * dy * x, None, None, None)

    loss = squared(lambda x: h(x, given, {"deep": (1, given)}, more=given))
    assert_derivative(WAYS[way], loss, squared(ORACLE), X)
    assert seen
    assert all(s is given for s in seen)


@eager_and_jit
def test_doubles_beside_what_is_differentiated_raise_no_warning(mode):
    """Nobody asked for their gradients; without 64 bits JAX warns of every cast to float64."""
    data = np.ones(3)
    h = custom_gradient(lambda w, x: (jnp.sum(w * x), lambda dy: (7 * dy * x, 5 * dy * w)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(mode(jax.grad(lambda w: h(w, data)))(jnp.ones(3)), jnp.full(3, 7.0))
        assert_same(mode(jax.grad(h, (0, 1)))(data, data), (jnp.full(3, 7.0), jnp.full(3, 5.0)))
    assert data.dtype == np.float64


# --- primal: runs instead of f where nothing is differentiated ------------------------------------

RUNS = []


def primal(x, power=2, *, offset=0.0):  # wrong by 100 on purpose
    return x**power + offset + 100


@functools.partial(custom_gradient, primal=primal)
def h(x, power=2, *, offset=0.0):
    RUNS.append(x)
    return x**power + offset, lambda dy: (7 * dy * x, None)


NOT_DIFFERENTIATED = {
    "eager": lambda: h(X),
    "jit": lambda: jax.jit(h)(X),
    "vmap": lambda: jax.vmap(h)(X[None])[0],
    "beside what is": lambda: jax.value_and_grad(lambda z: h(X) + 0 * z)(X)[0],
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIATED)
def test_primal_runs_where_nothing_is_differentiated(name):
    RUNS.clear()
    assert_same(NOT_DIFFERENTIATED[name](), jnp.float32(104))
    assert not RUNS


@pytest.mark.parametrize("way", ["grad", "jit(grad)", "jvp", "hessian"])
def test_f_runs_where_something_is_differentiated(way):
    assert_derivative(WAYS[way], squared(h), squared(ORACLE), X)
    assert_same(jax.value_and_grad(lambda x: h(x, 3))(X), (jnp.float32(8), jnp.float32(14)))


@eager_and_jit
def test_primal_gets_a_default_that_is_skipped_by_position(mode):
    f = lambda a, b=3.0, c=2.0: (a * b**c, lambda dy: (dy, dy, dy))  # noqa: E731
    h = custom_gradient(f, primal=lambda a, b=10.0, c=2.0: a * b**c)
    assert_same(mode(lambda a: h(a, c=4.0))(1.0) + 0, jnp.float32(81))


class Scaled:
    def __init__(self, w):
        self.w = w

    @custom_gradient(primal=lambda self, x: self.w * x**2 + 100)
    def square(self, x):
        return self.w * x**2, lambda dy, variables: (7 * dy * self.w, [5 * dy * x])


@eager_and_jit
def test_primal_of_a_method_and_of_captured_weights(mode):
    loss = lambda w, x: Scaled(w).square(x)  # noqa: E731
    args = jnp.float32(3), X
    assert_same(mode(loss)(*args), jnp.float32(112))
    for differentiate in (jax.grad, jax.jacfwd):
        got = mode(differentiate(loss, (0, 1)))(*args)
        assert_same(got, (jnp.float32(10), jnp.float32(21)))


# --- Refs: read, written and differentiated like other inputs -------------------------------------


def rule_reads(r, x):
    return x**2, lambda dy: (None, 7 * dy * r[...])


def writes(r, x):
    r[...] = r[...] + x
    kept = r[...]
    return kept * x, lambda dy: (None, 7 * dy * kept)


def differentiable(r, x):
    kept = r[...]
    return kept * x, lambda dy: (5 * dy * x, 7 * dy * kept)


REFS = {  # the value, and the gradients by what the Ref holds, 3, and by x, 2
    "the rule reads": (rule_reads, 4, (0, 21)),
    "written": (writes, 10, (0, 35)),
    "differentiable": (differentiable, 6, (10, 21)),
}


@eager_and_jit
@pytest.mark.parametrize("kind", REFS)
def test_a_ref_is_an_input(kind, mode):
    f, value, expected = REFS[kind]
    h = custom_gradient(f)
    got = mode(jax.value_and_grad(lambda v, x: h(jax.new_ref(v), x), (0, 1)))(jnp.float32(3), X)
    assert_same(got, jax.tree.map(jnp.float32, (value, expected)))


@eager_and_jit
def test_the_second_order_reads_a_ref(mode):
    h = custom_gradient(differentiable)
    second = jax.grad(jax.grad(lambda x: h(jax.new_ref(jnp.float32(3)), x) ** 2))
    assert_same(mode(second)(X), jnp.float32(2 * 21 * 21))
