"""Mistakes that a type checker must find: every line that ends in `# wrong`, and no other."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad

X = jnp.ones(3)


@custom_gradient
def square(x: Array, scale: float = 1.0) -> tuple[Array, Callable[..., Any]]:
    return scale * x * x, lambda dy: (2 * scale * dy * x, None)


class Layer:
    @custom_gradient
    def method(self, x: Array) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy: dy

    @custom_gradient()
    def __call__(self, x: Array) -> tuple[Array, Callable[..., Any]]:
        return x, lambda dy: dy


def plain(x: Array) -> Array:
    return x


def other_way(x: Array) -> tuple[Callable[..., Any], Array]:
    return (lambda dy: dy), x


square(X).no_such  # wrong
square.no_such  # wrong
square()  # wrong
square(X, 1.0, 2.0)  # wrong
square(X, scale="1")  # wrong
square(y=X)  # wrong
y: int = square(X)  # wrong
value, grad_fn = Layer().method  # wrong
Layer().method(X).no_such  # wrong
Layer().method()  # wrong
Layer().method(X, X)  # wrong
Layer()(X, X)  # wrong
custom_gradient(plain)  # wrong
custom_gradient(other_way)  # wrong
custom_gradient(X)  # wrong
custom_gradient(square, convention="torch")  # wrong
custom_gradient(forward_mode=True)  # wrong
grad_pass_through(plain)(X, X)  # wrong
z: str = grad_pass_through(plain)(X)  # wrong
recompute_grad(plain)()  # wrong
