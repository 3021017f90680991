"""No right rule fails, in any form, with any seed; no planted mistake passes."""

import pytest
from checking import MISTAKES, Draw, precision, wrong
from helpers import sample
from right_forms import RIGHT
from right_rules import RULES

from tfgrad_jax.testing import check_gradient

PRECISIONS = ("float32", "float64")
SEEDS = range(2, 10_000)


def check(build, seed, dtype, **options):
    h, args, *kwargs = build(Draw(seed, dtype))
    options = {"transforms": False, **options, "kwargs": kwargs[0] if kwargs else None}
    with precision(dtype):
        return check_gradient(h, *args, seed=seed, **options)


@pytest.mark.parametrize("name", RULES)
def test_no_rule_of_the_literature_is_blamed(name):
    for seed in (0, *sample(SEEDS, 1)):
        report = check(RULES[name], seed, "float32")
        assert report.ok and len(report.points) >= (3 if seed == 0 else 1), (seed, report)


# In float32 the judges are in float64 as well, so that one precision shows nearly everything.
@pytest.mark.parametrize("name", RIGHT)
def test_no_right_form_is_blamed(name):
    for seed, dtype in ((0, "float32"), *sample([(s, "float64") for s in SEEDS], 1)):
        with precision(dtype):
            report = check(RIGHT[name], seed, dtype)
        assert report.ok, (seed, report)


@pytest.mark.parametrize("name", ["dense", "layer_of_pytree", "product", "complex_square"])
def test_no_right_form_is_blamed_with_every_check(name):
    report = check(RIGHT[name], 0, "float32", order=2, full=True, transforms=True)
    assert report.ok, report


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", MISTAKES)
def test_every_planted_mistake_is_found_and_named(name, dtype):
    for seed in (0, *sample(SEEDS, 2)):
        with precision(dtype):
            h, args, notes = wrong(name, Draw(seed, dtype))
            report = check_gradient(h, *args, seed=seed, transforms=False)
        assert not report.ok, (seed, report)
        assert tuple(row.note for row in report.rows) == notes, (seed, report)
        assert notes or "did you forget to sum over axis 0" in report.facts[0].text
