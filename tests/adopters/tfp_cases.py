"""What TensorFlow Probability declares by `jax.custom_gradient`, against formulas and differences.

These are all of its uses on JAX: the square root with finite gradients (in its kernels), the
hypergeometric function (whose rule calls the function itself), the von Mises distribution, and
reparameterized mixtures.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)

tfp = pytest.importorskip("tensorflow_probability.substrates.jax")
tfd = tfp.distributions

_substrate = "tensorflow_probability.substrates.jax"
hypergeometric = importlib.import_module(f"{_substrate}.math.hypergeometric")
von_mises_cdf = importlib.import_module(f"{_substrate}.distributions.von_mises").von_mises_cdf
sqrt_with_finite_grads = importlib.import_module(
    f"{_substrate}.math.psd_kernels.internal.util"
).sqrt_with_finite_grads

X = np.array([0.3, 1.0, 2.5])
both_modes = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


def difference(f, x, step=1e-5):
    """Return the derivative of an elementwise function by central differences."""
    return (np.asarray(f(x + step)) - np.asarray(f(x - step))) / (2 * step)


def elementwise_gradient(f):
    return jax.grad(lambda x: jnp.sum(f(x)))


@both_modes
def test_sqrt_gradients_of_both_orders(mode):
    first = jax.grad(sqrt_with_finite_grads)
    np.testing.assert_allclose(mode(jax.vmap(first))(X), 0.5 / np.sqrt(X), rtol=1e-12)
    second = mode(jax.vmap(jax.grad(first)))(X)
    np.testing.assert_allclose(second, -0.25 * X**-1.5, rtol=1e-12)


def test_hypergeometric_gradients_of_both_orders():
    """The rule computes shapes with values, and calls the function, so that is declared too."""
    a, b, c, z = 0.5, 1.5, 2.5, np.array([-0.7, 0.1, 0.4])
    f = lambda z: hypergeometric.hyp2f1_small_argument(a, b, c, z)  # noqa: E731
    np.testing.assert_allclose(elementwise_gradient(f)(z), difference(f, z), rtol=1e-6)
    factor = a * (a + 1) * b * (b + 1) / (c * (c + 1))
    expected = factor * hypergeometric.hyp2f1_small_argument(a + 2, b + 2, c + 2, 0.3)
    np.testing.assert_allclose(jax.grad(jax.grad(f))(0.3), expected, rtol=1e-6)


@both_modes
def test_von_mises_cdf_by_concentration(mode):
    concentrations = np.array([0.5, 4.0, 9.0])
    g = mode(elementwise_gradient(lambda k: von_mises_cdf(X, k)))
    expected = difference(lambda k: von_mises_cdf(X, k), concentrations)
    np.testing.assert_allclose(g(concentrations), expected, rtol=1e-5, atol=1e-8)


@both_modes
def test_mixture_samples_are_reparameterized(mode):
    key, locations = jax.random.PRNGKey(1), np.array([-1.0, 2.0])

    def mixture(locations):
        return tfd.MixtureSameFamily(
            tfd.Categorical(probs=np.array([0.4, 0.6])),
            tfd.Normal(locations, np.array([0.5, 1.0])),
            reparameterize=True,
        )

    x = mixture(locations).sample(seed=key)
    by_location = jax.jacfwd(lambda locations: mixture(locations).cdf(x))(locations)
    gradient = mode(jax.grad(lambda locations: mixture(locations).sample(seed=key)))(locations)
    np.testing.assert_allclose(gradient, -by_location / mixture(locations).prob(x), rtol=1e-8)
