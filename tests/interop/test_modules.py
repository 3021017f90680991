"""Weights that a module owns: flax nnx and linen, equinox, Haiku, Keras."""

import dataclasses

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


@pytest.fixture
def module(nnx):
    class Module(nnx.Module):
        def __init__(self):
            self.w, self.b = nnx.Param(W), nnx.Param(B)

    return Module


def assert_nnx_gradients(nnx, module):
    gradients = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(X) ** 2)))(module())
    assert_gradients(gradients["w"][...], gradients["b"][...])


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
def test_nnx(nnx, module, layer):
    class Dense(module):
        def __call__(self, x):
            return layer(self.w[...], self.b[...], x)

    assert_nnx_gradients(nnx, Dense)


def test_nnx_method_with_declared_variables(nnx, module):
    class Dense(module):
        @custom_gradient(variables=lambda self: {"w": self.w[...], "b": self.b[...]})
        def __call__(self, x):
            def grad(dy, variables):
                dx, dw, db = rule(variables["w"], x, dy)
                return dx, {"w": dw, "b": db}

            return x @ self.w[...] + self.b[...], grad

    assert_nnx_gradients(nnx, Dense)


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


# --- flax linen ----------------------------------------------------------------------------------


def test_linen():
    nn = pytest.importorskip("flax.linen")

    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", lambda _: W)
            b = self.param("b", lambda _: B)
            return dense(w, b, x)

    module = Dense()
    params = module.init(jax.random.key(0), X)
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(module.apply(p, X) ** 2)))(params)
    assert_gradients(gradients["params"]["w"], gradients["params"]["b"])


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


# --- Haiku ---------------------------------------------------------------------------------------


def test_haiku():
    hk = pytest.importorskip("haiku")

    def network(x):
        w = hk.get_parameter("w", (3, 2), init=lambda shape, dtype: W)
        b = hk.get_parameter("b", (2,), init=lambda shape, dtype: B)
        return dense(w, b, x)

    transformed = hk.without_apply_rng(hk.transform(network))
    params = transformed.init(jax.random.key(0), X)
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(transformed.apply(p, X) ** 2)))(params)
    (found,) = gradients.values()
    assert_gradients(found["w"], found["b"])


# --- Keras ---------------------------------------------------------------------------------------


def test_keras_fits_and_loads(tmp_path):
    keras = pytest.importorskip("keras")
    assert keras.backend.backend() == "jax"

    @keras.saving.register_keras_serializable("tfgrad_jax")
    class Dense(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(3, 2), name="w")
            self.b = self.add_weight(shape=(2,), name="b")

        def call(self, x):
            return dense(self.w.value, self.b.value, x)

    layer = Dense()
    model = keras.Sequential([keras.Input((3,)), layer])
    layer.w.assign(np.array(W))  # a copy: Keras donates its buffers
    layer.b.assign(np.array(B))
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=lambda y_true, y: keras.ops.sum(y**2, axis=-1),
    )
    model.fit(np.asarray(X), np.zeros((2, 2)), epochs=1, batch_size=2, verbose=0)
    w, b = ((before - after.numpy()) / 0.1 for before, after in ((W, layer.w), (B, layer.b)))
    # Keras' loss is the mean over the batch, so each upstream is half of that of the sum.
    dy = np.clip(np.asarray(X @ W + B), -1, 1)
    np.testing.assert_allclose(w, 3 * np.asarray(X).T @ dy, rtol=1e-4)
    np.testing.assert_allclose(b, 5 * dy.sum(0), rtol=1e-4)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_allclose(loaded(X), model(X), rtol=1e-6)
