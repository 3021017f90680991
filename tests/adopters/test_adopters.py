"""Keras and TensorFlow Probability, where they are installed, work with our decorator."""

import pytest

from .__main__ import KERAS, TFP, run


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("package", "arguments"), [("keras", KERAS), ("tensorflow_probability", TFP)]
)
def test_nothing_that_passed_before_fails_after(package, arguments):
    pytest.importorskip(package)
    before, after = run(arguments, False), run(arguments, True)
    assert before.passed
    assert before.passed - after.passed == set()
    assert after.calls > 0
