"""Random programs against an oracle that takes only pytrees from JAX: see `random_programs`.

A red one shows its program. `--seed` draws others, `--count` more; the night runs 2,000.
"""

import os
import re

import jax
import pytest
from limits import LIMITS
from random_programs import DisagreementError, check, program, undecorated
from support.helpers import drops_in_scan

# Some read a value in the rule alone, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*which only its rule reads")

FIRST = 1000 * int(os.environ.get("TFGRAD_SEED", 0))
COUNT = round(25 * float(os.environ.get("TFGRAD_COUNT", 1)))


def smallest(count):
    """Return the seeds of the smallest of four times as many programs: they compile soon."""
    seeds = range(FIRST, FIRST + 4 * count)
    return sorted(seeds, key=lambda seed: program(seed).size)[:count]


@pytest.fixture(autouse=True)
def promotion():
    """Programs mix NumPy's constants and JAX's arrays, all of one dtype."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def skip_if_a_limit(error, features):
    if {"recursion", "state"} <= features and isinstance(error, RecursionError):
        pytest.skip("a rule that is recorded, for its log holds a tracer, and calls itself")
    if drops_in_scan() and isinstance(error, NotImplementedError) and "scan" in str(features):
        pytest.skip("JAX drops the custom_jvp of an operator in a scan: see `orders of a scan`")
    if isinstance(error, TypeError) and "may stand for one array or for several" in str(error):
        pytest.skip("a list that can be read in two ways: of arrays, or with an omitted default")
    names = ["orders of a scan"]
    if {"rule: outside of JAX", "protocol: autodiff"} <= features:
        names.append("operators and unused outputs")
    for name in names:
        limit = LIMITS[name]
        of_it = isinstance(error, limit.error) and re.search(limit.message, str(error))
        if limit.applies() and of_it:
            pytest.skip(f"a limit: {name}")


def seeds(count, first, nightly):
    """Return seeds of small programs, and for the night those of many others."""
    night = range(FIRST + first, FIRST + first + nightly)
    return smallest(count) + [pytest.param(seed, marks=pytest.mark.nightly) for seed in night]


@pytest.mark.parametrize("seed", seeds(COUNT, first=10_000, nightly=2_000))
def test_a_random_program_has_the_derivatives_of_the_oracle(seed):
    p = program(seed)
    try:
        check(p)
    except Exception as error:
        skip_if_a_limit(error, p.features)
        raise


def test_the_oracle_notices_a_wrong_derivative():
    """Without their rules, most programs have another derivative."""
    wrong = 0
    for seed in smallest(6):
        try:
            check(program(seed), undecorated)
        except DisagreementError:
            wrong += 1
    assert wrong >= 4
