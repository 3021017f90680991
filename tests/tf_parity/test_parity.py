"""Every case on JAX against TensorFlow's recorded answer.

A case gives TensorFlow's eager answer on JAX, eagerly and compiled, unless it says that it
differs; then it gives the answer that it says, and TensorFlow must still differ.
"""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from support.helpers import sample
from support.published import every_parameter_passed, never_called

from . import CASES
from .backend import Jax
from .case import disagreement, recorded

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "from_tensorflow_reference.md").read_text()
PORTS = sorted((ROOT / "examples" / "ports").glob("[a-z]*.py"))
ANSWERS = recorded()
# Eagerly all of them; compiled those that only compile, and a sample of the others.
COMPILED = sample((name for name, case in CASES.items() if len(case.modes) == 2), 20)
BY_MODE = [(name, case.modes[0]) for name, case in CASES.items()]
BY_MODE += [(name, "graph") for name in COMPILED]

# A gradient that is passed through to an integer, a weight that only the rule reads: zero here,
# with a warning; None there.
NO_OUTPUT = pytest.mark.filterwarnings("ignore:.*returned no output that has a gradient")
ONLY_READ = pytest.mark.filterwarnings("ignore:.*which only its .* reads")


@pytest.mark.parametrize(("name", "mode"), BY_MODE, ids=map("-".join, BY_MODE))
@NO_OUTPUT
@ONLY_READ
def test_jax_gives_the_answer_of_tensorflow_or_the_declared_one(name, mode):
    backend, case, answers = Jax(mode), CASES[name], ANSWERS[name]
    got = case.answer(backend)
    expected = answers.get("eager", answers.get(mode))
    if case.ours is not None:
        expected = backend.plain(case.ours)
    problem = disagreement(expected, got)
    if problem is not None:
        raise AssertionError(problem) from backend.raised


def test_a_declared_difference_is_recorded():
    assert {name: set(answers) for name, answers in ANSWERS.items()} == {
        name: set(case.modes) for name, case in CASES.items()
    }
    for name, case in CASES.items():
        ours = Jax("eager").plain(case.ours)
        differs = [disagreement(ours, answer) is not None for answer in ANSWERS[name].values()]
        assert case.ours is None or any(differs), name


def test_every_rule_with_a_meaning_in_jax_has_a_case():
    covered = {rule for case in CASES.values() for rule in np.atleast_1d(case.rules)}
    # JAX has no RaggedTensor (17), no IndexedSlices (26), no state that changes by itself (65).
    assert covered >= set(range(1, 75)) - {17, 26, 65}


def test_the_page_lists_every_difference():
    listed = re.findall(r"^\|.*\| `(\w+\.\w+)` \|$", REFERENCE.partition("{dropdown}")[2], re.M)
    differing = [
        name
        for name, case in CASES.items()
        if case.ours is not None or (len(case.modes) == 2 and disagreement(*ANSWERS[name].values()))
    ]
    assert sorted(listed) == sorted(differing)


@pytest.mark.docs
@pytest.mark.parametrize("path", PORTS, ids=lambda path: path.stem)
def test_every_port_runs_and_is_compared(path, capsys):
    with Jax("eager").settings(double=False), every_parameter_passed() as called:
        names = runpy.run_path(str(path), {}, "__main__")
    assert capsys.readouterr().out
    assert never_called(names, called) == set()
    assert any(case.startswith(f"ports.{path.stem}") for case in CASES)


def test_the_page_shows_every_port():
    page = (ROOT / "docs" / "from_tensorflow_ports.md").read_text()
    shown = re.findall(r"^- \[`\w+\.py`\]\(\.\./examples/ports/(\w+)\.py\): ", page, re.M)
    assert sorted(shown) == [path.stem for path in PORTS]
