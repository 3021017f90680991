"""What the pages about flax, equinox, Haiku and Keras leave out: `tests/docs` runs their code."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfgrad_jax import custom_gradient

X = jnp.array([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])

# --- flax nnx ------------------------------------------------------------------------------------


def test_nnx_variables_that_are_not_declared_and_state_that_is_returned():
    class Dense(nnx.Module):
        def __init__(self):
            self.w, self.b = nnx.Param(jnp.ones((3, 2))), nnx.Param(jnp.zeros(2))
            self.total = nnx.BatchStat(jnp.zeros(2))

        def __call__(self, x):
            w, b = self.w[...], self.b[...]

            @custom_gradient
            def layer(x, total):
                y = x @ w + b

                def grad(dy, _, variables):
                    found = {id(w): 3 * x.T @ dy, id(b): 5 * dy.sum(0)}
                    return (dy @ w.T, None), [found[id(v)] for v in variables]

                return (y, total + jax.lax.stop_gradient(y).sum(0)), grad

            y, self.total[...] = layer(x, self.total[...])
            return y

    @nnx.jit
    def gradients_of(layer):
        return nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)

    layer = Dense()
    gradients, y = gradients_of(layer), X @ np.ones((3, 2))
    np.testing.assert_allclose(gradients["w"][...], 3 * X.T @ (2 * y), rtol=1e-5)
    np.testing.assert_allclose(gradients["b"][...], 5 * (2 * y).sum(0), rtol=1e-5)
    np.testing.assert_allclose(layer.total[...], y.sum(0), rtol=1e-6)


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
        model.compile("sgd", loss="mse", run_eagerly=row == 0)
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    said = str(error.value).replace("`", "")
    assert re.search(".*".join(map(re.escape, messages[row].split("..."))), said, re.DOTALL)


# --- parameters that are made inside of the function ----------------------------------------------


def haiku_loss(layer):
    hk = pytest.importorskip("haiku")
    net = hk.transform(lambda x: layer(lambda x: hk.Linear(2)(x), x))
    return lambda p: net.apply(p, None, X), net.init(jax.random.key(0), X)


def linen_loss(layer):
    linen = pytest.importorskip("flax.linen")  # not in the job without the GIL

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return layer(lambda x: linen.Dense(2)(x), x)

    return lambda p: Net().apply(p, X), Net().init(jax.random.key(0), X)


def made_inside(option, times):
    """Return a loss that makes modules, each in a call of the decorated function."""

    def layer(module, x):
        @custom_gradient(variables=option)
        def f(x):
            if option == "autodiff":
                return module(x), lambda dy: 7 * dy
            return module(x), lambda dy, variables=(): (7 * dy, [5 * v for v in variables])

        x = x[..., :2]
        return jnp.sum(f(f(x)) if times == 2 else f(x))

    return layer


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("option", ["autodiff", None])
@pytest.mark.parametrize("loss_of", [haiku_loss, linen_loss])
def test_parameters_that_are_made_inside_of_the_function_have_gradients(loss_of, option, times):
    loss, params = loss_of(made_inside(option, times))
    leaves, x, expected = jax.tree.leaves(params), np.asarray(X[:, :2]), []
    for k, (b, w) in enumerate(zip(leaves[::2], leaves[1::2], strict=True)):
        dy = 7.0 ** (times - 1 - k) * np.ones((2, 2))  # of the sum, by the rules of later calls
        expected += [dy.sum(0), x.T @ dy] if option else [5 * b, 5 * w]
        x = x @ w + b
    for got, right in zip(jax.tree.leaves(jax.grad(loss)(params)), expected, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5)
