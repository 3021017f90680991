"""The benchmarks run, and what they count is equal: nothing here looks at a clock.

A compiled gradient of a workload written with the decorator is the program of the hand-written
rule: the same floating-point operations, memory traffic and temporary memory, in every mode.
"""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lowered_for_gpu

from benchmarks import child, compare, frameworks, networks, report, rules, tiny
from benchmarks import workload as w
from benchmarks.__main__ import main
from benchmarks.results import OURS, Group, Results
from benchmarks.timing import CONTROL, race
from benchmarks.ways import EVERY, HAND, JVP, PLAIN, TRANSPOSED, Way

pytestmark = pytest.mark.deep

WORKLOADS = {each.name: each for each in networks.WORKLOADS}
TINY = {f"{each.section}, {each.name}": each for each in (*tiny.OVERHEAD, *tiny.GROWTH)}


@pytest.fixture(autouse=True)
def lenient():
    """The benchmarks measure code as people write it, who add a bias to a matrix."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def counts(name, way, mode="grad"):
    return w.counts(WORKLOADS[name], way, WORKLOADS[name].sizes[0], mode)


@pytest.mark.parametrize("name", WORKLOADS)
def test_compiled_gradient_costs_what_the_hand_written_one_does(name):
    expected = counts(name, HAND)
    assert expected["flops"] > 0 and expected["bytes accessed"] > 0
    assert counts(name, OURS) == expected


@pytest.mark.parametrize("name", ["RMSNorm", "cross-entropy", "implicit layer"])
def test_forward_mode_costs_what_the_hand_written_one_does(name):
    assert counts(name, OURS, "jvp") == counts(name, JVP, "jvp")


@pytest.mark.parametrize("name", ["RMSNorm", "cross-entropy"])
def test_second_order_costs_no_more_than_by_hand(name):
    got, by_hand = (counts(name, way, "second order") for way in (OURS, EVERY))
    assert all(got[what] <= by_hand[what] for what in w.COUNTS)


# JAX 0.12 advises against Triton, the one backend for GPUs that lowers without one.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_kernels_lower_for_gpu(monkeypatch):
    """At the sizes of an accelerator, by Triton: two kernels, as by hand."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    workload = WORKLOADS["Pallas kernel pair"]
    args = jax.eval_shape(lambda: workload.arguments(workload.sizes[-1], jnp.float32))
    for way in (HAND, OURS):
        program = lowered_for_gpu(workload.function("grad", way, workload.sizes[-1]), *args)
        assert program.count("stablehlo.custom_call") == program.count("xla.gpu.triton") == 2


def test_counts_tell_programs_apart():
    plain, hand = (counts("implicit layer", way) for way in (PLAIN, HAND))
    assert plain["temp memory"] > 10 * hand["temp memory"]


@pytest.mark.parametrize("name", TINY)
def test_contestants_agree(name):
    errors = w.check(TINY[name])
    assert errors[OURS] < 1e-12
    assert jax.config.jax_enable_x64 is False


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_contestants_agree_on_workloads(name):
    errors = w.check(WORKLOADS[name])
    assert errors[OURS] < w.TOLERANCE and errors[HAND] < w.TOLERANCE


def test_check_refuses_wrong_rule():
    def twice_too_large(residuals, dy):
        return tuple(2 * g for g in rules.RMSNORM.backward(residuals, dy))

    right = WORKLOADS["RMSNorm"]
    wrong = Way(OURS)(dataclasses.replace(rules.RMSNORM, backward=twice_too_large))
    rule = dataclasses.replace(rules.RMSNORM, written={OURS: wrong})
    workload = dataclasses.replace(
        right, loss=lambda way, size: lambda params, t: (way(rule)(*params) * t).sum()
    )
    with pytest.raises(AssertionError, match=r"RMSNorm, grad, tfgrad_jax: error 1\.0e\+00"):
        w.check(workload)
    assert jax.config.jax_enable_x64 is False


def test_derivatives_are_those_of_a_cubic():
    f, x = (lambda x: (x**3).sum()), jnp.array([2.0, 3.0])
    value, slope = w.derivative("grad", f)(x)
    assert value == 35 and slope.tolist() == [12, 27]
    assert w.derivative("second order", f)(x).tolist() == [12, 18]
    assert w.derivative("jvp", f)(x) == (35, 12 * 2 + 27 * 3)
    assert w.derivative("hessian", f)(x).tolist() == [[12, 0], [0, 18]]


def test_transposed_rule_is_the_tangent():
    x, t = jnp.float32(0.3), jnp.float32(2)
    expected = jax.jvp(jnp.logaddexp, (x, jnp.float32(0)), (t, jnp.float32(0)))
    for way in (JVP, TRANSPOSED, OURS):
        got = jax.jvp(Way(way)(tiny.LOG1PEXP), (x,), (t,))
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_gpt_has_the_parameters_of_gpt_2_small():
    params, *_ = jax.eval_shape(lambda: networks.GPT.arguments(networks.WHOLE, jnp.float32))
    assert sum(p.size for p in jax.tree.leaves(params)) == pytest.approx(124e6, rel=0.01)


@pytest.mark.slow
def test_largest_batch_is_larger_with_custom_gradients():
    (group,) = networks.largest_batch("toy")
    assert group.values[OURS] > group.values[PLAIN] > 0


# --- the table ------------------------------------------------------------------------------------


def test_quick_run_writes_json_and_report_draws_it(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert main(["--quick", "--only", "growth/chained", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith(f"-jax{jax.__version__}")
    data = json.loads(path.read_text())
    assert data["meta"]["quick"] is True
    measures = [
        f"{kind} grad{at}" for kind in ("trace", "eager") for at in (" at 1", " at 4", ", slope")
    ]
    assert [g["measure"] for g in data["groups"]] == ["error in float64", *measures]
    first = Results.load(path).groups[1]
    low, high = first.quartiles[OURS]
    assert 0 < low <= first.values[OURS] <= high
    assert first.ratios.keys() == {EVERY, CONTROL}
    printed = capsys.readouterr().out
    assert "| chained calls | trace grad at 4 |" in printed
    assert "growth with chained calls, trace grad" in printed  # the table of targets
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.main() == 0
    assert "chained calls" in (tmp_path / f"{path.stem}-growth.svg").read_text()
    table = (tmp_path / "README.md").read_text()
    assert f"![{path.stem}-growth]" in table
    assert "| eager jvp, inputs only | hand-written custom_jvp | 3.00x | not measured |" in table


def test_the_page_on_performance_has_the_numbers_of_the_run_that_its_chart_shows():
    found = [Results.load(path) for path in sorted(report.RESULTS.glob("*.json"))]
    text = report.PAGE.read_text()
    assert "| eager gradient |" in text
    assert report.page(report.shown(report.ordered(found)), text) == text


def test_only_keeps_what_was_measured_before(tmp_path):
    pytest.importorskip("tqdm")  # the ends of the JAX range are tested without it
    results = Results.here(quick=True)
    results.add([Group("growth", "leaves", "x", "s", {OURS: 1.0, HAND: 2.0})])
    results.save(tmp_path / f"{results.name}.json")
    assert main(["--quick", "--only", "growth/nested", "--out", str(tmp_path)]) == 0
    kept = Results.load(tmp_path / f"{results.name}.json")
    assert kept.ratio("growth", "leaves", "x", HAND) == 0.5
    assert kept.find("growth", "nested calls", "trace grad at 4")


def test_part_that_fails_does_not_end_the_run(monkeypatch, capsys):
    pytest.importorskip("tqdm")  # the ends of the JAX range are tested without it

    def fail(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr("benchmarks.frameworks.measure", fail)
    assert main(["--quick", "--only", "frameworks"]) == 1
    assert "frameworks/log1pexp failed: ValueError: no such thing" in capsys.readouterr().err


def test_unknown_part_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "--only", "no such part"])
    assert "no such part" in capsys.readouterr().err


def test_list_names_all_sections(capsys):
    assert main(["--list"]) == 0
    sections = [line.partition("/")[0] for line in capsys.readouterr().out.split("\n") if line]
    assert list(dict.fromkeys(sections)) == [
        "overhead", "growth", "workloads", "checks", "distributed", "frameworks",
    ]  # fmt: skip


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


def test_missed_target_is_bold_with_its_experiment():
    text = "\n".join(report.targets([a_run(2.5), a_run(5.0, temp=101.0)]))
    assert "| 3.00x | 2.50x | **5.00x** |" in text
    assert "- *eager jvp, inputs only*: the rule is traced" in text
    assert "| 1.00x | 1.00x | **1.01x** |" in text
    assert "- *compiled grad: temp memory*: worst of 1: RMSNorm; no experiment yet." in text
    assert report.same_programs(a_run(1.0)) == (1, 1)
    assert report.same_programs(a_run(1.0, temp=101.0)) == (0, 1)


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


def test_glance_draws_what_is_measured_and_its_texts_fit():
    pytest.importorskip("matplotlib")  # the ends of the JAX range are tested without it
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from benchmarks import figures

    results = Results.here(quick=True)
    assert figures.glance(results) is None
    results = a_run(2.5)
    assert len(figures.glance(results).axes) == 1
    programs = {OURS: 90e6, PLAIN: 100e6, HAND: 90e6}
    results.add([Group("workloads", "RMSNorm", "temp memory, grad", "bytes", programs)])
    batches = {PLAIN: 7.0, OURS: 11.0}
    results.add([Group("workloads", "GPT-2", "largest batch", "sequences", batches)])
    with figures.mpl.rc_context(figures.STYLE):
        figure = figures.glance(results)
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == 3
    for axes in figure.axes:
        edge = axes.get_window_extent().x1
        assert all(text.get_window_extent().x1 <= edge for text in axes.texts)


# --- timing ---------------------------------------------------------------------------------------


def test_race_reports_who_cannot_run():
    def fails():
        raise TypeError("no such thing\nand more")

    calls = []
    contestants = {OURS: lambda: jnp.zeros(()), HAND: lambda: calls.append(1), PLAIN: fails}
    measured = race(contestants, OURS, "cpu", rounds=3)
    assert measured["failures"] == {PLAIN: "TypeError: no such thing"}
    assert measured["values"].keys() == measured["quartiles"].keys() == {OURS, HAND, CONTROL}
    assert measured["ratios"].keys() == {HAND, CONTROL}
    low, high = measured["quartiles"][OURS]
    assert measured["samples"] == 3 and low <= measured["values"][OURS] <= high
    assert len(calls) >= 2 + 3  # a warm-up, one to size the samples, and the three
    with pytest.raises(TypeError, match="no such thing"):
        race({OURS: fails}, OURS, "cpu")


# --- other processes, other frameworks ------------------------------------------------------------


def test_collectives_are_counted_in_bytes():
    text = """
      %a = f32[8,4]{1,0} all-reduce(f32[8,4]{1,0} %x), replica_groups={{0,1}}
      %b = (bf16[3]{0}, pred[]) all-reduce-start(%y, %z), channel_id=1
      %c = f32[2]{0} add(%p, %q)
    """
    assert child.collectives(text) == [8 * 4 * 4, 3 * 2 + 1]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_step_on_two_devices_moves_what_the_hand_written_one_does(processes):
    found = {g.measure: g.values for g in child.distributed(2, processes, "toy")}
    for measure in ("collectives", "moved", "temp memory"):
        assert found[measure][OURS] == found[measure][HAND] > 0


@pytest.mark.slow
def test_checks_report_time_and_memory():
    time, memory = child.checks("toy")
    assert {child.GRADIENT, child.AUTODIFF, child.CHECK} <= time.values.keys()
    assert memory.values[child.CHECK] > 0


def test_other_frameworks_are_optional():
    (group,) = frameworks.measure("toy")
    assert frameworks.OURS_JIT in group.values
    for framework, module in {"tensorflow": "tensorflow", "torch": "torch"}.items():
        if importlib.util.find_spec(module) is None:
            assert group.failures[framework].startswith("not measured: No module named")
