"""`help`, `?` and `inspect.signature` show what the decorated function takes and returns."""

import functools
import inspect
import typing
from collections.abc import Callable

import pytest

from tfgrad_jax import custom_gradient, grad_pass_through

Rule = Callable[[float], float]


def real(x: float, y: float = 2.0, *, name: str = "") -> tuple[float, Rule]:
    return x, lambda dy: (dy, None)


def text(x: "float") -> "tuple[dict[str, float], Rule]":
    return {"y": x}, lambda dy: dy


def typed(x: float) -> typing.Tuple[float, Rule]:  # noqa: UP006
    return x, lambda dy: dy


def quoted(x: float) -> "typing.Tuple[float, Rule]":  # noqa: UP006
    return x, lambda dy: dy


def untold(x):
    return x, lambda dy: dy


def other(x: float) -> "Pair":  # noqa: F821
    return x, lambda dy: dy


@pytest.mark.parametrize(
    ("f", "shown"),
    [
        (real, "(x: float, y: float = 2.0, *, name: str = '') -> float"),
        (text, "(x: 'float') -> 'dict[str, float]'"),
        (typed, "(x: float) -> float"),
        (quoted, "(x: float) -> 'float'"),
        (untold, "(x)"),
        (other, "(x: float) -> 'Pair'"),
        (functools.partial(real, 1.0), "(y: float = 2.0, *, name: str = '') -> float"),
    ],
)
def test_signature(f, shown):
    h = custom_gradient(f)
    assert str(inspect.signature(h)) == shown
    assert str(inspect.signature(functools.wraps(h)(lambda *args: h(*args)))) == shown


def test_annotations():
    assert custom_gradient(real).__annotations__["return"] is float
    assert real.__annotations__["return"] == tuple[float, Rule]
    assert "return" not in custom_gradient(untold).__annotations__


class Layer:
    @custom_gradient
    def method(self, x: float) -> tuple[float, Rule]:
        return x, lambda dy: dy


def test_methods():
    assert str(inspect.signature(Layer.method)) == "(self, x: float) -> float"
    assert str(inspect.signature(Layer().method)) == "(x: float) -> float"
    assert Layer().method.__annotations__["return"] is float


def test_pass_through_keeps_its_own():
    def rounded(x: float) -> float:
        return round(x)

    assert str(inspect.signature(grad_pass_through(rounded))) == "(x: float) -> float"
