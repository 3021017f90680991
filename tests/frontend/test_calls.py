"""How a decorated function may be called: by name, with defaults, as a method, with settings.

In the tables, `x` has the gradient 7, the next input 5, the third 3, whatever the values are.
"""

import dataclasses
import enum
import functools
import gc
import inspect
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import FORWARD, REVERSE, SECOND, assert_derivative, hand_written

from tfgrad_jax import custom_gradient


@custom_gradient
def named(x, y=4.0, *, power=2):
    return y * x**power, lambda dy: (7 * dy, 5 * dy)


@custom_gradient
def full(x, y=2.0, z=3.0, mode="m", key=None):
    """Give gradients for all arguments, whichever are left out."""
    return x * y * z, lambda dy: (7 * dy, 5 * dy, 3 * dy, None, None)


@custom_gradient
def tree_full(p, scale=2.0, bias=None, extra=()):
    return p["a"] * p["b"] * scale, lambda dy: ({"a": 7 * dy, "b": 5 * dy}, 3 * dy, 99 * dy, None)


@custom_gradient
def flat_full(p, scale=2.0):
    return p[0] * p[1] * scale, lambda dy: [7 * dy, 5 * dy, 3 * dy]


@custom_gradient
def array_default(x, table=np.ones((2, 3)), y=1.0):  # noqa: B008
    return x * y * table.sum(), lambda dy: (7 * dy, dy * jnp.ones((9, 9)), 5 * dy)


@custom_gradient
def given_only(x, y=2.0, z=3.0):
    return x * y * z, lambda dy: (7 * dy, 5 * dy)


@custom_gradient
def variadic(x, /, *rest, **options):
    return x * sum(rest, options.get("start", 1.0)), lambda dy: [
        7 * dy, 5 * dy, 3 * dy,
    ][: 1 + len(rest)]  # fmt: skip


@custom_gradient
def with_variables(x, scale=2.0):
    return x * scale, lambda dy, variables=None: ((7 * dy, 5 * dy), [])


@custom_gradient
def none_for_a_pair(p, omitted=None):
    return p[0] * p[1], lambda dy: ((None, None), None)


@custom_gradient
def none_and_variables(n, x, y):
    return x * y, lambda dy, variables=None: ((None, 7 * dy, 5 * dy), None)


@custom_gradient
def none_for_setting(mode, x, scale=1.0, mask=None):
    return x * scale, lambda dy: (None, 7 * dy)


@custom_gradient
def none_for_first(n, x):
    return x * 2, lambda dy, variables=None: ((None, 7 * dy), None)


CALLS = {  # of two differentiated numbers, and their gradients
    "by position": (lambda a, b: named(a, b), (7, 5)),
    "second by name": (lambda a, b: named(a, y=b), (7, 5)),
    "in another order": (lambda a, b: named(y=b, x=a, power=3), (7, 5)),
    "nothing left out": (lambda a, b: full(a, b, 3.0, "m", None), (7, 5)),
    "the last ones left out": (lambda a, b: full(a, b), (7, 5)),
    "all but one left out": (lambda a, b: full(a) + 0 * b, (7, 0)),
    "one between left out": (lambda a, b: full(a, z=b), (7, 3)),
    "a default beside a tree": (lambda a, b: tree_full({"a": a, "b": b}), (7, 5)),
    "a default between": (lambda a, b: tree_full({"a": a, "b": 1.0}, extra=[b]), (7, 0)),
    "flat, a default left out": (lambda a, b: flat_full([a, b]), (7, 5)),
    "flat, nothing left out": (lambda a, b: flat_full([a, 1.0], b), (7, 3)),
    "an array left out": (lambda a, b: array_default(a, y=b), (7, 5)),
    "gradients of what is given": (lambda a, b: given_only(a, z=b), (7, 5)),
    "variadic": (lambda a, b: variadic(a, 2.0, b), (7, 3)),
    "variadic with options": (lambda a, b: variadic(a, b, start=1.0, other="o"), (7, 5)),
    "no gradient for a pair, a default left out": (lambda a, b: none_for_a_pair((a, b)), (0, 0)),
    "beside a setting, defaults left out": (
        lambda a, b: none_for_setting("m", a) + 0 * none_for_setting("m", b),
        (7, 0),
    ),
    "beside None and unasked variables": (lambda a, b: none_and_variables(None, a, b), (7, 5)),
    "two of them": (lambda a, b: none_for_first(None, a) + none_for_first(None, b), (7, 7)),
    "beside unasked variables": (lambda a, b: with_variables(a, b), (7, 5)),
}


@eager_and_jit
@pytest.mark.parametrize("call", CALLS)
def test_an_argument_has_its_gradient_however_it_is_passed(call, mode):
    f, expected = CALLS[call]
    expected = tuple(map(jnp.float32, expected))
    assert_same(mode(jax.grad(f, (0, 1)))(2.0, 3.0), expected)
    assert_same(jax.grad(mode(f), (0, 1))(jnp.float32(2), jnp.float32(3)), expected)
    assert_same(mode(jax.grad(f))(2.0, 3.0), expected[0])


def test_a_wrong_number_of_gradients_is_wrong_beside_a_default_too():
    for h in (
        custom_gradient(lambda x, scale=2.0: (x * scale, lambda dy: (dy, dy, dy))),
        custom_gradient(lambda x: (x, lambda dy, variables=None: (dy, dy, dy))),
    ):
        with pytest.raises(ValueError, match="returned 3 gradients; expected 1, for the input `x`"):
            jax.grad(h)(1.0)


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


@pytest.mark.parametrize("before", [lambda f: None, lambda f: f(1.0), lambda f: f(x=1.0)])
def test_nothing_depends_on_what_was_called_before(before):
    """A function that `f` decorates, and keeps, is not inside a rule, however `f` was called."""
    kept = []

    @custom_gradient
    def f(x):
        if not kept:
            kept.append(custom_gradient(lambda w: (w * 2, lambda dy: 7 * dy)))
        return x**2, lambda dy: dy * kept[0](x)

    before(f)
    assert_same(jax.grad(f)(3.0), jnp.float32(6))
    assert_same(jax.grad(jax.grad(f))(3.0), jnp.float32(7))


def test_what_f_makes_is_not_kept():
    made = []

    @custom_gradient
    def f(x):
        class Out(NamedTuple):
            y: Any

        made.append(weakref.ref(Out))
        return Out(2 * x), lambda dy: 7 * dy

    f(1.0), jax.grad(lambda x: f(x).y)(1.0)
    gc.collect()
    assert [ref() for ref in made] == [None, None]


@eager_and_jit
def test_a_rule_that_requires_variables_returns_a_pair_without_any(mode):
    """It gets an empty list then."""
    h = custom_gradient(lambda x, b: (x * b, lambda dy, variables: ((7 * dy, 5 * dy), variables)))
    assert_same(mode(jax.grad(h, (0, 1)))(2.0, 3.0), (jnp.float32(7), jnp.float32(5)))
    for f, wrong in (
        (lambda x: (2 * x, lambda dy, variables: 7 * dy), "must return a pair"),
        (lambda x: (2 * x, lambda dy, variables: [7 * dy]), "must return a pair"),
    ):
        with pytest.raises(TypeError, match=wrong):
            mode(jax.grad(custom_gradient(f)))(2.0)


@eager_and_jit
def test_a_function_without_inputs(mode):
    h = custom_gradient(lambda: (jnp.float32(3.0), lambda dy: ()))
    assert_same(mode(h)(), jnp.float32(3))
    assert_same(mode(jax.grad(lambda x: x * h()))(2.0), jnp.float32(3))


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

    @custom_gradient
    def annotated(self, x: float) -> tuple[float, Callable[[float], float]]:
        return self.scale * x, lambda dy: 7 * dy * self.scale


MODEL = Model(2.0)


class Unnamed:
    scale = 2.0

    @custom_gradient
    def method(*args):
        one, x = args
        return one.scale * x, lambda dy: 7 * dy * one.scale

    @classmethod
    @lambda f: functools.wraps(f)(lambda *args: f(*args))
    @custom_gradient
    def wrapped(cls, x):
        return x, lambda dy: (dy, dy)


def test_an_instance_may_be_one_of_several_arguments():
    assert_same(jax.grad(Unnamed().method)(3.0), jnp.float32(14))
    with pytest.raises(ValueError, match="2 gradients; expected 1, for the input `x`"):
        jax.grad(Unnamed.wrapped)(3.0)
    with pytest.raises(TypeError, match=r", \(self, x, y=1.0\): missing .*'self'"):
        Model.method()


@eager_and_jit
def test_self_is_read_at_each_call(mode):
    model = Model(3.0)
    assert_same(mode(jax.grad(model.method))(2.0), jnp.float32(21))
    model.scale = 4.0
    assert_same(mode(jax.grad(lambda x: model.method(x)))(2.0), jnp.float32(28))


def test_methods_keep_their_metadata():
    assert (Model.method.__name__, MODEL.method.__doc__) == ("method", "Multiply.")
    assert MODEL.method.__self__ is MODEL
    assert str(inspect.signature(MODEL.method)) == "(x, y=1.0)"
    assert str(inspect.signature(MODEL.annotated)) == "(x: float) -> float"  # not the pair
    assert MODEL.annotated.__annotations__ == {"x": float, "return": float}
    assert pickle.loads(pickle.dumps(Model(5.0).method))(1.0) == 5.0


# --- settings: what JAX is not tracing reaches f as it is -----------------------------------------


class Mode(enum.Enum):
    FAST = enum.auto()


SETTINGS = {
    "int": 7, "float": 7.0, "complex": 7 + 0j, "bool": True, "big int": 10**30, "str": "seven",
    "None": None, "enum": Mode.FAST, "dtype": jnp.bfloat16, "function": jnp.tanh,
    "object": object(), "type": Model, "slice": slice(1, 7), "nan": float("nan"),
    "array": jnp.arange(3.0), "integers": jnp.arange(3), "key": jax.random.key(0),
    "NumPy array": np.arange(3.0), "NumPy scalar": np.float32(2), "strings": np.array(["a"]),
}  # fmt: skip


WAYS = {**REVERSE, **FORWARD, **SECOND}
ORACLE = hand_written(lambda x: x**2, lambda x: 7 * x)
X = jnp.float32(2)
PAIRS = list(itertools.product(SETTINGS, ("grad", "jit(jacfwd)")))
PAIRS += sample((p for p in itertools.product(SETTINGS, WAYS) if p not in PAIRS), 30)


def squared(h):
    """Return a loss whose second derivative needs the rule twice."""
    return lambda x: h(x) ** 2


@pytest.mark.parametrize(("setting", "way"), PAIRS)
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
    "by name": lambda: h(x=X, offset=0.0),
    "jit": lambda: jax.jit(h)(X),
    "vmap": lambda: jax.vmap(h)(X[None])[0],
    "scan": lambda: lax.scan(lambda c, x: (c, h(x)), None, X[None])[1][0],
    "beside what is": lambda: jax.value_and_grad(lambda z: h(X) + 0 * z)(X)[0],
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIATED)
def test_primal_runs_where_nothing_is_differentiated(name):
    RUNS.clear()
    assert_same(NOT_DIFFERENTIATED[name](), jnp.float32(104))
    assert not RUNS


@pytest.mark.parametrize("way", ["grad", "jit(grad)", "jvp", "hessian", *sample(WAYS, 6)])
def test_f_runs_where_something_is_differentiated(way):
    assert_derivative(WAYS[way], squared(h), squared(ORACLE), X)
    assert_same(jax.value_and_grad(lambda x: h(x, 3))(X), (jnp.float32(8), jnp.float32(14)))


@eager_and_jit
def test_primal_of_a_method_and_of_captured_weights(mode):
    class Model:
        def __init__(self, w):
            self.w = w

        @custom_gradient(primal=lambda self, x: self.w * x**2 + 100)
        def call(self, x):
            rule = lambda dy, variables: (7 * dy * self.w, [5 * dy * x for _ in variables])  # noqa: E731
            return self.w * x**2, rule

    loss = lambda w, x: Model(w).call(x)  # noqa: E731
    args = jnp.float32(3), X
    assert_same(mode(loss)(*args), jnp.float32(112))
    assert_same(mode(Model(3.0).call)(X), jnp.float32(112))
    for differentiate in (jax.grad, jax.jacfwd):
        got = mode(differentiate(loss, (0, 1)))(*args)
        assert_same(got, (jnp.float32(10), jnp.float32(21)))


# --- Refs: read, written and differentiated like other inputs -------------------------------------


def by_hand(f, gradients):
    """Return the function with a rule by `jax.custom_vjp`, which shows what JAX can do."""
    g = jax.custom_vjp(lambda r, x: f(r, x)[0])
    keeps = (lambda r: r) if f is rule_reads else lambda r: r[...]
    g.defvjp(lambda r, x: (f(r, x)[0], (keeps(r), x)), lambda kept, dy: gradients(*kept, dy))
    return g


def reads(r, x):
    kept = r[...]
    return kept * x, lambda dy: (None, 7 * dy * kept)


def rule_reads(r, x):
    return x**2, lambda dy: (None, 7 * dy * r[...])


def writes(r, x):
    r[...] = r[...] + x
    kept = r[...]
    return kept * x, lambda dy: (None, 7 * dy * kept)


def differentiable(r, x):
    kept = r[...]
    return kept * x, lambda dy: (5 * dy * x, 7 * dy * kept)


REFS = {  # the Ref holds 3, and 5, 7 in turn where it is written; x is 2
    "reads": (reads, 6, 21), "rule reads": (rule_reads, 4, 21), "writes": (writes, 10, 35),
    "differentiable": (differentiable, 6, 21),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("kind", REFS)
def test_a_ref_is_an_input(kind, mode):
    f, value, gradient = REFS[kind]

    def run(h):
        return mode(jax.value_and_grad(lambda x: h(jax.new_ref(jnp.float32(3)), x)))(X)

    try:
        run(by_hand(f, lambda r, x, dy: (None, 7 * dy * r[...])))
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")
    assert_same(run(custom_gradient(f)), (jnp.float32(value), jnp.float32(gradient)))


@eager_and_jit
def test_a_ref_has_a_gradient_and_second_orders_read_it(mode):
    def loss(h):
        return lambda v, x: h(jax.new_ref(v), x)

    args, expected = (jnp.float32(3), X), (jnp.float32(10), jnp.float32(21))
    by_rule = by_hand(differentiable, lambda r, x, dy: (5 * dy * x, 7 * dy * r))
    try:
        assert_same(mode(jax.grad(loss(by_rule), (0, 1)))(*args), expected)
    except Exception as error:  # of many kinds, by version
        pytest.skip(f"JAX fails with a hand-written rule: {type(error).__name__}")
    assert_same(mode(jax.grad(loss(custom_gradient(differentiable)), (0, 1)))(*args), expected)
    second = jax.grad(jax.grad(lambda x: loss(custom_gradient(reads))(jnp.float32(3), x) ** 2))
    assert_same(mode(second)(X), jnp.float32(2 * 21 * 21))
