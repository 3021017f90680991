"""Random programs against an oracle that knows neither JAX nor tfgrad_jax: see `random_programs`.

`python -m tests.random_programs --count 2000` runs more of them.
"""

import re

import jax
import pytest
from limits import LIMITS
from random_programs import DisagreementError, check, program, undecorated

pytestmark = pytest.mark.deep


def smallest(seeds, count, **kwargs):
    """Return the seeds of the smallest of these programs: they are compiled soon."""
    return sorted(seeds, key=lambda seed: program(seed, **kwargs).size)[:count]


@pytest.fixture(autouse=True)
def promotion():
    """Programs mix NumPy's constants and JAX's arrays, all of one dtype."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("seed", smallest(range(300), 40))
def test_random_program(seed):
    check(program(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 10_300))
def test_many_random_programs(seed):
    try:
        check(program(seed))
    except Exception as error:
        for name in ("orders of a scan", "recursion through an object"):
            limit = LIMITS[name]
            refused = isinstance(error, limit.error) and re.search(limit.message, str(error))
            if refused and limit.applies():
                pytest.skip(f"a limit: {limit.sentence}")
        raise


# --- the oracle itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", smallest(range(100), 6, exact=True))
def test_the_oracle_agrees_with_jax_on_true_derivatives(seed):
    """Functions whose rules are their true derivatives, without a decorator."""
    check(program(seed, exact=True), undecorated)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20_000, 20_100))
def test_the_oracle_agrees_with_jax_on_many_true_derivatives(seed):
    check(program(seed, exact=True), undecorated)


def test_a_wrong_derivative_is_noticed():
    """Without their rules, most programs have another derivative."""
    wrong = 0
    for seed in smallest(range(300), 6):
        try:
            check(program(seed), undecorated)
        except DisagreementError:
            wrong += 1
    assert wrong >= 5
