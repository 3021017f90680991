"""Run the code of the README, of the site and of the docstrings, page by page.

A block ```` ```output ```` is what the block above it prints: words must be equal, numbers close,
and a line `...` stands for any lines. A page about a framework that is not installed is skipped.
"""

import ast
import contextlib
import inspect
import io
import json
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


BRINGS = {"dm-haiku": {"haiku"}, "flax": {"flax", "optax"}, "orbax-checkpoint": {"orbax"}}


def test_the_list_of_how_tos_says_what_to_install():
    line = r"^- \[.+?\]\((\w+\.md)\)(?:.*\*Needs\* `(.+?)`)?"
    pages = re.findall(line, (DOCS / "howto" / "index.md").read_text(), re.MULTILINE)
    assert len(pages) > 20
    for page, needs in pages:
        named = {"numpy"}.union(*(BRINGS.get(name, {name}) for name in needs.split()))
        assert _needs(DOCS / "howto" / page) <= named, page


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


PUBLISHED = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "howto").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((DOCS / "notebooks").glob("*.ipynb")),
]


def _source(path):
    """Return the Python code of a page, a notebook or a program."""
    if path.suffix == ".md":
        return code_of(path)
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        return re.sub(r"^%.*$", "", code, flags=re.M)  # a setting of IPython
    return path.read_text()


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_stand_behind_a_star(path):
    """A caller may pass an input with a default, and its rule may have no gradient for it."""
    for node in ast.walk(ast.parse(_source(path))):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            if any(re.match(r"custom_gradient\b", d) for d in decorators):
                assert not node.args.defaults, node.name


def test_who_sees_what_stands_once_and_is_linked():
    words = "outside `jit`, `vmap`, `scan` and `checkpoint`, a function and its rule see values"
    pages = [path for path in PUBLISHED if path.name != "CHANGELOG.md"]
    said = [path.name for path in pages if words in " ".join(path.read_text().split())]
    assert said == ["guide.md"]
    linking = {p.name for p in PUBLISHED if "guide.md#who-sees-what" in p.read_text()}
    assert linking >= {
        "README.md",
        "getting_started.md",
        "from_tensorflow.md",
        "faq.md",
        "errors.md",
    }


# --- a clone, where nothing is built -------------------------------------------------------------

PAGES_OF_A_CLONE = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("[!_]*/*.md"))]
PAGES_OF_A_CLONE += [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("notebooks/*.ipynb"))]


@pytest.mark.parametrize("path", PAGES_OF_A_CLONE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_lead_to_files_of_the_repository(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:\s]+[./][^)#:\s]*)(?:#[^)]*)?\)|<img src=\\?\"([^\"\\]+)", text)
    for target in map("".join, links):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES_OF_A_CLONE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_directive_stands_where_a_reader_expects_text(path):
    """On a code host, a directive is shown as it is written."""
    found = re.findall(r"^```\{([\w-]+)\}", path.read_text(), re.MULTILINE)
    assert set(found) <= {"toctree", "eval-rst"}  # an index, and the names of the API


@pytest.mark.parametrize("page", ["index.md", "getting_started.md", "howto/external.md"])
def test_the_first_examples_fit_a_phone(page):
    """44 columns of code are what a window of 390 pixels shows, and 43 of output."""
    blocks = re.findall(
        r"^```(py|python|output)\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S
    )
    assert len(blocks) >= 4
    for kind, text in blocks:
        columns = 43 if kind == "output" else 44
        assert [line for line in text.splitlines() if len(line) > columns] == []


def test_pages_have_examples():
    """Guard against a parser that finds nothing and so proves nothing."""
    for name, count in {"README.md": 1, "docs/guide.md": 4, "docs/getting_started.md": 4}.items():
        path = ROOT / name
        _, parsers = PARSERS[path.parent]
        assert len(list(_parsed(path, parsers).examples())) >= count


def test_the_numbers_in_comments_of_the_readme_are_those_that_it_prints():
    code = code_of(ROOT / "README.md")
    said = [c.partition(";")[0] for c in re.findall(r"^print\(.*\)  +# (.*)$", code, re.M)]
    printed = []
    exec(code, {"print": lambda *values: printed.append(" ".join(map(str, values)))})
    for text, comment in zip(printed, said, strict=True):
        assert numbers(text) == pytest.approx(numbers(comment)) and numbers(comment)


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("[1.0 2.0]\n", "[1. 2.]\n", True),
        ("[[8.4  8.4 ]]\n", "[[8.400001 8.400001]]\n", True),
        ("1.00001 ok\n", "1.0 ok\n", True),
        ("1.1 ok\n", "1.0 ok\n", False),
        ("1.0 no\n", "1.0 ok\n", False),
        ("a\nb\nc\n", "a\n...\nc\n", True),
        ("a\nb\n", "a\n...\nc\n", False),
        ("float32[3]\n", "float32[4]\n", False),
        ("-0.5\n", "0.5\n", False),
        ("", "1.0\n", False),
    ],
)
def test_output_is_compared(actual, expected, same):
    assert is_printed(actual, expected) is same


# --- the reference -------------------------------------------------------------------------------


def _public(module):
    """Return what a module defines or exports (`import x as x`) under a public name."""
    body = ast.parse(inspect.getsource(module)).body
    body += [node for choice in body if isinstance(choice, ast.If) for node in choice.body]
    for node in body:
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.asname == alias.name]
        for name in names:
            if not name.startswith("_") and not inspect.ismodule(getattr(module, name)):
                yield f"{module.__name__}.{name}"


def test_the_reference_has_every_public_name():
    text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
    public = [*_public(tfgrad_jax), *_public(tfgrad_jax.testing), "tfgrad_jax.__version__"]
    assert len(public) >= 8
    assert sorted(listed) == sorted(public)


def _columns(what, table):
    """Return the first two columns of a table on the page of the reports."""
    _, _, rest = (DOCS / "api" / "reports.md").read_text().partition(f"| {what} |")
    assert rest, table
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in row.split("|")[1:3]] for row in rows]


def test_the_reference_has_every_field_and_option_of_the_reports():
    x = jax.numpy.ones(2)
    h = tfgrad_jax.custom_gradient(lambda x: (x**2, lambda dy: 2 * x * dy))
    found, report = tfgrad_jax.explain(h, x), tfgrad_jax.testing.check_gradient(h, x)
    reports = [found, found.inputs[0], found.residuals[0], report.rows[0], report.facts[0]]
    for each in reports:
        name = type(each).__name__
        assert [row[0] for row in _columns(f"field of `{name}`", name)] == [*each._fields]
    assert [row[0] for row in _columns("field of `GradientReport`", "")] == [*report._fields, "ok"]
    options = inspect.signature(tfgrad_jax.testing.check_gradient).parameters
    assert [row[0] for row in _columns("option", "")] == [*options][2:]
