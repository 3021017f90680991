"""Run the code of the README, the documentation and the docstrings as tests."""

from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

from sybil import Sybil
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.markdown import PythonCodeBlockParser as MarkdownCode
from sybil.parsers.myst import DocTestDirectiveParser, PythonCodeBlockParser
from sybil.sybil import SybilCollection

_doctests = DocTestParser(optionflags=ELLIPSIS | NORMALIZE_WHITESPACE)
_pages = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS), DocTestDirectiveParser()],
    patterns=["docs/*.md"],
)
_readme = Sybil(parsers=[MarkdownCode()], patterns=["README.md"])
_docstrings = Sybil(parsers=[_doctests], patterns=["tfgrad_jax/*.py"])

pytest_collect_file = SybilCollection([_pages, _readme, _docstrings]).pytest()
