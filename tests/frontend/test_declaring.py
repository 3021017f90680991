"""Declaring: with and without parentheses, and what remains of the function that was decorated."""

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, sine

import tfgrad_jax
from tfgrad_jax import custom_gradient


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
    public = {name for name in dir(tfgrad_jax) if not name.startswith("_")}
    assert public == {
        "custom_gradient",
        "recompute_grad",
        "grad_pass_through",
        "explain",
        "testing",
    }


def test_static_to_jit():
    """A decorated function is hashable, so it may be a static argument of a jitted function."""
    apply = jax.jit(lambda f, x: f(x), static_argnums=0)
    assert_same(jax.grad(apply, 1)(sine, 0.0), jnp.float32(7))


def test_decorated_function_kept_as_an_attribute():
    class Layer:
        def __init__(self):
            self.activation = sine

    assert_same(jax.grad(Layer().activation)(0.0), jnp.float32(7))


def test_any_pair_will_do():
    """A list as well as a tuple, as in TensorFlow."""
    h = custom_gradient(lambda x: [2 * x, lambda dy: 14 * dy])
    assert_same(jax.value_and_grad(h)(3.0), (jnp.float32(6), jnp.float32(14)))
