"""`y` may be any pytree of arrays and numbers."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_checks import F7, Layer, Point, check_gradients
from helpers import assert_same

from tfgrad_jax import custom_gradient

OUTPUTS = {
    "tuple": lambda x: (x, 2 * x),
    "list": lambda x: [x, 2 * x],
    "one in a tuple": lambda x: (x,),
    "dict": lambda x: {"b": x, "a": 2 * x},
    "namedtuple": lambda x: Point(x, 2 * x),
    "dataclass": lambda x: Layer(x, 2 * x),
    "OrderedDict": lambda x: collections.OrderedDict([("b", x), ("a", x)]),
    "with None": lambda x: {"a": x, "none": None},
    "empty": lambda x: (),
    "numbers": lambda x: (x, 2.5, 3, True, 1j),
    "NumPy": lambda x: (x, np.float32(2), np.arange(2)),
    "input itself": lambda x: x,
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_structure_of_the_output(form):
    make = OUTPUTS[form]
    h = custom_gradient(lambda x: (make(x), lambda *dys: 7 * dys[0]))
    expected = make(jnp.float32(1))
    assert_same(h(jnp.float32(1)), expected)
    assert_same(jax.jit(h)(jnp.float32(1)), expected)
    assert_same(jax.vjp(h, jnp.float32(1))[0], expected)
    if len(jax.tree.leaves(expected)) > 0:
        check_gradients(lambda x: jax.tree.leaves(h(x))[0], (1.0,), (F7,))


def test_eager_output_is_what_f_returned():
    """Python numbers stay Python numbers, and arrays are not copied."""
    array = jnp.ones(3)
    h = custom_gradient(lambda x: ((array, 2.5, "a" == "a"), lambda *dys: None))
    y = h(1.0)
    assert y[0] is array
    assert y[1] == 2.5
    assert type(y[1]) is float
    assert y[2] is True
