"""Strict checks for every test: no accident of shapes, dtypes or seeds passes for a result."""

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
    parser.addoption(
        "--load", type=int, default=1, help="how many times as much `test_load.py` is to do"
    )


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
