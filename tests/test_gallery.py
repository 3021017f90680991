"""The gallery: twenty gradients, each checked, and compared with numbers worked out elsewhere."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax.testing import check_gradient

pytestmark = pytest.mark.deep


def _load():
    path = Path(__file__).parent.parent / "examples" / "gallery.py"
    spec = importlib.util.spec_from_file_location("gallery", path)
    module = sys.modules["gallery"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gallery = _load()
ENTRIES = {entry.name: entry for entry in gallery.GALLERY}
EXACT = [name for name, entry in ENTRIES.items() if not entry.surrogate]
ALL = pytest.mark.parametrize("name", ENTRIES)


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Undo the strictness of `conftest.py`: the gallery is written as everyone writes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def gradient(name, *args, dy=1.0):
    """Return the declared gradients at some arguments, for an upstream."""
    y, pull_back = jax.vjp(ENTRIES[name].f, *args)
    return pull_back(jnp.full_like(y, dy) if np.ndim(dy) == 0 else jnp.asarray(dy, y.dtype))


def test_there_are_twenty():
    assert len(gallery.GALLERY) == len(ENTRIES) == 20
    assert 8 <= len(EXACT) <= 12


@ALL
def test_it_says_what_it_is(name):
    entry = ENTRIES[name]
    assert entry.title and entry.source and entry.about.endswith(".")
    assert entry.code.startswith("@custom_gradient\ndef ")
    assert len(entry.code.splitlines()) <= 20


@ALL
def test_check_gradient_is_content(name):
    assert ENTRIES[name].check().ok


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_one_is_not_called_a_surrogate(name):
    """Guard: the check of an exact one would notice a factor."""
    f, point = ENTRIES[name].f, ENTRIES[name].point
    twice = jax.custom_vjp(lambda *args: f(*args))
    twice.defvjp(lambda *args: jax.vjp(f, *args), lambda pull_back, dy: pull_back(2 * dy))
    assert not check_gradient(twice, *point, reference=f).ok


@ALL
def test_its_picture_can_be_drawn(name):
    x, lines = ENTRIES[name].lines()
    assert len(lines) >= 2
    for y in lines.values():
        assert y.shape == x.shape and bool(jnp.all(jnp.isfinite(y)))


# What each declares, worked out by hand or with NumPy and SciPy's formulas.
X = np.array([-1.3, 0.4, 2.2])


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def test_log1pexp():
    np.testing.assert_allclose(gradient("log1pexp", X)[0], 1 / (1 + np.exp(-X)), rtol=1e-6)
    np.testing.assert_allclose(gradient("log1pexp", jnp.float32(200))[0], 1)


def test_swish():
    s = 1 / (1 + np.exp(-X))
    np.testing.assert_allclose(gradient("swish", X)[0], s + X * s * (1 - s), rtol=1e-5)


def test_safe_norm():
    np.testing.assert_allclose(gradient("safe_norm", X)[0], X / np.linalg.norm(X), rtol=1e-6)
    np.testing.assert_array_equal(gradient("safe_norm", jnp.zeros(3))[0], np.zeros(3))


def test_cross_entropy():
    wanted = softmax(X) - [0, 0, 1]
    found = jax.grad(ENTRIES["cross_entropy"].f)(jnp.asarray(X), 2)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_lennard_jones():
    r = 1.3
    found = gradient("lennard_jones", jnp.float32(r))[0]
    np.testing.assert_allclose(found, 4 * (-12 * r**-13 + 6 * r**-7), rtol=1e-5)


def test_lambert_w():
    f = ENTRIES["lambert_w"].f
    np.testing.assert_allclose(f(jnp.float32(np.e)), 1, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(np.e), 1 / (2 * np.e), rtol=1e-5)
    second = -(np.exp(-2) * (1 + 2)) / (1 + 1) ** 3  # W'' = -exp(-2W) (W + 2) / (1 + W)^3
    np.testing.assert_allclose(jax.grad(jax.grad(f))(np.e), second, rtol=1e-4)


def test_kepler():
    found = gradient("kepler", jnp.float32(np.pi / 2 - 0.5), jnp.float32(0.5))  # anomaly pi / 2
    np.testing.assert_allclose(found, [1.0, 1.0], rtol=1e-5)


def test_mixture_sample():
    # By symmetry the median of N(-1, 1)/2 + N(1, 1)/2 is 0, and it moves half as fast as a mean.
    found = gradient("mixture_sample", jnp.float32(1.0), jnp.float32(0.5))
    density = np.exp(-0.5) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(found, [0.5, 1 / density], rtol=1e-4)


def test_sparsemax():
    z = jnp.array([0.3, 0.5, -0.9])
    np.testing.assert_allclose(ENTRIES["sparsemax"].f(z), [0.4, 0.6, 0], rtol=1e-6)
    found = gradient("sparsemax", z, dy=[1.0, 0.0, 5.0])[0]
    np.testing.assert_allclose(found, [0.5, -0.5, 0], atol=1e-7)


def test_clipped_relu():
    found = gradient("clipped_relu", jnp.asarray(X), jnp.float32(1.0), dy=[2.0, 3.0, 4.0])
    np.testing.assert_array_equal(found[0], [0, 3, 0])
    assert found[1] == 4


def test_round_straight_through():
    np.testing.assert_array_equal(gradient("round_straight_through", X, dy=X)[0], X.astype("f4"))


def test_binarize():
    np.testing.assert_array_equal(gradient("binarize", X, dy=3.0)[0], [0, 3, 0])


def test_spike():
    found = gradient("spike", X, dy=3.0)[0]
    np.testing.assert_allclose(found, 3 / (1 + 10 * np.abs(X)) ** 2, rtol=1e-5)


def test_quantize():
    x, step = jnp.array([-9.0, 0.4, 1.6]), jnp.float32(0.5)
    found = gradient("quantize", x, step, dy=[1.0, 2.0, 3.0])
    np.testing.assert_array_equal(found[0], [0, 2, 0])
    # -4 below; round(0.8) - 0.8 inside; 3 above
    np.testing.assert_allclose(found[1], (-4 + 2 * 0.2 + 3 * 3) / np.sqrt(3 * 3), rtol=1e-5)


def test_hard_argmax():
    p = softmax(X)
    found = gradient("hard_argmax", X, dy=[1.0, 0.0, 2.0])[0]
    dy = np.array([1, 0, 2])
    np.testing.assert_allclose(found, p * (dy - p @ dy), rtol=1e-4)


def test_cheapest():
    costs = jnp.array([0.3, 0.5, 0.9])
    found = gradient("cheapest", costs, dy=[1.0, 0.0, 0.0])[0]  # makes the second the cheapest
    np.testing.assert_array_equal(found, [-1, 1, 0])


def test_reverse_gradient():
    np.testing.assert_array_equal(gradient("reverse_gradient", X, dy=3.0)[0], [-3, -3, -3])


def test_clip_gradient_norm():
    found = gradient("clip_gradient_norm", X, dy=[3.0, 0.0, 4.0])[0]
    np.testing.assert_allclose(found, [0.6, 0, 0.8], rtol=1e-6)
    found = gradient("clip_gradient_norm", X, dy=[0.3, 0.0, 0.4])[0]
    np.testing.assert_allclose(found, [0.3, 0, 0.4], rtol=1e-6)


def test_guided_relu():
    np.testing.assert_array_equal(gradient("guided_relu", X, dy=[1.0, -2.0, 3.0])[0], [0, 0, 3])


def test_lower_bound():
    np.testing.assert_array_equal(gradient("lower_bound", X, dy=[1.0, -2.0, 3.0])[0], [0, -2, 3])
