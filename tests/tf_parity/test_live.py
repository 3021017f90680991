"""TensorFlow, where it is installed, still gives the recorded answers."""

import pytest

from .case import disagreement, recorded
from .cases import CASES

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.filterwarnings("default")  # TensorFlow's own

ANSWERS = recorded()
BY_MODE = [(name, mode) for name, case in CASES.items() for mode in case.modes]


@pytest.mark.parametrize(
    ("name", "mode"), BY_MODE, ids=[f"{name}-{mode}" for name, mode in BY_MODE]
)
def test_tensorflow_gives_its_recorded_answer(name, mode):
    from .backend import TensorFlow

    problem = disagreement(ANSWERS[name][mode], CASES[name].answer(TensorFlow(mode)))
    assert problem is None, problem
