"""The value under every transformation, over the cases of `loss_cases.py`."""

import jax
import jax.numpy as jnp
from helpers import assert_same
from jax import lax
from selection import products

from tfgrad_jax import custom_gradient


def test_shapes_without_running():
    """`eval_shape` and `make_jaxpr` know the result, and the rule is not run."""

    @custom_gradient
    def h(x):
        def grad(dy):
            raise AssertionError("the rule was run")

        return {"y": x.astype(jnp.bfloat16)}, grad

    shape = jax.eval_shape(h, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert (shape["y"].shape, shape["y"].dtype) == ((2, 3), jnp.bfloat16)
    assert jax.make_jaxpr(h)(jnp.ones(2)).out_avals[0].shape == (2,)


def _in_while(case):
    """Differentiating a while loop backward is no business of JAX; running it is."""
    return lax.while_loop(
        lambda state: state[0] < 2,
        lambda state: (state[0] + 1, state[1] + case.loss(*case.arrays) / 2),
        (0, jnp.float32(0)),
    )[1]


VALUES = {
    "eager": lambda case: case.loss(*case.arrays),
    "jit": lambda case: jax.jit(case.loss)(*case.arrays),
    "value_and_grad": lambda case: jax.value_and_grad(case.loss, case.argnums)(*case.arrays)[0],
    "jit of value_and_grad": lambda case: jax.jit(jax.value_and_grad(case.loss, case.argnums))(
        *case.arrays
    )[0],
    "while_loop": _in_while,
    "fori_loop": lambda case: lax.fori_loop(
        0, 2, lambda _, c: c + case.loss(*case.arrays) / 2, jnp.float32(0)
    ),
}


@products(VALUES, always=("eager",))
def test_value(case, transformation):
    expected = jnp.float32(case.value(*case.arrays))
    actual = VALUES[transformation](case)
    assert_same(actual.astype(jnp.float32), expected, rtol=case.rtol)


def test_value_and_gradient_of_a_forward_loop():
    """A `fori_loop` of known length is a scan, and has a derivative."""

    @custom_gradient
    def square(x):
        return x**2, lambda dy: 7 * dy * x

    def iterated(x):
        return lax.fori_loop(0, 2, lambda _, x: square(x), x)

    # d/dx square(square(x)) = 7 x**2 * 7 x
    assert_same(jax.value_and_grad(iterated)(2.0), (jnp.float32(16.0), jnp.float32(392.0)))
    assert_same(jax.jit(jax.grad(iterated))(2.0), jnp.float32(392.0))
