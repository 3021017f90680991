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


def test_sqrt_gradient_at_zero_is_large_and_finite_and_times_zero_it_is_zero():
    expected = np.sqrt(np.finfo(np.float64).max)
    np.testing.assert_allclose(elementwise_gradient(sqrt_with_finite_grads)(np.zeros(2)), expected)
    g = jax.grad(lambda x: sqrt_with_finite_grads(jnp.sum(x**2)))
    np.testing.assert_array_equal(g(np.zeros(3)), np.zeros(3))


def test_hypergeometric_gradient():
    """The rule computes shapes with values, and so needs to see them."""
    f = lambda z: hypergeometric.hyp2f1_small_argument(0.5, 1.5, 2.5, z)  # noqa: E731
    z = np.array([-0.7, 0.1, 0.4])
    np.testing.assert_allclose(elementwise_gradient(f)(z), difference(f, z), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.jit(f))(0.4), difference(f, 0.4), rtol=1e-6)


def test_hypergeometric_second_order():
    """The rule calls the function, so its derivative is declared too."""
    a, b, c, z = 0.5, 1.5, 2.5, 0.3

    def f(z):
        return hypergeometric.hyp2f1_small_argument(a, b, c, z)

    factor = a * (a + 1) * b * (b + 1) / (c * (c + 1))
    expected = factor * hypergeometric.hyp2f1_small_argument(a + 2, b + 2, c + 2, z)
    np.testing.assert_allclose(jax.grad(jax.grad(f))(z), expected, rtol=1e-6)


@pytest.mark.parametrize("concentration", [0.5, 4.0, 20.0])
def test_von_mises_cdf_by_x(concentration):
    density = tfd.VonMises(np.float64(0.0), np.float64(concentration)).prob
    g = elementwise_gradient(lambda x: von_mises_cdf(x, np.full(3, concentration)))
    # Above 10.5 the function is an approximation, and its gradient the exact density.
    np.testing.assert_allclose(g(X), density(X), rtol=1e-10)


@both_modes
def test_von_mises_cdf_by_concentration(mode):
    concentrations = np.array([0.5, 4.0, 9.0])
    g = mode(elementwise_gradient(lambda k: von_mises_cdf(X, k)))
    expected = difference(lambda k: von_mises_cdf(X, k), concentrations)
    np.testing.assert_allclose(g(concentrations), expected, rtol=1e-5, atol=1e-8)


def test_von_mises_samples_are_reparameterized():
    """The sample x(k) keeps its quantile: dx/dk = -(dF/dk) / p(x)."""
    key = jax.random.PRNGKey(0)

    def sample(k):
        return tfd.VonMises(np.float64(0.0), k).sample(seed=key)

    k = np.float64(2.0)
    x = sample(k)
    by_k = difference(lambda k: von_mises_cdf(x, k), k)
    expected = -by_k / tfd.VonMises(np.float64(0.0), k).prob(x)
    np.testing.assert_allclose(jax.grad(sample)(k), expected, rtol=1e-5)


def _mixture(locations):
    return tfd.MixtureSameFamily(
        tfd.Categorical(probs=np.array([0.4, 0.6])),
        tfd.Normal(locations, np.array([0.5, 1.0])),
        reparameterize=True,
    )


@both_modes
def test_mixture_samples_are_reparameterized(mode):
    key, locations = jax.random.PRNGKey(1), np.array([-1.0, 2.0])

    def sample(locations):
        return _mixture(locations).sample(seed=key)

    x = sample(locations)
    mixture = _mixture(locations)
    by_location = jax.jacfwd(lambda locations: _mixture(locations).cdf(x))(locations)
    np.testing.assert_allclose(
        mode(jax.grad(sample))(locations), -by_location / mixture.prob(x), rtol=1e-8
    )
