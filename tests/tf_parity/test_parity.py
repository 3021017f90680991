"""Every case on JAX against TensorFlow's recorded answer.

A case gives TensorFlow's eager answer on JAX, eagerly and compiled, unless it says that it
differs; then it gives the answer that it says, and TensorFlow must still differ.
"""

import ast
import re
import runpy
import textwrap
from pathlib import Path

import pytest
from helpers import sample

from .backend import Jax
from .case import disagreement, recorded
from .cases import CASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_tensorflow.md").read_text()
PORTS = sorted((ROOT / "examples" / "ports").glob("[a-z]*.py"))
ANSWERS = recorded()
# Eagerly all of them; compiled those that only compile, and a sample of the others.
COMPILED = sample((name for name, case in CASES.items() if len(case.modes) == 2), 40)
BY_MODE = [(name, case.modes[0]) for name, case in CASES.items()]
BY_MODE += [(name, "graph") for name in COMPILED]


@pytest.mark.parametrize(("name", "mode"), BY_MODE, ids=map("-".join, BY_MODE))
def test_jax_gives_the_answer_of_tensorflow_or_the_declared_one(name, mode):
    case = CASES[name]
    got = case.answer(Jax(mode))
    if case.ours is not None:
        problem = disagreement(Jax("eager").plain(case.ours), got)
    else:
        answers = ANSWERS[name]
        problem = disagreement(answers.get("eager", answers.get(mode)), got, case.zero)
    assert problem is None, problem


def _contradiction(case, answers):
    """Say what a case claims of TensorFlow that the recorded answers do not show."""
    if set(answers) != set(case.modes):
        return "recorded in other modes"
    if case.ours is not None:
        if case.zero or case.graph_differs:
            return "more than one way to differ"
        ours = Jax("eager").plain(case.ours)
        if not any(disagreement(ours, answers[mode]) for mode in case.modes):
            return "no difference"
        return None
    if len(answers) == 2:
        differ = disagreement(answers["eager"], answers["graph"]) is not None
        if differ != (case.graph_differs):
            return f"graph mode differs: {differ}"
    return "no None" if case.zero and "None" not in repr(answers) else None


def test_what_the_cases_say_of_tensorflow_is_recorded():
    """A declared difference exists; an undeclared one between TensorFlow's modes does not."""
    assert set(ANSWERS) == set(CASES)
    found = {name: _contradiction(case, ANSWERS[name]) for name, case in CASES.items()}
    assert {name: problem for name, problem in found.items() if problem} == {}


def test_every_rule_with_a_meaning_in_jax_has_a_case():
    covered = {rule for case in CASES.values() for rule in case.numbers}
    # JAX has no RaggedTensor (17), no IndexedSlices (26), no state that changes by itself (65).
    assert covered >= set(range(1, 75)) - {17, 26, 65}


def test_the_page_lists_every_difference():
    rows = re.findall(r"^\| ([\d, ]+) \|.*\| `([\w.]+)` \|$", PAGE, re.M)
    assert sorted((name, tuple(map(int, rules.split(", ")))) for rules, name in rows) == sorted(
        (name, case.numbers)
        for name, case in CASES.items()
        if case.ours is not None or case.graph_differs
    )


@pytest.mark.parametrize("path", PORTS, ids=lambda path: path.stem)
def test_every_port_runs_and_is_compared(path, capsys):
    with Jax("eager").settings(double=False):
        runpy.run_path(str(path), {}, "__main__")
    assert capsys.readouterr().out
    assert any(case.startswith(f"ports.{path.stem}") for case in CASES)


@pytest.mark.parametrize("path", PORTS, ids=lambda path: path.stem)
def test_the_page_shows_every_port_as_it_is(path):
    lines = path.read_text().splitlines()
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            # TensorFlow's code is all of `original` but its docstring and its return.
            shown = node.body[1:-1] if node.name == "original" else [node]
            first = min(n.lineno for n in (shown[0], *getattr(shown[0], "decorator_list", [])))
            text = "\n".join(lines[first - 1 : shown[-1].end_lineno])
            assert textwrap.dedent(text) in PAGE, node.name
