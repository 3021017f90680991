"""The programs in `examples/`: what they compute, print and write, and what they refuse."""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("matplotlib", "optax", "sklearn", "tqdm"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"


# Pages, examples and benchmarks write `x @ w + b`, as everyone does.
pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture(scope="module")
def train_digits():
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLES / "train_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _printed_accuracies(text):
    """Return {name: test accuracy}, as the table of the script has it."""
    rows = re.findall(r"^(\S.*?) +([\d.]+)% +[\d.]+ +\d+%$", text, re.MULTILINE)
    return {name: float(percent) / 100 for name, percent in rows}


def test_the_binary_unit_has_the_declared_gradient(train_digits):
    x = jnp.array([-2.0, -0.3, 0.4, 1.5], jnp.float32)
    y, pullback = jax.vjp(train_digits.binary, x)
    (gradient,) = pullback(jnp.full_like(x, 3.0))
    np.testing.assert_array_equal(y, [-1, -1, 1, 1])
    np.testing.assert_allclose(gradient, 3 / np.cosh(np.asarray(x, np.float64)) ** 2, rtol=1e-6)
    assert gradient.dtype == jnp.float32


@pytest.mark.docs
def test_a_short_run(train_digits, tmp_path, capsys):
    out = tmp_path / "digits.png"
    runs = train_digits.main(["--steps", "30", "--batch", "64", "--seed", "3", "--out", str(out)])

    surrogate, plain = runs[train_digits.SURROGATE], runs[train_digits.PLAIN]
    assert plain.moved == 0 and surrogate.moved > 0.05
    for run in runs.values():
        assert run.losses.shape == (30,) and run.losses[-1] < 0.7 * run.losses[0]
        assert run.hidden.shape == (450, 256) and set(np.unique(run.hidden)) == {-1, 1}
    assert surrogate.losses[0] == plain.losses[0]  # the same weights, the same batch

    _, test = train_digits.load(seed=3)
    accuracies = {name: float(np.mean(run.predicted == test.labels)) for name, run in runs.items()}
    printed = _printed_accuracies(capsys.readouterr().out)
    assert printed == pytest.approx(accuracies, abs=5e-4)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_the_surrogate_reaches_96_percent_and_the_plain_sign_does_not(
    train_digits, tmp_path, capsys
):
    train_digits.main(["--out", str(tmp_path / "digits.png")])
    printed = _printed_accuracies(capsys.readouterr().out)
    assert printed[train_digits.SURROGATE] >= 0.96
    assert printed[train_digits.PLAIN] < 0.93
