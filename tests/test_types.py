"""Three type checkers read `for_type_checkers`: what they must accept and what they refuse."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly  # and in the session `lint` of CI

ROOT = pathlib.Path(__file__).parent.parent
FILE = ROOT / "tests" / "for_type_checkers" / "decorated.py"
CHECKERS = {
    "pyright": ["pyright", "--pythonpath", sys.executable],
    "mypy": ["mypy", "--strict"],
    "pyrefly": [
        "pyrefly", "check", "--python-interpreter-path", sys.executable,
        "--output-format=min-text",
    ],
}  # fmt: skip


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_mistakes_are_found_and_no_others(checker):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    command, *options = CHECKERS[checker]
    program = pathlib.Path(sys.executable).with_name(command)
    done = subprocess.run(
        [program, *options, FILE.relative_to(ROOT)], cwd=ROOT, capture_output=True, text=True
    )
    errors = [line for line in done.stdout.splitlines() if "error" in line.lower()]
    found = {int(n) for line in errors for n in re.findall(rf"{FILE.name}:(\d+)", line)}
    lines = FILE.read_text().splitlines()
    assert found == {i for i, line in enumerate(lines, 1) if line.endswith("# wrong")}, done.stdout


def test_the_page_on_typing_quotes_mypy(tmp_path):
    """Its examples pass, and each block of mistakes has the messages that stand below it."""
    pytest.importorskip("mypy")
    page = (ROOT / "docs" / "howto" / "typing.md").read_text()
    right = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    wrong = re.findall(r"^```py\n(.*?)^```\n+```text\n(.*?)^```", page, re.M | re.S)
    assert len(wrong) >= 3
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-codes", "page.py"]
    silent = [*command, "--follow-imports", "silent"]  # of the package itself
    for code, said in [("", ""), *wrong]:
        (tmp_path / "page.py").write_text(right + code)
        env = {**os.environ, "MYPYPATH": str(ROOT)}
        done = subprocess.run(silent, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert re.findall(r" error: (.*)$", done.stdout, re.M) == said.splitlines(), done.stdout
