"""What a type checker knows of decorated functions, and every mistake that it finds. Never run.

It must find one in each line that ends in `# wrong`, and in no other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, assert_type

import jax
import jax.numpy as jnp
from jax import Array

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad

X = jnp.ones(3)


@custom_gradient
def square(x: Array, scale: float = 1.0, *, name: str = "") -> tuple[Array, Callable[..., Any]]:
    return scale * x * x, lambda dy: (2 * scale * dy * x, None)


assert_type(square(X), Array)
assert_type(square(x=X, scale=2.0, name="s"), Array)
assert_type(jax.vmap(square)(X), Array)
square(X).no_such  # wrong
square.no_such  # wrong
square()  # wrong
square(X, 1.0, 2.0)  # wrong
square(X, scale="1")  # wrong
square(y=X)  # wrong
y: int = square(X)  # wrong
custom_gradient(X)  # wrong
custom_gradient(square, convention="torch")  # wrong
custom_gradient(forward_mode=True)  # wrong


@custom_gradient(variables={"w": X}, primal=lambda x: x, convention="jax")
def with_options(x: Array) -> tuple[dict[str, Array], Callable[..., Any]]:
    return {"y": x}, lambda dy, variables: (dy["y"], variables)


assert_type(with_options(X), dict[str, Array])


class Layer:
    @custom_gradient
    def method(self, x: Array) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy: dy

    @custom_gradient(variables=lambda self: self.w)
    def with_weights(self, x: Array, *, train: bool = False) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy, variables: (dy, variables)

    @custom_gradient
    def __call__(self, x: Array) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy: dy

    @custom_gradient
    @staticmethod
    def static_below(x: Array) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy: dy

    @custom_gradient()
    @classmethod
    def of_class_below(cls, x: Array) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy: dy


layer = Layer()
assert_type(layer.method(X), Array)
assert_type(Layer.method(layer, X), Array)
assert_type(layer.with_weights(X, train=True), Array)
assert_type(layer(X), Array)
assert_type(Layer.static_below(X), Array)
assert_type(Layer.of_class_below(X), Array)
value, grad_fn = layer.method  # wrong
layer.method(X).no_such  # wrong
layer.method()  # wrong
layer.method(X, X)  # wrong
layer(X, X)  # wrong


def scaled(scale: float, x: Array) -> tuple[Array, Callable[..., Any]]:
    return scale * x, lambda dy: scale * dy


assert_type(custom_gradient(partial(scaled, 2.0))(X), Array)


class Rule:
    def __call__(self, x: Array) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy: dy


assert_type(custom_gradient(Rule())(X), Array)


def rounded(x: Array, digits: int = 0) -> Array:
    return jnp.round(x, digits)


assert_type(grad_pass_through(rounded)(X, 2), Array)
assert_type(recompute_grad(rounded)(X, digits=2), Array)
assert_type(recompute_grad(policy=None)(rounded)(X, digits=2), Array)
grad_pass_through(rounded)(X, 2, X)  # wrong
z: str = grad_pass_through(rounded)(X)  # wrong
recompute_grad(rounded)()  # wrong
custom_gradient(rounded)  # wrong


def other_way(x: Array) -> tuple[Callable[..., Any], Array]:
    return (lambda dy: dy), x


custom_gradient(other_way)  # wrong
