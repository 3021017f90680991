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
CHECKERS = {
    "pyright": ["pyright", "--pythonpath", sys.executable],
    "mypy": ["mypy", "--strict"],
    "pyrefly": [
        "pyrefly", "check", "--python-interpreter-path", sys.executable,
        "--output-format=min-text",
    ],
}  # fmt: skip


def _refused(checker, name):
    """Return the numbers of the lines in which a checker finds an error."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    command, *options = CHECKERS[checker]
    program = pathlib.Path(sys.executable).with_name(command)
    done = subprocess.run(
        [program, *options, f"tests/for_type_checkers/{name}.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if "error" in line.lower()]
    found = {int(n) for line in lines for n in re.findall(rf"{name}\.py:(\d+)", line)}
    assert done.returncode == (1 if found else 0), done.stdout + done.stderr
    return found, done.stdout


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_types_of_decorated_functions(checker):
    found, text = _refused(checker, "accepted")
    assert not found, text


@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_are_refused(checker):
    lines = (ROOT / "tests/for_type_checkers/refused.py").read_text().splitlines()
    wrong = {i for i, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) >= 20
    found, text = _refused(checker, "refused")
    assert found == wrong, text


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
