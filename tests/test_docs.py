"""Run the code of the README, of the documentation and of the docstrings, page by page."""

import pathlib
from doctest import ELLIPSIS

import jax
import pytest
from sybil import Sybil
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.myst import PythonCodeBlockParser as MySTCodeBlockParser

ROOT = pathlib.Path(__file__).parent.parent
PARSERS = {
    ROOT: ("*.md", PythonCodeBlockParser(doctest_optionflags=ELLIPSIS)),
    ROOT / "docs": ("*.md", MySTCodeBlockParser(doctest_optionflags=ELLIPSIS)),
    ROOT / "tfgrad_jax": ("*.py", DocTestParser(optionflags=ELLIPSIS)),
}
PAGES = [
    pytest.param(path, parser, id=str(path.relative_to(ROOT)))
    for folder, (pattern, parser) in PARSERS.items()
    for path in sorted(folder.glob(pattern))
]


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Undo the strictness of `conftest.py`: the pages write `x @ w + b`, as everyone does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(("path", "parser"), PAGES)
def test_every_example_runs(path, parser):
    document = Sybil([parser], pattern=path.name, path=str(path.parent)).parse(path)
    for example in document.examples():
        example.evaluate()  # raises where the page is wrong


def test_pages_have_examples():
    """Guard against a parser that finds nothing and so proves nothing."""
    for name in ("README.md", "docs/guide.md", "tfgrad_jax/_custom_gradient.py"):
        path = ROOT / name
        parser = PARSERS[path.parent][1]
        document = Sybil([parser], pattern=path.name, path=str(path.parent)).parse(path)
        assert len(list(document.examples())) >= 4
