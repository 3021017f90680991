"""Strict checks for every test: no accident of shapes, dtypes or seeds passes for a result."""

import gc
import os

import jax
import pytest
from support import helpers
from support.flags import reason_to_skip

# Most of the time goes into compiling small programs, which run once.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if jax.__version_info__ < (0, 11):  # later ones end the process: they do not know it
    QUICK += " --xla_cpu_use_fusion_emitters=false"
jax.config.update("jax_num_cpu_devices", 8)  # for `devices/`

# JAX keeps what it compiles: to look through all of it, again and again, takes a tenth of the time.
gc.set_threshold(100_000, 50, 1000)

# A test of what users run asks for the fixture `as_users_run_it`.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    group = parser.getgroup("samples", "what `helpers.sample` draws from the cross products")
    seed, count = os.environ.get("TFGRAD_SEED") or 0, os.environ.get("TFGRAD_COUNT") or 1
    group.addoption("--seed", type=int, default=int(seed), help="draw others, as at night")
    group.addoption("--count", type=float, default=float(count), help="draw so many times as many")


def compile_quickly(config):
    """Keep what is compiled for the next run, and for the processes that tests start."""
    # JAX reads the flags at the first array.
    os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"
    if not hasattr(config, "cache"):  # with `-p no:cacheprovider`
        return
    # The environment is for other processes, `jax.config` for this one.
    folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the workers of xdist have the environment from here
        compile_quickly(config)
    # Parametrized tests draw while pytest imports them, and so does each worker of xdist.
    os.environ["TFGRAD_SEED"] = str(config.getoption("seed"))
    os.environ["TFGRAD_COUNT"] = str(config.getoption("count"))


def pytest_report_header(config):
    return f"samples: --seed {config.getoption('seed')} --count {config.getoption('count'):g}"


@pytest.fixture
def as_users_run_it():
    """Let ranks and dtypes be promoted, as JAX does by default."""
    with helpers.as_users_run_it():
        yield


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
        for case in helpers.sample(sorted(cases, key=lambda case: case.nodeid), size)
    }
    left = [i for i in items if i.get_closest_marker("sampled") and id(i) not in drawn]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)
