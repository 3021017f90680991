"""Run the code of the README, of the site and of the docstrings, page by page.

A block ```` ```output ```` is what the block above it prints: words must be equal, numbers close,
and a line `...` stands for any lines. A page about a framework that is not installed is skipped.
"""

import contextlib
import io
import pathlib
import re
import sys
from doctest import ELLIPSIS

import jax
import pytest
from support.published import code_of, every_parameter_passed, is_printed, never_called, numbers
from sybil import Sybil
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from sybil.parsers.myst import CodeBlockParser as MySTCodeBlockParser
from sybil.parsers.myst import PythonCodeBlockParser as MySTPythonCodeBlockParser

import tfgrad_jax
import tfgrad_jax.testing

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"


def check_output(example):
    """Compare a block of output with what was printed since the last one."""
    printed = example.namespace["_printed"]
    jax.effects_barrier()
    actual = printed.getvalue()
    printed.seek(0)
    printed.truncate()
    expected = str(example.parsed)
    assert is_printed(actual, expected), f"printed:\n{actual}\nthe page says:\n{expected}"


MARKDOWN = (
    PythonCodeBlockParser(doctest_optionflags=ELLIPSIS),
    CodeBlockParser("output", check_output),
)
MYST = (
    MySTPythonCodeBlockParser(doctest_optionflags=ELLIPSIS),
    MySTCodeBlockParser("output", check_output),
)
PARSERS = {
    ROOT: ("*.md", MARKDOWN),
    DOCS: ("*.md", MYST),
    DOCS / "howto": ("*.md", MYST),
    DOCS / "api": ("*.md", MYST),
    ROOT / "tfgrad_jax": ("**/*.py", (DocTestParser(optionflags=ELLIPSIS),)),
}
PAGES = [
    pytest.param(path, parsers, id=str(path.relative_to(ROOT)))
    for folder, (pattern, parsers) in PARSERS.items()
    for path in sorted(folder.glob(pattern))
]


# Pages, examples and benchmarks write `x @ w + b`, as everyone does.
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def _parsed(path, parsers):
    return Sybil(list(parsers), pattern=path.name, path=str(path.parent)).parse(path)


def _needs(path):
    """Return the packages that the code of a page imports."""
    found = re.findall(r"^\s*(?:import|from) +(\w+)", code_of(path), re.MULTILINE)
    return set(found) - set(sys.stdlib_module_names) - {"jax", "tfgrad_jax"}


@pytest.mark.docs
@pytest.mark.filterwarnings("default::DeprecationWarning:(?!tfgrad_jax)")  # of the frameworks
@pytest.mark.parametrize(("path", "parsers"), PAGES)
def test_every_example_runs(path, parsers, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for package in sorted(_needs(path)):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    document = _parsed(path, parsers)
    printed = document.namespace["_printed"] = io.StringIO()
    with every_parameter_passed() as called:
        for example in document.examples():
            with contextlib.redirect_stdout(printed):
                example.evaluate()  # raises where the page is wrong
    assert never_called(document.namespace, called) == set()


# --- a clone, where nothing is built -------------------------------------------------------------

PAGES_OF_A_CLONE = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("[!_]*/*.md"))]
PAGES_OF_A_CLONE += [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("notebooks/*.ipynb"))]


@pytest.mark.parametrize("path", PAGES_OF_A_CLONE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_lead_to_files_of_the_repository(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:\s]+[./][^)#:\s]*)(?:#[^)]*)?\)|<img src=\\?\"([^\"\\]+)", text)
    for target in map("".join, links):
        assert (path.parent / target).exists(), target


def test_the_numbers_in_comments_of_the_readme_are_those_that_it_prints():
    code = code_of(ROOT / "README.md")
    said = [c.partition(";")[0] for c in re.findall(r"^print\(.*\)  +# (.*)$", code, re.M)]
    printed = []
    exec(code, {"print": lambda *values: printed.append(" ".join(map(str, values)))})
    for text, comment in zip(printed, said, strict=True):
        assert numbers(text) == pytest.approx(numbers(comment)) and numbers(comment)


def test_the_reference_has_every_public_name():
    text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
    public = {f"tfgrad_jax.{name}" for name in (*tfgrad_jax.__all__, "__version__")}
    public |= {f"tfgrad_jax.testing.{name}" for name in tfgrad_jax.testing.__all__}
    assert {*listed} >= public - {"tfgrad_jax.testing"}
