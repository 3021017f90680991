"""What may be decorated, and what is left of it: names, signature, pickles, attributes."""

import abc
import copy
import functools
import inspect
import operator
import pickle
import sys
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from support.helpers import assert_same, eager_and_jit, sine

import tfgrad_jax
from tfgrad_jax import custom_gradient, grad_pass_through

Rule = Callable[[float], float]


def double(x):
    return 2 * x, lambda dy: 14 * dy


class CallableObject:
    def __jax_array__(self):
        """A protocol of `f` is not one of the decorated function."""
        raise NotImplementedError

    def __call__(self, x):
        return 2 * x, lambda dy: 14 * dy


def fourteen(dy):
    return 14 * dy


decorated_rule = custom_gradient(lambda dy: (14 * dy, fourteen))
DECORATED = {  # each has the value 2 x and the gradient 14
    "bare": custom_gradient(double),
    "parentheses": custom_gradient()(double),
    "None": custom_gradient(None)(double),
    "partial": custom_gradient(
        functools.partial(lambda scale, x: (scale * x, lambda dy: 7 * dy * scale), 2.0)
    ),
    "callable object": custom_gradient(CallableObject()),
    "list for pair": custom_gradient(lambda x: list(double(x))),
    "partial of a decorated function": functools.partial(
        custom_gradient(lambda scale, x: (scale * x, lambda dy: (None, 7 * dy * scale))), 2.0
    ),
    "rule: partial": custom_gradient(lambda x: (2 * x, functools.partial(jnp.multiply, 14))),
    "rule: jit": custom_gradient(lambda x: (2 * x, jax.jit(fourteen))),
    "rule: decorated": custom_gradient(lambda x: (2 * x, decorated_rule)),
}


@eager_and_jit
@pytest.mark.parametrize("kind", DECORATED)
def test_callables_of_every_kind(kind, mode):
    h = DECORATED[kind]
    assert_same(mode(jax.value_and_grad(h))(3.0), (jnp.float32(6), jnp.float32(14)))
    assert_same(jax.grad(mode(h))(3.0), jnp.float32(14))
    assert_same(jax.vmap(mode(jax.grad(h)))(jnp.ones(2)), jnp.float32([14, 14]))


@eager_and_jit
def test_builtins_tell_nothing_of_their_parameters(mode):
    negated = custom_gradient(lambda x: (x, operator.neg))
    assert_same(mode(jax.grad(negated))(3.0), jnp.float32(-1))
    first = custom_gradient(operator.itemgetter(0))
    assert_same(mode(jax.grad(lambda x: first([(x, lambda dy: [7 * dy])])))(1.0), jnp.float32(7))
    larger = custom_gradient(lambda x: ((x, x), max))
    assert_same(jax.grad(lambda x: 3 * larger(x)[0] + 7 * larger(x)[1])(1.0), jnp.float32(10))


# --- what it shows --------------------------------------------------------------------------------


def real(x: float, y: float = 2.0, *, name: str = "") -> tuple[float, Rule]:
    """Say what it does."""
    return x, lambda dy: (dy, None)


def text(x: "float") -> "tuple[dict[str, float], Rule]":
    return {"y": x}, lambda dy: dy


def untold(x):
    return x, lambda dy: dy


class Layer:
    @custom_gradient
    def method(self, x: float) -> tuple[float, Rule]:
        return x, lambda dy: dy


def test_an_abstract_method_stays_abstract():
    class Base(abc.ABC):
        @custom_gradient
        @abc.abstractmethod
        def f(self, x): ...

    class Sub(Base):
        @custom_gradient
        def f(self, x):
            return x, lambda dy: 7 * dy

    with pytest.raises(TypeError, match="abstract"):
        Base()
    assert_same(jax.grad(Sub().f)(1.0), jnp.float32(7))


def test_metadata():
    real.note, real._declaration = "m/s", None  # the second is no name of ours
    h = custom_gradient(real)
    assert h.note == "m/s" and not hasattr(h, "other") and h(1.0) == 1.0
    assert not hasattr(DECORATED["callable object"], "__jax_array__")
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(h, name) == getattr(real, name)
    assert h.__wrapped__ is real
    line = real.__code__.co_firstlineno
    assert h.__globals__ is globals() and not hasattr(h, "__code__")
    assert repr(h) == f"<custom_gradient of `real` ({__file__}:{line})>"


SIGNATURES = [
    (custom_gradient(real), "(x: float, y: float = 2.0, *, name: str = '') -> float"),
    (custom_gradient(text), "(x: float) -> dict[str, float]"),  # its annotations are strings
    (custom_gradient(untold), "(x)"),
    (Layer.method, "(self, x: float) -> float"),
    (Layer().method, "(x: float) -> float"),
    (grad_pass_through(double), "(x)"),
]


@pytest.mark.parametrize(("h", "shown"), SIGNATURES, ids=[shown for _, shown in SIGNATURES])
def test_the_signature_is_the_one_of_f_with_the_type_of_y(h, shown):
    assert str(inspect.signature(h)) == shown
    if not inspect.ismethod(h):
        assert str(inspect.signature(functools.wraps(h)(lambda *args: h(*args)))) == shown


@pytest.mark.parametrize("h", [custom_gradient(real), Layer.method, Layer().method])
def test_annotations_have_the_type_of_y(h):
    assert h.__annotations__["return"] is float
    assert typing.get_type_hints(h)["return"] is float
    assert typing.get_type_hints(h)["x"] is float
    assert real.__annotations__["return"] == tuple[float, Rule]
    assert custom_gradient(untold).__annotations__ == {}


def test_annotations_may_name_what_is_defined_later():
    """As for type checkers alone; unquoted from Python 3.14 on."""
    space = {"custom_gradient": custom_gradient}
    if sys.version_info < (3, 14):
        space["Later"] = "Later"
    exec("@custom_gradient\ndef f(x: Later) -> Later: return 2 * x, lambda dy: 7 * dy", space)
    assert_same(jax.grad(space["f"])(1.0), jnp.float32(7))
    assert "x" in space["f"].__annotations__


def test_nothing_else_is_public():
    public = {name for name in dir(tfgrad_jax) if not name.startswith("_")}
    wanted = {"custom_gradient", "recompute_grad", "grad_pass_through", "testing"}
    assert public == wanted


# --- as an object ---------------------------------------------------------------------------------


def test_equal_only_to_itself_and_static_to_jit():
    assert sine == sine
    assert custom_gradient(double) != custom_gradient(double)
    assert len({sine: 1, custom_gradient(double): 2}) == 2
    apply = jax.jit(lambda f, x: f(x), static_argnums=0)
    assert_same(jax.grad(apply, 1)(sine, 0.0), jnp.float32(7))


def test_pickles_by_name():
    assert pickle.loads(pickle.dumps(sine)) is sine
    assert pickle.loads(pickle.dumps(Layer().method))(1.0) == 1.0
    assert copy.copy(sine) is sine
    assert copy.deepcopy({"activation": sine})["activation"] is sine
    with pytest.raises(Exception, match=r"not found as|Can't (get|pickle) local"):
        pickle.dumps(custom_gradient(lambda x: (x, lambda dy: dy)))


def make(w):
    """Return functions that have no name to be found by, with the value 12 and gradient 42 at 2."""

    def f(x):
        return w * x**2, lambda dy: 7 * dy * w * x

    class Model:
        call = custom_gradient(lambda self, x: f(x))

    recursive = custom_gradient(lambda x: (w * x**2, lambda dy: 3.5 * dy * recursive(x)))
    return {
        "function": custom_gradient(f),
        "method": Model().call,
        "recursive": recursive,
        "primal": custom_gradient(f, primal=lambda x: w * x**2),
    }


@eager_and_jit
@pytest.mark.parametrize("kind", make(3.0))
def test_cloudpickles_by_value(kind, mode):
    cloudpickle = pytest.importorskip("cloudpickle")
    h = make(3.0)[kind]
    jax.jit(jax.grad(h))(2.0)  # nothing that a call leaves behind is in the way
    again = pickle.loads(cloudpickle.dumps(pickle.loads(cloudpickle.dumps(h))))
    assert_same(mode(jax.value_and_grad(again))(2.0), (jnp.float32(12), jnp.float32(42)))
    second = 3.5 * 42 if kind == "recursive" else 21
    assert_same(mode(jax.grad(jax.grad(again)))(2.0), jnp.float32(second))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_keep_attributes(copied):
    h = make(3.0)["function"]
    h.units = ["m"]
    assert copied(h) is not h and copied(h).units == ["m"]
    assert_same(jax.grad(copied(h))(2.0), jnp.float32(42))


# --- attributes that `functools.wraps` copies -----------------------------------------------------


class Model:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def first(self, x):
        return self.w * x**2, lambda dy: 7 * dy * self.w * x


class Sub(Model):
    @custom_gradient
    @functools.wraps(Model.first)
    def wraps(self, x):
        return self.w * x**3, lambda dy: 11 * dy * self.w * x

    plain = functools.wraps(Model.first)(lambda self, x: 2 * Model.first(self, x))


@eager_and_jit
def test_a_copied_attribute_changes_no_number(mode):
    Model(3.0).first(2.0)  # whatever it caches is there
    wanted = {"wraps": (24, 66), "plain": (24, 84), "first": (12, 42)}
    for name, expected in wanted.items():
        got = mode(jax.value_and_grad(getattr(Sub(3.0), name)))(2.0)
        assert_same(got, tuple(map(jnp.float32, expected)))
