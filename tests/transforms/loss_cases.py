"""The cases that every transformation must get right.

Every case declares a gradient that is wrong on purpose by a factor of 7, so that a right result
proves that the rule ran. What is right comes from `Case.gradient`, plain JAX without the
decorator, and from JAX's own derivative of that at the orders above the first.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import differentiated, sine, total

from tfgrad_jax import custom_gradient


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


@custom_gradient
def product(x, y):
    return x * y, lambda dy: (7 * dy * y, 5 * dy * x)


@custom_gradient
def layer(params, x):
    def grad(dy):
        return {"w": 7 * jnp.outer(x, dy), "b": [7 * dy]}, 7 * params["w"] @ dy

    return x @ params["w"] + params["b"][0], grad


@custom_gradient
def two_outputs(x):
    def grad(da, db):
        return 7 * da * 2 * x + 7 * db * jnp.cos(x)

    return {"b": jnp.sin(x), "a": x**2}, grad


@custom_gradient
def with_statics(x, mode, shape, function, *, flip=False):
    assert isinstance(mode, str)
    assert isinstance(shape, int)
    assert isinstance(flip, bool)
    sign = -1 if flip else 1

    def grad(dy):
        return 7 * sign * shape * (dy * jnp.cos(x) if mode == "sin" else dy), None, None, None

    return sign * jnp.sum(jnp.ones(shape, x.dtype)) * function(x), grad


@custom_gradient
def none_for_second(x, y):
    return x * y, lambda dy: (7 * dy * x**2, None)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    @custom_gradient
    def method(self, x):
        return self.scale * x**2, lambda dy: 7 * dy * self.scale * x


@functools.partial(custom_gradient, convention="jax")
def jax_convention(x):
    def grad(dy):
        return 7 * (dy["a"] * x + dy["b"] * x**2)

    return {"a": x, "b": x}, grad


class Rule:
    """A rule that is no plain function, so that it is traced and not lifted."""

    def __init__(self, x, mask):
        self.x, self.mask = x, mask

    def __call__(self, dy):
        return 7 * jnp.where(self.mask, dy * self.x**2, 0.0), None


@custom_gradient
def traced_rule(x, y):
    return x + y, Rule(x, x > 0.5)  # a mask: a residual of booleans


@custom_gradient
def exponential(x):
    return jnp.exp(x), lambda dy: 7 * dy * exponential(x)


@jax.custom_jvp
def hand_written_exponential(x):
    return jnp.exp(x)


@hand_written_exponential.defjvp
def _(primals, tangents):
    y = hand_written_exponential(*primals)
    return y, 7 * tangents[0] * hand_written_exponential(*primals)


def closes_over_input(x):
    x_plain = jax.lax.stop_gradient(x)

    @custom_gradient
    def inner(x):
        return x * x_plain, lambda dy: 7 * dy * x**3 * x_plain

    return inner(x)


def closes_over_parameters(w, x):
    @custom_gradient
    def inner(x):
        def grad(dy, variables):
            (v,) = variables
            return 7 * dy * v * x, [5 * dy * x**2]

        return w * x**2, grad

    return inner(x)


@custom_gradient
def integers_beside(x, table):
    factors = table.astype(x.dtype)

    def grad(dy, d_table):
        assert d_table.dtype == table.dtype  # an upstream of an output without derivative
        return 7 * dy * factors * x**2

    return (x * factors, table + 1), grad


@custom_gradient
def outer_hides_inner(x):
    return sine(x) * 2, lambda dy: 7 * dy * x


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
