"""Every case on JAX, and on TensorFlow where it is installed.

A case gives TensorFlow's eager answer on JAX, eagerly and compiled, unless it says that it
differs; then it gives the answer that it says, and TensorFlow must still differ.
"""

import runpy

import pytest

from . import document
from .backend import Jax
from .case import disagreement, recorded
from .cases import CASES

ANSWERS = recorded()
BY_MODE = [  # those that run eagerly are compiled in the slow set, which has the ports too
    pytest.param(
        name,
        mode,
        id=f"{name}-{mode}",
        marks=pytest.mark.slow
        if (mode == "graph" and "eager" in case.modes) or name.startswith("ports.")
        else (),
    )
    for name, case in CASES.items()
    for mode in case.modes
]


@pytest.mark.parametrize(("name", "mode"), BY_MODE)
def test_jax_gives_the_answer_of_tensorflow_or_the_declared_one(name, mode):
    case = CASES[name]
    got = case.answer(Jax(mode))
    if case.differs is not None:
        problem = disagreement(case.expected, got)
    else:
        answers = ANSWERS[name]
        problem = disagreement(answers.get("eager", answers.get(mode)), got, case.none_is_zero)
    assert problem is None, problem


def _contradiction(case, answers):
    """Say what a case claims of TensorFlow that the recorded answers do not show."""
    if set(answers) != set(case.modes):
        return "recorded in other modes"
    if case.differs is not None:
        if case.none_is_zero or case.graph_differs is not None:
            return "more than one way to differ"
        if not any(disagreement(case.expected, answers[mode]) for mode in case.modes):
            return "no difference"
        return None
    if len(answers) == 2:
        differ = disagreement(answers["eager"], answers["graph"]) is not None
        if differ != (case.graph_differs is not None):
            return f"graph mode differs: {differ}"
    if case.none_is_zero and "None" not in repr(answers):
        return "no None"
    return None


def test_what_the_cases_say_of_tensorflow_is_recorded():
    """A declared difference exists; an undeclared one between TensorFlow's modes does not."""
    found = {name: _contradiction(case, ANSWERS[name]) for name, case in CASES.items()}
    assert {name: problem for name, problem in found.items() if problem} == {}


def test_the_recorded_answers_are_those_of_the_cases():
    assert set(ANSWERS) == set(CASES)


def test_every_rule_with_a_meaning_in_jax_has_a_case():
    covered = {rule for case in CASES.values() for rule in case.rules}
    # 17, 26: RaggedTensor and IndexedSlices, which JAX does not have.
    assert covered >= set(range(1, 75)) - {17, 26}


def test_the_page_lists_every_difference():
    text = document.PAGE.read_text()
    assert document.rendered(text) == text, "run `python -m tests.tf_parity.document`"


@pytest.mark.parametrize("name", document.PORTS)
def test_every_port_runs_and_is_compared(name, capsys):
    with Jax("eager").settings(double=False):
        runpy.run_path(str(document.ROOT / "examples" / "ports" / f"{name}.py"), {}, "__main__")
    assert capsys.readouterr().out
    assert any(case.startswith(f"ports.{name}") for case in CASES)


def test_all_ports_are_on_the_page():
    folder = document.ROOT / "examples" / "ports"
    assert {p.stem for p in folder.glob("[a-z]*.py")} == set(document.PORTS)
