"""Methods of every kind: bound, static, of the class, inherited; `self` is never an input."""

import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


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
