"""Strict checks for every test: no accident of shapes, dtypes or seeds passes for a result."""

import gc
import os

import jax
import pytest
from flags import reason_to_skip
from helpers import sample

# Most of the time goes into compiling small programs, which run once.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"  # read at the first array
jax.config.update("jax_num_cpu_devices", 8)  # for `devices/`

# JAX keeps what it compiles: to look through all of it, again and again, takes a tenth of the time.
gc.set_threshold(100_000, 50, 1000)

# A test that needs the lenient behavior says so: `with jax.numpy_dtype_promotion("standard")`.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


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


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what there is by now stays: tests that collect garbage need not look at it


@pytest.hookimpl(trylast=True)  # after `-k` and `-m`: what they leave is what is drawn from
def pytest_collection_modifyitems(config, items):
    tests = {}
    for item in items:
        reason = reason_to_skip(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        if marker := item.get_closest_marker("sampled"):
            cases = tests.setdefault((item.path, item.originalname), (marker.args[0], []))[1]
            cases.append(item)
    drawn = {
        id(case)
        for size, cases in tests.values()
        for case in sample(sorted(cases, key=lambda case: case.nodeid), size)
    }
    left = [i for i in items if i.get_closest_marker("sampled") and id(i) not in drawn]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)
