"""`functools.wraps` and its like copy attributes of a decorated function, and nothing more."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient

MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


class Model:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def first(self, x):
        return self.w * x**2, lambda dy: 7 * dy * self.w * x


def used():
    """Return a class whose decorated method was called, so that whatever it caches is there."""

    class Used(Model):
        first = custom_gradient(Model.first.__wrapped__)

    Used(3.0).first(2.0)
    jax.grad(Used(3.0).first)(2.0)
    return Used


def _other(self, x):
    return self.w * x**3, lambda dy: 11 * dy * self.w * x


@MODES
def test_a_method_that_wraps_a_decorated_method(mode):
    class Sub(used()):
        other = custom_gradient(functools.wraps(used().first)(lambda self, x: _other(self, x)))

    model = Sub(3.0)
    assert_same(mode(jax.value_and_grad(model.first))(2.0), (jnp.float32(12), jnp.float32(42)))
    assert_same(mode(jax.value_and_grad(model.other))(2.0), (jnp.float32(24), jnp.float32(66)))


@MODES
def test_a_decorated_method_that_is_updated_from_another(mode):
    class Sub(used()):
        other = functools.update_wrapper(custom_gradient(_other), used().first)

    model = Sub(3.0)
    assert_same(mode(jax.value_and_grad(model.first))(2.0), (jnp.float32(12), jnp.float32(42)))
    assert_same(mode(jax.value_and_grad(model.other))(2.0), (jnp.float32(24), jnp.float32(66)))


@MODES
def test_a_decorated_method_of_a_decorated_method_of_the_super_class(mode):
    class Sub(used()):
        @custom_gradient
        @functools.wraps(Model.first)
        def first(self, x):
            y = super().first(x)
            return 2 * y, lambda dy: 11 * dy * self.w * x

    assert_same(mode(jax.value_and_grad(Sub(3.0).first))(2.0), (jnp.float32(24), jnp.float32(66)))
    base = used()(3.0)
    assert_same(mode(jax.value_and_grad(base.first))(2.0), (jnp.float32(12), jnp.float32(42)))


@MODES
def test_a_plain_wrapper_keeps_the_gradient_of_what_it_calls(mode):
    cls = used()

    class Sub(cls):
        @functools.wraps(cls.first)
        def doubled(self, x):
            return 2 * self.first(x)

    assert_same(mode(jax.value_and_grad(Sub(3.0).doubled))(2.0), (jnp.float32(24), jnp.float32(84)))


@MODES
def test_functions(mode):
    @custom_gradient
    def first(x):
        return x**2, lambda dy: 7 * dy * x

    first(2.0)

    @custom_gradient
    @functools.wraps(first)
    def second(x):
        return x**3, lambda dy: 11 * dy * x

    assert second.__name__ == "first"
    assert_same(mode(jax.value_and_grad(first))(2.0), (jnp.float32(4), jnp.float32(14)))
    assert_same(mode(jax.value_and_grad(second))(2.0), (jnp.float32(8), jnp.float32(22)))


@MODES
def test_two_instances_and_a_weight_that_changes(mode):
    """A method reads its `self` at each call."""
    one, two = Model(3.0), Model(5.0)
    assert_same(mode(jax.grad(one.first))(2.0), jnp.float32(42))
    assert_same(mode(jax.grad(two.first))(2.0), jnp.float32(70))
    one.w = 4.0
    assert_same(mode(jax.grad(lambda x: one.first(x)))(2.0), jnp.float32(56))


@MODES
def test_attributes_of_the_function_are_kept(mode):
    def f(x):
        return x**2, lambda dy: 7 * dy * x

    f.note = "a note"
    h = custom_gradient(f)
    assert h.note == "a note"
    assert h.__wrapped__ is f
    assert_same(mode(jax.grad(h))(2.0), jnp.float32(14))


@MODES
@pytest.mark.parametrize(
    "name", ["_f", "_method", "_call", "held", "_signature", "_variables", "_source", "_closed"]
)
def test_no_attribute_of_the_function_is_taken_for_ours(mode, name):
    """Of whatever name: an attribute that a user sets changes no number."""

    def f(x):
        return x**2, lambda dy: 7 * dy * x

    setattr(f, name, lambda *args: pytest.fail("called"))
    h = custom_gradient(f)
    assert_same(mode(jax.value_and_grad(h))(2.0), (jnp.float32(4), jnp.float32(14)))

    class WithMethod:
        method = custom_gradient(f)

    WithMethod.method.__wrapped__.__dict__[name] = lambda *args: pytest.fail("called")
    assert_same(mode(jax.grad(lambda x: WithMethod.__dict__["method"](x)))(2.0), jnp.float32(14))
