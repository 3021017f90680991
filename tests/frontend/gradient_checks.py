"""What the tests of returned gradients share: one check, expected numbers, two pytree nodes."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from helpers import assert_same

F7 = jnp.float32(7)
F5 = jnp.float32(5)
F3 = jnp.float32(3)
ZERO = jnp.float32(0)


def check_gradients(h, args, expected):
    """Compare the gradients of all arguments, eagerly and jitted."""
    grad = jax.grad(h, tuple(range(len(args))))
    assert_same(grad(*args), expected)
    assert_same(jax.jit(grad)(*args), expected)


class Point(NamedTuple):
    x: Any
    y: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["name"])
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    name: str = "layer"
