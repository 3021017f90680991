"""The benchmarks run, and what they count is equal: nothing here looks at a clock.

A compiled gradient of a workload written with the decorator is the program of the hand-written
`jax.custom_vjp`: the same floating-point operations, memory traffic and temporary memory.
"""

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import frameworks, overhead, work
from benchmarks.__main__ import main
from benchmarks.programs import analyze
from benchmarks.results import (
    HAND,
    HAND_EVERY_ORDER,
    JAX_CUSTOM_GRADIENT,
    OURS,
    OURS_FORWARD,
    PLAIN,
    Group,
    Results,
)
from benchmarks.settings import Settings
from benchmarks.timing import Stats, Timed, compare
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.common import with_ours
from tfgrad_jax._compat import SYSTEM_LOSES_ZEROS

# The depths of the reversible stack are one workload at this size.
NAMES = [n for n in WORKLOADS if not n.startswith("reversible") or n.endswith("depth 4")]
# A Pallas kernel has no transpose. On JAX 0.6, where `_system.py` has no part, transposing a rule
# twice gives `a + (-b)` for `a - b`, and a scan that stores for one that recomputes.
SAME_IN_FORWARD_MODE = [n for n in NAMES if "Pallas" not in n]
if SYSTEM_LOSES_ZEROS:
    SAME_IN_FORWARD_MODE = [
        "log1pexp", "linear + cross-entropy", "fixed-point layer", "digits training step",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def lenient():
    """The benchmarks measure code as people write it, who add a bias to a matrix."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def counts(name, way):
    workload = WORKLOADS[name]
    return analyze(workload.gradient(way), workload.arguments("tiny", jnp.float32)).counts


@pytest.mark.parametrize("name", NAMES)
def test_compiled_gradient_costs_what_the_hand_written_one_does(name):
    expected = counts(name, HAND)
    assert expected["flops"] > 0 and expected["bytes accessed"] > 0
    assert counts(name, OURS) == expected


@pytest.mark.parametrize("name", SAME_IN_FORWARD_MODE)
def test_compiled_gradient_costs_the_same_in_forward_mode(name):
    expected, got = counts(name, HAND), counts(name, OURS_FORWARD)
    if name == "fixed-point layer" and got["temp memory"] < expected["temp memory"]:
        got["temp memory"] = expected["temp memory"]  # XLA of JAX 0.10 packs this one more tightly
    assert got == expected


def test_counts_tell_programs_apart():
    plain, hand = (counts("reversible stack, depth 4", way) for way in (PLAIN, HAND))
    assert plain["temp memory"] > 2 * hand["temp memory"]


def test_reversible_memory_does_not_grow_with_depth():
    temps = {}
    for depth in (4, 16):
        workload = WORKLOADS[f"reversible stack, depth {depth}"]
        a, b, w = workload.arguments("tiny", jnp.float32)
        args = a, b, jnp.concatenate([w] * (depth // 4))
        for way in (PLAIN, OURS):
            temps[way, depth] = analyze(workload.gradient(way), args).temp_bytes
    assert temps[PLAIN, 16] - temps[PLAIN, 4] >= 12 * 4 * a.nbytes
    assert temps[OURS, 16] - temps[OURS, 4] < a.nbytes


def test_check_passes_right_rule_and_refuses_wrong_one():
    workload = WORKLOADS["log1pexp"]
    errors, failures = work.check(workload)
    assert errors[OURS] < 1e-15 and errors[OURS_FORWARD] < 1e-15 and not failures

    def forward(x):
        return jnp.log(1 + jnp.exp(x)), x

    def twice_too_large(x, dy):
        return (2 * dy * jax.nn.sigmoid(x),)

    wrong = with_ours(forward, twice_too_large)
    losses = {**workload.losses, OURS: lambda x: wrong(x).sum()}
    with pytest.raises(AssertionError, match=r"log1pexp, tfgrad_jax: error 1\.0e\+00"):
        work.check(workload._replace(losses=losses))
    assert jax.config.jax_enable_x64 is False


@pytest.mark.parametrize("name", overhead.CASES)
def test_overhead_compares_one_function_with_one_gradient(name):
    case = overhead.CASES[name]()
    overhead.check(case, case.functions)
    f = case.functions[OURS]
    twice = {**case.functions, "twice": lambda *args: 2 * f(*args)}
    with pytest.raises(AssertionError, match="twice"):
        overhead.check(case, twice)


@pytest.mark.slow
def test_overhead_says_which_peer_cannot_run(monkeypatch):
    monkeypatch.setattr(overhead, "MEASURES", ("eager forward", "jitted grad"))
    run = overhead.measure("3 static arguments", overhead.three_statics, Settings(quick=True))
    for group in run:
        assert group.failures[JAX_CUSTOM_GRADIENT].startswith("TypeError: ")
        assert OURS in group.values and HAND in group.ratios


def test_other_frameworks_are_optional():
    (group,) = frameworks.measure("log1pexp", Settings(quick=True))
    assert frameworks.OURS_JIT in group.values
    for framework, module in {"TensorFlow": "tensorflow", "PyTorch": "torch"}.items():
        if importlib.util.find_spec(module) is None:
            assert group.failures[framework].startswith("not measured: No module named")


def test_quick_run_writes_json_and_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["--quick", "--only", "growth/chained calls trace", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith(f"-jax{jax.__version__}")
    data = json.loads(path.read_text())
    assert data["meta"]["quick"] is True
    assert [g["measure"] for g in data["groups"]] == ["1", "8", "slope", "exponent"]
    first = Results.load(path).groups[0]
    low, high = first.quartiles[OURS]
    assert 0 < low <= first.values[OURS] <= high
    assert first.samples >= 2
    assert first.ratios.keys() == {HAND_EVERY_ORDER}
    figure = (tmp_path / f"{path.stem}-growth.svg").read_text()
    assert "chained calls" in figure
    printed = capsys.readouterr().out
    assert "chained calls, trace | 8" in printed
    assert "growth with chained calls, trace" in printed  # the table of promises


def test_only_keeps_what_was_measured_before(tmp_path):
    results = Results.here(quick=True)
    results.add([Group.counted("growth", "leaves, trace", "1", "s", {OURS: 1.0, HAND: 2.0})])
    results.save(tmp_path / f"{results.name}.json")
    main(["--quick", "--only", "growth/chained calls eager", "--out", str(tmp_path)])
    kept = Results.load(tmp_path / f"{results.name}.json")
    assert kept.first("growth", "leaves, trace", "1").ratios == {HAND: 0.5}
    assert kept.first("growth", "chained calls, eager grad", "8")


def test_unknown_part_is_an_error(capsys):
    assert main(["--quick", "--only", "no such part"]) == 2
    assert "no such part" in capsys.readouterr().err


def test_list_names_all_sections(capsys):
    assert main(["--list"]) == 0
    sections = [line.partition("/")[0] for line in capsys.readouterr().out.split("\n") if line]
    assert list(dict.fromkeys(sections)) == [
        "machine", "overhead", "growth", "workloads", "frameworks",
    ]  # fmt: skip


def test_compare_reports_who_cannot_run():
    def fails():
        raise TypeError("no such thing\nand more")

    prepared = []
    contestants = {
        OURS: lambda: jnp.zeros(()),
        HAND: Timed(lambda x: x, lambda: prepared.append(1)),
        PLAIN: fails,
    }
    measured = compare(contestants, OURS, seconds=0, rounds=(3, 3))
    assert measured.failures == {PLAIN: "TypeError: no such thing"}
    assert measured.times.keys() == {OURS, HAND}
    assert measured.ratios.keys() == {HAND}
    assert measured.times[OURS].samples == 3
    assert len(prepared) == 6  # a warm-up, two to size the samples, and the three
    with pytest.raises(TypeError, match="no such thing"):
        compare({OURS: fails}, OURS)


def test_stats_are_quartiles():
    assert Stats.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Stats(3.0, 2.0, 4.0, 5)
