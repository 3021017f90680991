"""No right rule fails, in any form, with any seed; no planted mistake passes."""

import pytest
from right_forms import RIGHT
from right_rules import RULES
from rule_cases import MISTAKES, PRECISIONS, Draw, precision

from tfgrad_jax.testing import check_gradient

pytestmark = pytest.mark.slow


def check(build, seed, dtype, **options):
    h, args, *kwargs = build(Draw(seed, dtype))
    return check_gradient(h, *args, kwargs=kwargs[0] if kwargs else None, seed=seed, **options)


def assert_found(name, seed, dtype):
    build, notes = MISTAKES[name]
    report = check(build, seed, dtype, transforms=False)
    assert not report.ok, (name, seed, dtype, report)
    assert tuple(row.note for row in report.rows) == notes, (seed, dtype, report)
    if not notes:
        assert "did you forget to sum over axis 0" in report.facts[0].text


# In float32 the judges are in float64 as well, so that one precision shows nearly everything.
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name, dtype):
    with precision(dtype):
        report = check(RIGHT[name], 0, dtype, transforms=False)
        assert report.ok, report


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("layer_of_pytree", "product") else pytest.mark.slow)
        for n in RIGHT
    ],
)
def test_no_false_alarm_with_every_check(name):
    report = check(RIGHT[name], 0, "float32", order=2, full=True)
    assert report.ok, report


def blamed(name, seeds):
    """Return the seeds for which a right rule from the literature fails, with the reports."""
    reports = {seed: check(RULES[name], seed, "float32", transforms=False) for seed in seeds}
    assert all(len(report.points) == 3 for report in reports.values())
    return {seed: report for seed, report in reports.items() if not report.ok}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_no_rule_of_the_literature_is_blamed(name):
    assert blamed(name, range(2)) == {}


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RULES)
def test_no_rule_of_the_literature_is_blamed_over_many_seeds(name):
    assert blamed(name, range(200)) == {}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", MISTAKES)
def test_no_miss(name, dtype):
    with precision(dtype):
        for seed in range(3):
            assert_found(name, seed, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm_over_many_seeds(name, dtype):
    with precision(dtype):
        for seed in range(200):
            report = check(RIGHT[name], seed, dtype, transforms=False)
            assert report.ok, (seed, report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", MISTAKES)
def test_no_miss_over_many_seeds(name, dtype):
    with precision(dtype):
        for seed in range(200):
            assert_found(name, seed, dtype)
