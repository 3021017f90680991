"""`decorated` finds the decorated functions that a module defines, under their names."""

import sys
import types

import jax.numpy as jnp
import pytest

from tfgrad_jax.testing import assert_gradient, decorated

SOURCE = """
import functools
from tfgrad_jax import custom_gradient, grad_pass_through
from elsewhere import imported

def undecorated(x):
    return x

@custom_gradient
def right(x):
    return x**2, lambda dy: dy * 2 * x

@custom_gradient(variables=[])
def wrong(x, power=3):
    return x**power, lambda dy, variables: (7 * dy * x, [])

class Model:
    @custom_gradient
    def method(self, x):
        return x, lambda dy: dy

through = grad_pass_through(undecorated)
"""


@pytest.fixture
def module(monkeypatch):
    elsewhere = types.ModuleType("elsewhere")
    exec("from tfgrad_jax import custom_gradient", vars(elsewhere))
    exec("@custom_gradient\ndef imported(x): return x, lambda dy: dy", vars(elsewhere))
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    made = types.ModuleType("layers")
    exec(SOURCE, vars(made))
    return made


def test_its_own_in_order(module):
    assert list(decorated(module)) == ["right", "wrong", "through"]
    assert decorated(module)["right"] is module.right


def test_each_can_be_checked(module):
    found = decorated(module)
    assert_gradient(found["right"], jnp.float32(3))
    assert_gradient(found["through"], jnp.float32(3))
    with pytest.raises(AssertionError, match="WRONG"):
        assert_gradient(found["wrong"], jnp.float32(3))


def test_nothing_in_a_module_without_any():
    assert decorated(types.ModuleType("empty")) == {}
