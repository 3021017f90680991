"""Weights that a module owns: flax nnx and equinox. Pages show linen, Haiku and Keras."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

from .layer import B, W, X, assert_gradients, dense, rule

# --- flax nnx ------------------------------------------------------------------------------------


@pytest.fixture
def nnx():
    return pytest.importorskip("flax.nnx")


def captured(w, b, x):
    """Apply the layer, its weights captured and not declared."""

    @custom_gradient
    def layer(x):
        def grad(dy, variables):
            dx, dw, db = rule(w, x, dy)
            found = {id(w): dw, id(b): db}
            return dx, [found[id(v)] for v in variables]

        return x @ w + b, grad

    return layer(x)


@pytest.mark.parametrize("layer", [dense, captured])
def test_nnx(nnx, layer):
    class Dense(nnx.Module):
        def __init__(self):
            self.w, self.b = nnx.Param(W), nnx.Param(B)

        def __call__(self, x):
            return layer(self.w[...], self.b[...], x)

    gradients = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(X) ** 2)))(Dense())
    assert_gradients(gradients["w"][...], gradients["b"][...])


def test_nnx_state_that_the_layer_returns(nnx):
    """State is changed outside of the decorated function, from a second output."""

    class Counted(nnx.Module):
        def __init__(self):
            self.w, self.total = nnx.Param(W), nnx.BatchStat(jnp.zeros(2))

        def __call__(self, x):
            y, total = scaled(x @ self.w[...], self.total[...])
            self.total[...] = total
            return y

    @custom_gradient
    def scaled(y, total):
        return (y, total + jax.lax.stop_gradient(y).sum(0)), lambda dy, _: (3 * dy, None)

    @nnx.jit
    def step(layer):
        return nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)

    layer = Counted()
    gradient = step(layer)["w"][...]
    np.testing.assert_allclose(layer.total[...], (X @ W).sum(0), rtol=1e-6)
    np.testing.assert_allclose(gradient, 3 * X.T @ (2 * X @ W), rtol=1e-5)


# --- equinox -------------------------------------------------------------------------------------


@pytest.fixture
def eqx():
    return pytest.importorskip("equinox")


def test_equinox_module_as_its_own_variables(eqx):
    class Dense(eqx.Module):
        w: jax.Array
        b: jax.Array
        name: str = eqx.field(static=True, default="dense")

        @custom_gradient(variables=lambda self: self)
        def __call__(self, x):
            def grad(dy, variables):
                dx, dw, db = rule(variables.w, x, dy)
                return dx, dataclasses.replace(variables, w=dw, b=db)

            return x @ self.w + self.b, grad

    loss = eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(layer(X) ** 2)))
    gradients = loss(Dense(W, B))
    assert isinstance(gradients, Dense) and gradients.name == "dense"
    assert_gradients(gradients.w, gradients.b)


def test_equinox_module_as_an_input(eqx):
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))

    @custom_gradient
    def apply(module, x):
        y, pull_back = jax.vjp(lambda module, x: jax.vmap(module)(x), module, x)
        return y, lambda dy: jax.tree.map(lambda g: 3 * g, pull_back(dy))

    gradients = eqx.filter_grad(lambda m: jnp.sum(apply(m, X) ** 2))(linear)
    plain = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(X) ** 2))(linear)
    np.testing.assert_allclose(gradients.weight, 3 * plain.weight, rtol=1e-5)
    np.testing.assert_allclose(gradients.bias, 3 * plain.bias, rtol=1e-5)


# --- Keras ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "rule_reads", "row"),
    [
        (lambda w: [w.value], lambda w: w + 0, 0),
        (lambda w: [w], lambda w: w.value, 1),
        (lambda w: None, None, 2),
    ],
    ids=["read in the rule", "declared", "undeclared"],
)
def test_the_messages_on_the_page_about_keras(declared, rule_reads, row, monkeypatch):
    """What a layer raises that does not read its weight into a local variable first."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    page = (Path(__file__).parents[2] / "docs" / "howto" / "keras.md").read_text()
    messages = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)

    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], 2), name="w")

        def call(self, x):
            def dense(x):
                def grad(dy, variables):
                    return dy @ rule_reads(self.w).T, [x.T @ dy]

                return x @ self.w.value, grad if rule_reads else lambda dy: dy @ jnp.ones((2, 3))

            return custom_gradient(dense, variables=declared(self.w))(x)

    with pytest.raises(TypeError) as error:
        model = keras.Sequential([keras.Input((3,)), Layer()])
        model.compile("sgd", loss="mse")
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    said = str(error.value).replace("`", "")
    assert re.search(".*".join(map(re.escape, messages[row].split("..."))), said, re.DOTALL)


# --- parameters that are made inside of the function ----------------------------------------------


def haiku_loss(layer):
    hk = pytest.importorskip("haiku")
    net = hk.transform(lambda x: layer(lambda x: hk.Linear(2)(x), x))
    return lambda p: net.apply(p, None, X), net.init(jax.random.key(0), X)


def linen_loss(layer):
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return layer(lambda x: linen.Dense(2)(x), x)

    return lambda p: Net().apply(p, X), Net().init(jax.random.key(0), X)


def twice(option):
    """Return a loss that makes two modules, each in a call of the decorated function."""

    def layer(module, x):
        @custom_gradient(variables=option)
        def f(x):
            def grad(dy, variables=()):
                return (7 * dy, [None for _ in variables]) if option is None else 7 * dy

            return module(x[..., :2]), grad

        return jnp.sum(f(f(x)))

    return layer


@pytest.mark.parametrize("option", ["autodiff", None])
@pytest.mark.parametrize("loss_of", [haiku_loss, linen_loss])
def test_an_error_says_that_the_function_ran_again(loss_of, option):
    loss, params = loss_of(twice(option))
    assert jnp.isfinite(loss(params))
    with pytest.raises(Exception, match="parameter") as caught:  # of a kind of the library
        jax.grad(loss)(params)
    assert "ran again" in caught.value.__notes__[0]
