"""The benchmarks run, and what they count is equal: nothing here looks at a clock.

A compiled gradient of a workload written with the decorator is the program of the hand-written
rule: the same floating-point operations, memory traffic and temporary memory, in every mode.
"""

import pytest
from support.helpers import sample

from benchmarks import layers, report, rules, tiny
from benchmarks import workload as w
from benchmarks.results import OURS
from benchmarks.ways import EVERY, HAND, JVP

WORKLOADS = {each.name: each for each in rules.WORKLOADS}
TINY = {
    f"{each.section}, {each.name}": each
    for each in tiny.OVERHEAD + tiny.GROWTH + tiny.NESTS + layers.LAYERS
}
SAME = [("grad", OURS, HAND, name) for name in WORKLOADS]
SAME += [("jvp", OURS, JVP, name) for name in WORKLOADS]


# Pages, examples and benchmarks write `x @ w + b`, as everyone does.
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def counts(name, way, mode="grad"):
    return w.counts(WORKLOADS[name], way, WORKLOADS[name].sizes[0], mode)


@pytest.mark.parametrize(("mode", "ours", "hand", "name"), sample(SAME, 3))
def test_compiled_derivative_costs_what_the_hand_written_one_does(mode, ours, hand, name):
    expected = counts(name, hand, mode)
    assert expected["flops"] > 0 and expected["bytes accessed"] > 0
    assert counts(name, ours, mode) == expected


def test_second_order_costs_no_more_than_the_hand_written_one():
    got, by_hand = (counts("RMSNorm", way, "second order") for way in (OURS, EVERY))
    assert all(got[what] <= by_hand[what] for what in w.COUNTS)


@pytest.mark.parametrize("name", sample(TINY, 2))
def test_contestants_agree(name):
    errors = w.check(TINY[name])
    assert errors[OURS] < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("name", WORKLOADS)
def test_contestants_agree_on_workloads(name):
    errors = w.check(WORKLOADS[name])
    assert errors[OURS] < w.TOLERANCE and errors[HAND] < w.TOLERANCE


@pytest.mark.docs
def test_the_page_has_the_numbers_of_the_newest_jax():
    run = report.newest(report.RESULTS)
    text = report.PAGE.read_text()
    assert "| eager gradient |" in text
    assert report.page(run, text) == text
    assert report.targets([run], unmeasured=False) in (report.RESULTS / "README.md").read_text()
