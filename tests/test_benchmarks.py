"""The benchmarks run, and what they count is equal: nothing here looks at a clock.

A compiled gradient of a workload written with the decorator is the program of the hand-written
rule: the same floating-point operations, memory traffic and temporary memory, in every mode.
"""

import dataclasses
import json

import jax
import pytest
from support.helpers import sample

from benchmarks import layers, report, rules, tiny
from benchmarks import workload as w
from benchmarks.__main__ import main
from benchmarks.results import OURS, Results
from benchmarks.timing import CONTROL
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


def test_below_a_checkpoint_too():
    def loss(way, size):
        h = jax.checkpoint(way(rules.RMSNORM))
        return lambda params, t: (h(*params) * t).sum()

    below = dataclasses.replace(WORKLOADS["RMSNorm"], loss=loss)
    ours, by_hand = (w.counts(below, way, below.sizes[0]) for way in (OURS, HAND))
    assert ours == by_hand


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


@pytest.mark.nightly
def test_a_part_of_a_quick_run_writes_json_where_it_is_told_to(tmp_path, capsys):
    assert main(["--quick", "--only", "growth/chained", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["meta"]["quick"] is True
    first = Results.load(path).groups[0]
    low, high = first.ratio_quartiles[EVERY]
    assert 0 < low <= first.ratios[EVERY] <= high
    assert first.ratios.keys() == {EVERY, CONTROL}
    assert "| slope of trace grad with chained calls |" in capsys.readouterr().out


@pytest.mark.docs
def test_the_page_has_the_numbers_of_the_newest_jax():
    run = report.newest(report.RESULTS)
    text = report.PAGE.read_text()
    assert "| eager gradient |" in text
    assert report.page(run, text) == text
    assert report.targets([run], unmeasured=False) in (report.RESULTS / "README.md").read_text()


def test_without_a_gpu_the_command_says_what_it_would_do(capsys):
    assert main(["--gpu"]) == 0
    said = capsys.readouterr().out
    assert "JAX finds no GPU here" in said and "(65536, 4096)" in said
    assert "workloads/RMSNorm/run grad" in said and "growth" not in said
