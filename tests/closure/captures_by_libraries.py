"""Captures by modules of Equinox and Flax."""

import jax
import pytest
from captures import capture, like

from tfgrad_jax import custom_gradient


@capture()
def equinox_module(w):
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        w: jax.Array

        @custom_gradient
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w * x, [5 * dy * x**2 for _ in variables]

            return self.w * x**2, grad

    return Layer(w)


@capture()
def equinox_module_declared(w):
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        w: jax.Array
        name: str = "layer"

        @custom_gradient(variables=lambda self: eqx.filter(self, eqx.is_array))
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * variables.w * x, like(variables, 5 * dy * x**2)

            return self.w * x**2, grad

    return Layer(w)


@capture()
def nnx_module(w):
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(w)

        @custom_gradient
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w[...] * x, [5 * dy * x**2 for _ in variables]

            return self.w[...] * x**2, grad

    return Layer(w)


@capture()
def nnx_module_declared(w):
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(w)

        @custom_gradient(variables=lambda self: nnx.state(self, nnx.Param))
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w[...] * x, like(variables, 5 * dy * x**2)

            return self.w[...] * x**2, grad

    return Layer(w)


@capture()
def linen_inside_apply(w):
    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param("w", linen.initializers.ones, ())

            @custom_gradient
            def f(x):
                def grad(dy, variables):
                    return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

                return w * x**2, grad

            return f(x)

    return lambda x: Layer().apply({"params": {"w": w}}, x)


@capture()
def linen_method(w):
    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):
        def setup(self):
            self.w = self.param("w", linen.initializers.ones, ())

        @custom_gradient
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w * x, [5 * dy * x**2 for _ in variables]

            return self.w * x**2, grad

    return lambda x: Layer().apply({"params": {"w": w}}, x)
