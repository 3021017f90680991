"""Strict checks for every test: no accident of shapes, dtypes or seeds passes for a result."""

import os

import hypothesis
import jax
import pytest
from flags import reason_to_skip

jax.config.update("jax_num_cpu_devices", 8)  # for `devices/`

# A test that needs the lenient behavior says so: `with jax.numpy_dtype_promotion("standard")`.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples on every run and machine, as they come; `--hypothesis-profile=explore` looks
# for new ones and makes them small.
hypothesis.settings.register_profile(
    "repeat",
    derandomize=True,
    deadline=None,
    max_examples=20,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile("repeat")


def pytest_addoption(parser):
    group = parser.getgroup("samples", "what `helpers.sample` draws from the cross products")
    group.addoption(
        "--seed", type=int, default=int(os.environ.get("TFGRAD_SEED", 0)), help="draw other samples"
    )
    group.addoption(
        "--count",
        type=float,
        default=float(os.environ.get("TFGRAD_COUNT", 1)),
        help="draw samples of so many times their size",
    )


def pytest_configure(config):
    # Parametrized tests draw while pytest imports them, and so does each worker of xdist.
    os.environ["TFGRAD_SEED"] = str(config.getoption("seed"))
    os.environ["TFGRAD_COUNT"] = str(config.getoption("count"))


def pytest_report_header(config):
    return f"samples: --seed {config.getoption('seed')} --count {config.getoption('count'):g}"


@pytest.fixture
def x64():
    """Let float64 and complex128 exist for the length of a test."""
    with jax.enable_x64(True):
        yield


def pytest_collection_modifyitems(items):
    for item in items:
        reason = reason_to_skip(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
