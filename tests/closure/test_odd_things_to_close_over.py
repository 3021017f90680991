"""Closures over things that trip up those who copy, sort or rebuild them.

Each function must give the numbers that it gives without the odd thing: the value is `w x**2`,
and the rules declare `7 w x` for the input and `5 x**2` for the weight.
"""

import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from ways import FORWARD, REVERSE, SECOND, assert_derivative, by, gradient, hand_written

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

ARGS = jnp.float32(3), jnp.float32(2)  # w, x
SOME = ("grad", "jit(grad)", "jvp", "grad of grad")
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])

oracle = hand_written(lambda w, x: w * x**2, lambda w, x: 5 * x**2, lambda w, x: 7 * w * x)


def _rule(w, x):
    def grad(dy, variables=()):
        by_x = 7 * dy * w * x
        return (by_x, [5 * dy * x**2 for _ in variables]) if variables else by_x

    return grad


def keys_of_several_types(w, x):
    table = {1: "a", "b": w, (2, 3): None, None: 5, 1.5: [w], frozenset({1}): {}}

    @custom_gradient
    def f(x):
        return table["b"] * x**2, _rule(table[1.5][0], x)

    return f(x)


def keys_of_several_types_in_a_cell_of_the_rule(w, x):
    @custom_gradient
    def f(x):
        table = {1: "a", "b": w, None: x}

        def grad(dy, variables=()):
            by_x = 7 * dy * table["b"] * table[None]
            return (by_x, [5 * dy * x**2 for _ in variables]) if variables else by_x

        return w * x**2, grad

    return f(x)


def attributes_of_the_rule(w, x):
    @custom_gradient
    def f(x):
        def grad(dy, variables=()):
            assert grad.note == "a note"
            by_x = 7 * dy * grad.w * x
            return (by_x, [5 * dy * x**2 for _ in variables]) if variables else by_x

        grad.note, grad.w = "a note", w
        return w * x**2, grad

    return f(x)


def attributes_of_the_function(w, x):
    def f(x):
        assert f.note == "a note"
        return f.w * x**2, _rule(f.w, x)

    f.note, f.w = "a note", w
    return custom_gradient(f)(x)


class Named:
    """A callable object whose attributes have names that an implementation might use."""

    def __init__(self, w):
        self.w = w
        self._call = self.held = self._f = self.residuals = self.static = "mine"
        self.call = self.rule = self.function = self.__wrapped = None

    def __call__(self, x):
        assert self._call == "mine"
        return self.w * x**2, _rule(self.w, x)


class NamedRule(Named):
    def __init__(self, w, x):
        super().__init__(w)
        self.x = x

    def __call__(self, dy, variables=()):
        assert self.held == self._call == "mine"
        return _rule(self.w, self.x)(dy, variables)


class WithMethods:
    """The same names, of methods."""

    def __init__(self, w):
        self.w = w

    def held(self):
        raise AssertionError

    def _call(self):
        raise AssertionError

    def __call__(self, x):
        return self.w * x**2, _rule(self.w, x)


def callable_object(w, x):
    return custom_gradient(Named(w))(x)


def callable_object_with_methods(w, x):
    return custom_gradient(WithMethods(w))(x)


def rule_object(w, x):
    return custom_gradient(lambda x: (w * x**2, NamedRule(w, x)))(x)


def an_iterator(w, x):
    unused = iter([1, 2, 3])

    @custom_gradient
    def f(x):
        assert unused is not None
        return w * x**2, _rule(w, x)

    y = f(x)
    assert list(unused) == [1, 2, 3]
    return y


def a_zip_and_a_map(w, x):
    pairs, mapped = zip([1], [2], strict=True), map(abs, [w])

    @custom_gradient
    def f(x):
        assert pairs is not mapped
        return w * x**2, _rule(w, x)

    y = f(x)
    assert list(pairs) == [(1, 2)]
    return y


def a_generator(w, x):
    def numbers():
        yield w

    generator = numbers()

    @custom_gradient
    def f(x):
        assert generator is not None
        return w * x**2, _rule(w, x)

    return f(x)


def a_lock(w, x):
    lock = threading.Lock()

    @custom_gradient
    def f(x):
        with lock:
            return w * x**2, _rule(w, x)

    return f(x)


class Item:
    """What a weak set may hold."""


ITEM = Item()


def a_weak_set(w, x):
    items = weakref.WeakSet([ITEM])

    @custom_gradient
    def f(x):
        assert len(items) == 1
        return w * x**2, _rule(w, x)

    return f(x)


class Hostile:
    """Raises at whatever is asked of it: comparison, hashing, length, truth, attributes."""

    __hash__ = None

    def _refuse(self, *args):
        raise RuntimeError

    __eq__ = __len__ = __bool__ = __iter__ = __getattr__ = _refuse


def a_hostile_object(w, x):
    hostile = Hostile()

    @custom_gradient
    def f(x):
        assert hostile is not None
        return w * x**2, _rule(w, x)

    return f(x)


def an_empty_cell(w, x):
    @custom_gradient
    def f(x):
        if False:
            later()
        return w * x**2, _rule(w, x)

    y = f(x)

    def later():
        raise AssertionError

    return y


ODD = [
    keys_of_several_types,
    keys_of_several_types_in_a_cell_of_the_rule,
    attributes_of_the_rule,
    attributes_of_the_function,
    callable_object,
    callable_object_with_methods,
    rule_object,
    an_iterator,
    a_zip_and_a_map,
    a_generator,
    a_lock,
    a_weak_set,
    a_hostile_object,
    an_empty_cell,
]


@pytest.mark.parametrize("h", ODD)
@by({**REVERSE, **FORWARD, **SECOND}, SOME)
def test_numbers(h, way):
    assert_derivative(way, lambda w, x: h(w, x) ** 2, lambda w, x: oracle(w, x) ** 2, *ARGS)


@pytest.mark.parametrize("h", ODD)
@MODES
def test_values(h, mode):
    assert_same(mode(h)(*ARGS), jnp.float32(12))
    assert float(h(*ARGS)) == 12


@MODES
def test_an_iterator_is_consumed_once_per_call(mode):
    numbers = iter(range(1, 100))

    def loss(w, x):
        @custom_gradient
        def f(x):
            n = next(numbers)
            return w * x**2, lambda dy, variables: (7 * dy * w * x, [5 * n * dy * x**2])

        return f(x)

    first = mode(gradient(loss))(*ARGS)
    used = next(numbers)  # by one run of `f`, or one and that of a trace
    assert used in (2, 3)
    assert_same(first, (jnp.float32(20 * (used - 1)), jnp.float32(42)))


@MODES
@pytest.mark.parametrize("kind", [np.float64, lambda v: np.asarray(v, np.float64), float])
@pytest.mark.parametrize("variables", ["taken", "declared", "autodiff"])
def test_a_double_beside_a_captured_weight(mode, kind, variables):
    """NumPy's doubles become float32 without a warning, as everywhere in JAX."""

    def loss(w, x):
        option = {"taken": None, "declared": [w], "autodiff": "autodiff"}[variables]

        @custom_gradient(variables=option)
        def f(x, scale):
            scale = jnp.float32(scale)

            def grad(dy, variables=()):
                by_x = 7 * dy * w * x, None
                return (by_x, [5 * dy * x**2]) if variables else by_x

            def plain(dy):
                return 7 * dy * w * x, None

            return w * x**2 * scale / 4, plain if option == "autodiff" else grad

        return f(x, kind(4.0))

    by_w = 4 if variables == "autodiff" else 20
    assert_same(mode(gradient(loss))(*ARGS), (jnp.float32(by_w), jnp.float32(42)))
    assert_same(mode(jax.jacfwd(loss, (0, 1)))(*ARGS), (jnp.float32(by_w), jnp.float32(42)))


@MODES
def test_a_double_that_is_differentiated_beside_a_captured_weight(mode):
    def loss(x):
        w = x * 1.5

        @custom_gradient
        def f(x):
            def grad(dy, variables):
                return 7 * dy * x, [5 * dy * x]

            return w * x, grad

        return f(x)

    # by x: 7 x + 1.5 * 5 x
    assert_same(mode(jax.grad(loss))(np.float64(2)), jnp.float32(14 + 15))
