"""Each row of the tables of operations gives TensorFlow's recorded value and gradients."""

import json

import pytest

from .case import disagreement
from .operations import GUIDE, RECORDED, REFERENCE, inputs, of_jax, questions, rows

pytest.importorskip("flax")
pytest.importorskip("optax")

INPUTS, ANSWERS = inputs(), json.loads(RECORDED.read_text())
OTHER_MEANING = list(rows(GUIDE, "Same name, another meaning"))
OPERATIONS = list(rows(REFERENCE, "Operations"))
EDGES = list(rows(REFERENCE, "Gradients at edges"))
pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.sampled(60)
@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row[0])
def test_what_stands_for_an_operation(row):
    assert disagreement(ANSWERS[row[0]], of_jax(row[1], INPUTS)) is None


@pytest.mark.parametrize("row", OTHER_MEANING, ids=lambda row: row[0])
def test_the_namesake_differs_and_the_replacement_agrees(row):
    tensorflow, namesake, replacement = row
    assert disagreement(ANSWERS[tensorflow], of_jax(replacement, INPUTS)) is None
    assert disagreement(ANSWERS[tensorflow], of_jax(namesake, INPUTS)) is not None


@pytest.mark.parametrize("row", EDGES, ids=lambda row: row[0])
def test_only_the_gradient_differs_at_an_edge(row):
    tensorflow, ours, x, theirs, gradient = row
    ((value,), (recorded,)) = ANSWERS[f"{tensorflow} at {x}"]
    (got_value,), (got,) = of_jax(ours, {"x": INPUTS["x"].dtype.type(x)})
    assert got_value["value"] == pytest.approx(value["value"])
    assert recorded["value"] == pytest.approx(float(theirs))
    assert float(got["value"]) == pytest.approx(float(gradient), nan_ok=True)


def test_every_row_is_recorded_and_there_are_enough():
    assert set(ANSWERS) == set(questions())
    assert len(OPERATIONS) >= 50
