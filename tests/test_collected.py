"""What pytest collects: every reason to skip has its tests."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.flags import UNDER_FLAGS

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def names():
    """Return the names of all tests, of the large samples too."""
    options = ["-n", "0", "-m", "", "--collect-only", "-q", "--count", "30"]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    shown = subprocess.check_output(command, cwd=Path(__file__).parents[1], text=True)
    lines = [line for line in shown.splitlines() if "::" in line]
    return [line for line in lines if "test_collected.py" not in line]  # its ids have the parts


@pytest.mark.parametrize("part", UNDER_FLAGS)
def test_what_is_skipped_under_flags_is_there(part, names):
    assert any(part in name for name in names)
