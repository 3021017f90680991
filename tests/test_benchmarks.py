"""The benchmarks run, and what they count is equal: nothing here looks at a clock.

A compiled gradient of a workload written with the decorator is the program of the hand-written
rule: the same floating-point operations, memory traffic and temporary memory, in every mode.
"""

import itertools
import json

import jax
import pytest
from support.helpers import sample

from benchmarks import compare, figures, layers, networks, report, tiny
from benchmarks import workload as w
from benchmarks.__main__ import main
from benchmarks.results import OURS, Group, Results
from benchmarks.timing import CONTROL
from benchmarks.ways import BOTH, EVERY, HAND, HAND_BOTH, JVP, PLAIN

WORKLOADS = {each.name: each for each in networks.WORKLOADS}
TINY = {
    f"{each.section}, {each.name}": each for each in tiny.OVERHEAD + tiny.GROWTH + layers.LAYERS
}
SAME = [("grad", OURS, HAND, name) for name in WORKLOADS]
SAME += [("grad", BOTH, HAND_BOTH, "GPT-2 training step")]
SAME += [("jvp", OURS, JVP, name) for name in ("RMSNorm", "cross-entropy", "implicit layer")]


@pytest.fixture(autouse=True)
def lenient():
    """The benchmarks measure code as people write it, who add a bias to a matrix."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


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


@pytest.mark.nightly
def test_quick_run_writes_json_and_report_draws_it(tmp_path, capsys, monkeypatch):
    assert main(["--quick", "--only", "growth/chained", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    data = json.loads(path.read_text())
    assert data["meta"]["quick"] is True
    first = Results.load(path).groups[1]
    low, high = first.quartiles[OURS]
    assert 0 < low <= first.values[OURS] <= high
    assert first.ratios.keys() == {EVERY, CONTROL}
    assert "| chained calls | trace grad at 4 |" in capsys.readouterr().out
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.main() == 0
    assert "chained calls" in (tmp_path / f"{path.stem}-growth.svg").read_text()
    table = (tmp_path / "README.md").read_text()
    assert f"![{path.stem}-growth]" in table
    assert "| trace jvp, inputs only | hand-written custom_jvp | 1.05x | not measured |" in table


def test_models_of_many_layers_have_targets_a_table_and_a_figure(tmp_path):
    run = Results.here(quick=True)
    for case, what, n in itertools.product(("nnx", "nnx, declared"), layers.MEASURES, layers.SIZES):
        values = {OURS: n * 3.0, PLAIN: n * 1.0, EVERY: n * 1.5}
        run.add([Group("growth", layers.PREFIX + case, f"{what} at {n}", "s", values)])
    page = report.page(run, "<!-- layers: begin -->\n<!-- layers: end -->")
    assert "| nnx | eager grad | 3.00 | 3.00 | 3.00 | 3.00 |" in page
    missed = {line.what: line.missed for line in report.lines(run) if line.measured}
    assert missed["eager grad, 64 layers of nnx, declared"]  # 3 > 2
    assert missed["trace grad, 64 layers of nnx"] is False  # 3 < 4
    (axes, *_) = figures.layers(run).axes
    drawn = [[float(y) for y in line.get_ydata()] for line in axes.lines[:3]]
    assert drawn == [[3.0] * 4, [3.0] * 4, [1.5] * 4]  # ours twice, and the hand-written rule


@pytest.mark.docs
def test_the_page_on_performance_has_the_numbers_of_the_run_that_its_chart_shows():
    found = [Results.load(path) for path in sorted(report.RESULTS.glob("*.json"))]
    text = report.PAGE.read_text()
    assert "| eager gradient |" in text
    assert report.page(report.shown(report.ordered(found)), text) == text


def a_run(ratio, temp=100.0, spread=0.01):
    results = Results.here(quick=True)
    values = {OURS: ratio, JVP: 1.0}
    ratios = {JVP: ratio, CONTROL: 1.0}
    quartiles = {name: (r - spread, r + spread) for name, r in ratios.items()}
    fields = {"ratios": ratios, "ratio_quartiles": quartiles, "samples": 100}
    results.add([Group("overhead", "inputs only", "eager jvp", "s", values, **fields)])
    programs = {OURS: temp, HAND: 100.0}
    results.add([Group("workloads", "RMSNorm", "temp memory, grad", "bytes", programs)])
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
