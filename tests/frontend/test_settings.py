"""Arguments that are not differentiated are settings: they reach `f` as they are, in every mode.

A number that is differentiated is an array in `f`; a number beside it is not. Whatever stands
among the arguments, `f` may branch on it, and use it as a shape or a key.
"""

import decimal
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from ways import EAGER_SECOND, FORWARD, REVERSE, SECOND, by

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

SOME = ("grad", "jit(grad)", "grad(vmap)", "jvp", "hessian")


class Mode(enum.Enum):
    TIMES = enum.auto()


class Opaque:
    def __init__(self, factor):
        self.factor = factor


SETTINGS = {
    "int": 7,
    "float": 7.0,
    "negative": -7.5,
    "complex": 7 + 0j,
    "bool": True,
    "big int": 10**30,
    "str": "seven",
    "bytes": b"seven",
    "none": None,
    "enum": Mode.TIMES,
    "dtype": jnp.bfloat16,
    "NumPy dtype": np.dtype("int8"),
    "function": jnp.tanh,
    "partial": functools.partial(jnp.sum, axis=0),
    "object": Opaque(7),
    "type": Opaque,
    "slice": slice(1, 7),
    "Decimal": decimal.Decimal("7.5"),
    "Ellipsis": ...,
    "nan": float("nan"),
}


@pytest.mark.parametrize("name", SETTINGS)
@by({**REVERSE, **FORWARD, **SECOND}, SOME)
def test_a_setting_reaches_f_as_it_is(name, way):
    setting = SETTINGS[name]
    seen = []

    @custom_gradient
    def h(x, setting):
        seen.append(setting)
        return x**2, lambda dy: (7 * dy * x, None)

    got = way(lambda x: h(x, setting) ** 2)(jnp.float32(2))
    expected = 448 if way in SECOND.values() else 112
    assert_same(jax.tree.leaves(got), [jnp.float32(expected)])
    assert seen
    assert all(s is setting for s in seen)


@by({**REVERSE, **FORWARD, **SECOND}, SOME)
def test_by_name_in_containers_and_keyword_only(way):
    seen = []

    @custom_gradient
    def h(x, options, scale=1.5, *, power):
        seen.append((options, scale, power))
        y = x**power if options["square"] else x
        return y * 1.0, lambda dy: (7 * dy * x, None, None)

    def loss(x):
        return h(options={"square": True, "rate": 0.5, "n": (1, "a")}, x=x, scale=3, power=2) ** 2

    got = way(loss)(jnp.float32(2))
    expected = 448 if way in SECOND.values() else 112
    assert_same(jax.tree.leaves(got), [jnp.float32(expected)])
    for options, scale, power in seen:
        assert options == {"square": True, "rate": 0.5, "n": (1, "a")}
        assert type(options["rate"]) is float
        assert type(options["square"]) is bool
        assert type(options["n"][0]) is int
        assert (type(scale), type(power)) == (int, int)


@pytest.mark.parametrize("number", [3, 3.0, True])
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "beside a captured weight"])
@by({**REVERSE, **FORWARD, **SECOND}, SOME)
def test_numbers_as_shapes_and_conditions(number, captured, way):
    def loss(x):
        w = x * 1.0 if captured else 1.0

        @custom_gradient(variables="autodiff")
        def h(x, n):
            ones = jnp.ones((int(n),), jnp.float32)
            scale = 1.0 if n > 0 else -1.0
            y = scale * jnp.sum(ones) / float(n) * x * x
            return y + 0 * w, lambda dy: (7 * dy * x, None)

        return h(x, number) ** 2

    got = way(loss)(jnp.float32(2))
    expected = 448 if way in SECOND.values() else 112
    assert_same(jax.tree.leaves(got), [jnp.float32(expected)])


# --- a number that is differentiated --------------------------------------------------------------


def _kinds(x, n, seen):
    @custom_gradient
    def h(x, n):
        seen.append((x, n))
        return x**2 * n, lambda dy: (7 * dy * x * n, 5 * dy * x)

    return h(x, n)


@pytest.mark.parametrize("number", [2.0, np.float32(2), np.asarray(2.0, np.float32)])
def test_a_differentiated_number_is_an_array_in_f(number):
    seen = []
    assert_same(jax.grad(lambda x: _kinds(x, 3.0, seen))(number), jnp.float32(42))
    assert seen
    for x, n in seen:
        assert isinstance(x, jax.Array)
        assert x.dtype == jnp.float32
        assert n == 3.0
        assert type(n) is float


def test_a_differentiated_python_number_is_weakly_typed():
    seen = []
    jax.grad(lambda x: _kinds(x, 3.0, seen))(2.0)
    assert all(jax.typeof(x).weak_type for x, _ in seen)
    low = jax.grad(lambda x: custom_gradient(lambda x: (x * jnp.bfloat16(3), lambda dy: dy * 7))(x))
    assert jnp.asarray(low(2.0)) == 7


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_which_number_is_differentiated(argnums, mode):
    """Eagerly, the other is a Python number in `f`; under `jit` both are traced."""
    seen = []
    got = mode(jax.grad(lambda x, n: _kinds(x, n, seen), argnums))(2.0, 3.0)
    expected = jnp.float32(42), jnp.float32(10)
    assert_same(got, expected if argnums == (0, 1) else expected[argnums])
    for pair in seen:
        for i, value in enumerate(pair):
            traced = mode is jax.jit or argnums in (i, (0, 1))
            assert isinstance(value, jax.Array) == traced
            assert traced or type(value) is float


@pytest.mark.parametrize("order", EAGER_SECOND)
def test_second_order_of_a_number(order):
    seen = []
    got = EAGER_SECOND[order](lambda x: _kinds(x, 3.0, seen) ** 2)(2.0)
    # h = 3 x**2, h' = 21 x: L' = 42 x h, L'' = 42 h + 42 x * 21 x
    assert_same(jax.tree.leaves(got), [jnp.float32(42 * 12 + 42 * 2 * 21 * 2)])
    assert all(type(n) is float and isinstance(x, jax.Array) for x, n in seen)


def test_a_concrete_array_reaches_f_as_it_is():
    """The very object, beside a differentiated input; its gradient is dropped."""
    table, array, seen = np.arange(3.0, dtype=np.float32), jnp.arange(3.0), []

    @custom_gradient
    def h(x, table, array, number):
        seen.append((table, array, number))
        y = x * table.sum() * array.sum()
        return y, lambda dy: (7 * dy, dy * jnp.ones(3), dy * jnp.ones(3), None)

    for differentiate in (jax.grad, jax.jacfwd):
        assert_same(differentiate(h)(2.0, table, array, 4), jnp.float32(7))
    assert all(t is table and a is array and type(n) is int for t, a, n in seen)


def test_plain_calls_see_the_very_objects():
    seen = []

    @custom_gradient
    def h(*args):
        seen.append(args)
        return args[0] * 1.0, lambda dy: (7 * dy, *[None] * (len(args) - 1))

    args = (2.0, 3, np.float64(1.5), np.arange(2), jnp.arange(2), "a", None, True)
    assert float(h(*args)) == 2.0
    assert len(seen) == 1
    assert all(a is b for a, b in zip(seen[0], args, strict=True))
