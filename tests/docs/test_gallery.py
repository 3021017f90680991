"""The gallery: each gradient is checked, and compared with numbers worked out elsewhere."""

import importlib.util
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import sample

PATH = Path(__file__).parents[2] / "examples" / "gallery.py"
spec = importlib.util.spec_from_file_location("gallery", PATH)
gallery = sys.modules["gallery"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)
ENTRIES = {entry.name: entry for entry in gallery.GALLERY}
PAGES = Path(__file__).parents[2] / "docs" / "gallery"


# Pages, examples and benchmarks write `x @ w + b`, as everyone does.
pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.docs
@pytest.mark.parametrize("name", sample(ENTRIES, 5))
def test_check_gradient_is_content(name):
    assert ENTRIES[name].check().ok


# The gradients that each declares, worked out with pencil and paper or NumPy:
# name: [(arguments, upstream, gradients)].
X = np.array([-1.3, 0.4, 2.2])
S = 1 / (1 + np.exp(-X))
P = np.exp(X - X.max()) / np.exp(X - X.max()).sum()  # softmax
GRADIENTS = {
    "log1pexp": [((X,), 1.0, (S,)), ((200.0,), 1.0, (1,))],
    "swish": [((X,), 1.0, (S + X * S * (1 - S),))],
    "safe_norm": [((X,), 1.0, (X / np.linalg.norm(X),)), ((np.zeros(3),), 1.0, (np.zeros(3),))],
    "lennard_jones": [((1.3,), 1.0, (4 * (-12 * 1.3**-13 + 6 * 1.3**-7),))],
    "lambert_w": [((np.e,), 1.0, (1 / (2 * np.e),))],
    "kepler": [((np.pi / 2 - 0.5, 0.5), 1.0, (1, 1))],  # the anomaly is pi / 2
    # By symmetry the median of N(-1, 1)/2 + N(1, 1)/2 is 0, and it moves half as fast as a mean.
    "mixture_sample": [((1.0, 0.5), 1.0, (0.5, np.sqrt(2 * np.pi) * np.exp(0.5)))],
    "sparsemax": [(([0.3, 0.5, -0.9],), [1, 0, 5], ([0.5, -0.5, 0],))],
    "clipped_relu": [((X, 1.0), [2, 3, 4], ([0, 3, 0], 4))],
    "projections": [
        (([[1, 2, 3], [4, 5, 6]],), [1, 2, 3, 10, 20], ([[11, 12, 13], [21, 22, 23]],))
    ],
    "round_straight_through": [((X,), X, (X,))],
    "binarize": [((X,), 3.0, ([0, 3, 0],))],
    "spike": [((X,), 3.0, (3 / (1 + 10 * np.abs(X)) ** 2,))],
    # -4 below; round(0.8) - 0.8 inside; 3 above
    "quantize": [(([-9, 0.4, 1.6], 0.5), [1, 2, 3], ([0, 2, 0], (-4 + 2 * 0.2 + 3 * 3) / 3))],
    "hard_argmax": [((X,), [1, 0, 2], (P * ([1, 0, 2] - P @ [1, 0, 2]),))],
    "cheapest": [(([0.3, 0.5, 0.9],), [1, 0, 0], ([-1, 1, 0],))],  # the second is now cheapest
    "reverse_gradient": [((X,), 3.0, ([-3, -3, -3],))],
    "clip_gradient_norm": [
        ((X,), [3, 0, 4], ([0.6, 0, 0.8],)),
        ((X,), [0.3, 0, 0.4], ([0.3, 0, 0.4],)),
    ],
    "guided_relu": [((X,), [1, -2, 3], ([0, 0, 3],))],
    "lower_bound": [((X,), [1, -2, 3], ([0, -2, 3],))],
}


@pytest.mark.docs
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_declared_gradient_has_these_numbers(name):
    for args, dy, expected in GRADIENTS[name]:
        args = [jnp.asarray(a, jnp.float32) for a in args]
        y, pull_back = jax.vjp(ENTRIES[name].f, *args)
        found = pull_back(jnp.broadcast_to(jnp.asarray(dy, y.dtype), y.shape))
        for g, e, a in zip(found, expected, args, strict=True):
            assert g.dtype == a.dtype
            np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-6)


@pytest.mark.docs
def test_those_with_an_integer_or_a_second_derivative():
    assert len(gallery.GALLERY) == len(ENTRIES) == len(GRADIENTS) + 1 == 21
    found = jax.grad(ENTRIES["cross_entropy"].f)(jnp.asarray(X, jnp.float32), 2)
    np.testing.assert_allclose(found, P - [0, 0, 1], rtol=1e-5)
    second = -(np.exp(-2) * (1 + 2)) / (1 + 1) ** 3  # W'' = -exp(-2W) (W + 2) / (1 + W)^3
    np.testing.assert_allclose(jax.grad(jax.grad(ENTRIES["lambert_w"].f))(np.e), second, rtol=1e-4)
    second = np.exp(-20) / (1 + np.exp(-20)) ** 2  # too small for 1 - sigmoid(20) in float32
    for found in (jax.grad(jax.grad(ENTRIES["log1pexp"].f)), jax.hessian(ENTRIES["log1pexp"].f)):
        np.testing.assert_allclose(found(20.0), second, rtol=1e-6)


def test_the_pages_are_current(monkeypatch):
    """`python docs/_ext/gallery.py` writes them, and a picture for each gradient."""
    monkeypatch.syspath_prepend(PAGES.parents[1])
    writer = runpy.run_path(str(PAGES.parent / "_ext" / "gallery.py"))
    written = {path.name: path.read_text() for path in PAGES.glob("*.md")}
    assert written == writer["pages"]()
    assert {path.stem for path in PAGES.glob("*.svg")} == set(ENTRIES)
