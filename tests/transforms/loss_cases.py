"""The cases that every transformation must get right.

Every case declares a gradient that is wrong on purpose by a factor of 7, so that a right result
proves that the rule ran. What is right comes from `Case.gradient`, plain JAX without the
decorator, and from JAX's own derivative of that at the orders above the first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decorated_functions import (
    Scaled,
    closes_over_input,
    closes_over_parameters,
    exponential,
    hand_written_exponential,
    integers_beside,
    jax_convention,
    layer,
    none_for_second,
    outer_hides_inner,
    product,
    traced_rule,
    two_outputs,
    with_statics,
)
from helpers import differentiated, sine, total


class Case(NamedTuple):
    """A loss made of a decorated function, and what its value and declared gradient are."""

    name: str
    loss: Callable[..., Any]
    value: Callable[..., Any]
    gradient: Callable[..., Any]  # returns a tuple, one entry per array
    arrays: tuple[Any, ...]
    rtol: float = 1e-5

    def __str__(self) -> str:
        return self.name

    @property
    def argnums(self) -> tuple[int, ...]:
        return tuple(range(len(self.arrays)))

    def grad(self, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Differentiate the loss, or another one, by all arrays."""
        return jax.grad(loss or self.loss, self.argnums)

    @property
    def pairs(self) -> Any:
        """Return two different examples, stacked along a new axis."""
        return jax.tree.map(lambda a: jnp.stack([a, 1.5 * a]), self.arrays)

    def expected(self, order: int = 1) -> Any:
        """Return the gradients of this order; above the first, of the sum of those below."""
        return differentiated(self.gradient, len(self.arrays), order - 1)(*self.arrays)

    def expected_of_pairs(self) -> Any:
        """Return the gradients of `pairs`."""
        examples = [jax.tree.map(lambda a, i=i: a[i], self.pairs) for i in range(2)]
        return jax.tree.map(lambda *g: jnp.stack(g), *[self.gradient(*e) for e in examples])


def _array(*shape: int, start: float = 0.3, dtype: Any = np.float32) -> Any:
    count = int(np.prod(shape))
    return jnp.asarray(np.linspace(start, start + 1, count).reshape(shape), dtype)


X = _array(3)
SCALAR = jnp.float32(0.7)


PARAMETERS = {"w": _array(3, 2), "b": [_array(2)]}
TABLE = jnp.asarray([2, 3, 5], jnp.int32)

CASES = [
    Case(
        "scalar",
        sine,
        jnp.sin,
        lambda x: (7 * jnp.cos(x),),
        (SCALAR,),
    ),
    Case(
        "two inputs",
        lambda x, y: total(product(x, y)),
        lambda x, y: jnp.sum(x * y),
        lambda x, y: (7 * y, 5 * x),
        (X, X + 1),
    ),
    Case(
        "pytree",
        lambda params, x: total(layer(params, x)),
        lambda params, x: jnp.sum(x @ params["w"] + params["b"][0]),
        lambda params, x: (
            {"w": 7 * jnp.stack([x, x], 1), "b": [jnp.full(2, 7.0, x.dtype)]},
            7 * params["w"].sum(1),
        ),
        (PARAMETERS, X),
    ),
    Case(
        "two outputs",
        lambda x: jnp.sum(3 * two_outputs(x)["a"] + two_outputs(x)["b"]),
        lambda x: jnp.sum(3 * x**2 + jnp.sin(x)),
        lambda x: (42 * x + 7 * jnp.cos(x),),
        (X,),
    ),
    Case(
        "statics",
        lambda x: total(with_statics(x, "sin", 4, jnp.sin, flip=True)),
        lambda x: -4 * jnp.sum(jnp.sin(x)),
        lambda x: (-28 * jnp.cos(x),),
        (X,),
    ),
    Case(
        "None",
        lambda x, y: total(none_for_second(x, y)),
        lambda x, y: jnp.sum(x * y),
        lambda x, y: (7 * x**2, jnp.zeros_like(y)),
        (X, X + 1),
    ),
    Case(
        "method",
        lambda x: total(Scaled(3.0).method(x)),
        lambda x: jnp.sum(3 * x**2),
        lambda x: (21 * x,),
        (X,),
    ),
    Case(
        "JAX convention",
        lambda x: jnp.sum(jax_convention(x)["a"] + 2 * jax_convention(x)["b"]),
        lambda x: jnp.sum(3 * x),
        lambda x: (7 * x + 14 * x**2,),
        (X,),
    ),
    Case(
        "traced rule",
        lambda x, y: total(traced_rule(x, y)),
        lambda x, y: jnp.sum(x + y),
        lambda x, y: (7 * jnp.where(x > 0.5, x**2, 0.0), jnp.zeros_like(y)),
        (X, X),
    ),
    Case(
        "recursive",
        exponential,
        jnp.exp,
        lambda x: (7 * hand_written_exponential(x),),
        (SCALAR,),
    ),
    Case(
        "closes over its input",
        lambda x: total(closes_over_input(x)),
        lambda x: jnp.sum(x * x),
        lambda x: (7 * x**3 * jax.lax.stop_gradient(x),),
        (X,),
    ),
    Case(
        "closes over parameters",
        lambda w, x: total(closes_over_parameters(w, x)),
        lambda w, x: jnp.sum(w * x**2),
        lambda w, x: (5 * x**2, 7 * w * x),
        (X + 1, X),
    ),
    Case(
        "integer output",
        lambda x: total(integers_beside(x, TABLE)),
        lambda x: jnp.sum(x * TABLE.astype(x.dtype)) + 13,
        lambda x: (7 * TABLE.astype(x.dtype) * x**2,),
        (X,),
    ),
    Case(
        "nested",
        lambda x: total(outer_hides_inner(x)),
        lambda x: jnp.sum(2 * jnp.sin(x)),
        lambda x: (7 * x,),
        (X,),
    ),
    Case(
        "bfloat16",
        lambda x: total(sine(x)),
        lambda x: jnp.sin(x).sum().astype(jnp.float32),
        lambda x: (7 * jnp.cos(x),),
        (jnp.bfloat16(0.75),),
        rtol=2e-2,
    ),
]
