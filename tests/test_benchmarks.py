"""The benchmarks run, and what they count is equal: nothing here looks at a clock.

A compiled gradient of a workload written with the decorator is the program of the hand-written
rule: the same floating-point operations, memory traffic and temporary memory, in every mode.
"""

import dataclasses
import itertools
import json
import re

import jax
import pytest
from support.helpers import sample

from benchmarks import compare, layers, report, rules, tiny
from benchmarks import workload as w
from benchmarks.__main__ import main, parts
from benchmarks.results import OURS, Group, Results
from benchmarks.timing import CONTROL
from benchmarks.ways import EVERY, HAND, JVP, PLAIN

WORKLOADS = {each.name: each for each in rules.WORKLOADS}
TINY = {
    f"{each.section}, {each.name}": each for each in tiny.OVERHEAD + tiny.GROWTH + layers.LAYERS
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
    assert "| chained calls | trace grad at 4 |" in capsys.readouterr().out


def test_all_that_has_a_target_is_measured():
    """By the name of a part, which is the name of a group."""
    run = Results.here(quick=True)
    for name in parts("cpu"):
        section, case, measure = name.split("/")
        how, _, mode = measure.partition(" ")
        named = [measure]
        if section == "growth":
            sizes = layers.SIZES if case.startswith(layers.PREFIX) else ()
            named = [*(f"{measure} at {n}" for n in sizes), f"{measure}, slope"]
        elif how == "program":
            named = [f"{count}, {mode}" for count in w.COUNTS]
        values = dict.fromkeys((OURS, PLAIN, HAND, EVERY, JVP), 1.0)
        run.groups += [Group(section, case, each, "s", values) for each in named]
    lines = list(report.lines(run))
    assert len(lines) > 30 and all(line.measured == 1 for line in lines)


def test_models_of_many_layers_have_targets_and_a_table():
    run = Results.here(quick=True)
    for case, what, n in itertools.product(("nnx", "nnx, declared"), layers.MEASURES, layers.SIZES):
        values = {OURS: n * 3.0, PLAIN: n * 1.0, EVERY: n * 1.5}
        run.groups.append(Group("growth", layers.PREFIX + case, f"{what} at {n}", "s", values))
    page = report.page(run, "<!-- layers: begin -->\n<!-- layers: end -->")
    assert "| nnx | eager grad | 3.00 → 3.00 | 3.00 → 3.00 | 1.50 → 1.50 |" in page
    missed = {line.what: line.missed for line in report.lines(run) if line.measured}
    assert missed["eager grad, 64 layers of nnx, declared"]  # 3 > 2.2
    assert missed["trace grad, 64 to 8 layers, undeclared, worst library"] is False


@pytest.mark.docs
def test_page_and_chart_have_the_numbers_of_the_newest_jax():
    run = report.newest(report.RESULTS)
    text = report.PAGE.read_text()
    assert "| eager gradient |" in text
    assert report.page(run, text) == text
    chart = (report.RESULTS / "glance.svg").read_text()
    assert chart == report.chart(run)
    ratio = run.ratio("overhead", "declared variables", "eager grad", EVERY)
    assert re.findall(r">([\d.]+)x<", chart)[-1] == f"{ratio:.2f}"


def a_run(ratio, temp=100.0, spread=0.01):
    results = Results.here(quick=True)
    values = {OURS: ratio, JVP: 1.0}
    ratios = {JVP: ratio, CONTROL: 1.0}
    quartiles = {name: (r - spread, r + spread) for name, r in ratios.items()}
    fields = {"ratios": ratios, "ratio_quartiles": quartiles, "samples": 100}
    programs = {OURS: temp, HAND: 100.0}
    results.groups += [
        Group("overhead", "inputs only", "eager jvp", "s", values, **fields),
        Group("workloads", "RMSNorm", "temp memory, grad", "bytes", programs),
    ]
    return results


def test_compare_says_what_moved(tmp_path, capsys):
    runs = {"old": a_run(1.0), "same": a_run(1.02), "worse": a_run(1.2, temp=90.0)}
    runs["noisy"] = a_run(1.2, spread=0.9)
    for name, results in runs.items():
        results.save(tmp_path / name)
    names = [str(tmp_path / name) for name in runs]
    assert compare.main([names[0], names[1]]) == 0
    assert compare.main([names[0], names[3]]) == 0
    capsys.readouterr()
    assert compare.main([names[0], names[2]]) == 1
    worse, better = capsys.readouterr().out.split("better: 1")
    assert "worse: 1" in worse and "+20.0 %" in worse and f"eager jvp / {JVP}" in worse
    assert "-10.0 %" in better and "temp memory" in better
