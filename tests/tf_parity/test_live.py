"""TensorFlow, where it is installed, still gives the recorded answers."""

import json

import pytest

from . import CASES, operations
from .backend import TensorFlow
from .case import disagreement, recorded

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.filterwarnings("default")  # TensorFlow's own


@pytest.mark.parametrize("name", CASES)
def test_tensorflow_gives_its_recorded_answer(name):
    for mode in CASES[name].modes:
        problem = disagreement(recorded()[name][mode], CASES[name].answer(TensorFlow(mode)))
        assert problem is None, f"{mode}: {problem}"


@pytest.mark.parametrize("name", operations.questions())
def test_tensorflow_gives_its_recorded_answer_to_an_operation(name):
    recorded = json.loads(operations.RECORDED.read_text())[name]
    assert disagreement(recorded, operations.of_tensorflow(*operations.questions()[name])) is None
