"""The site as it is built: `sphinx-build docs docs/_build`, then these tests.

Skipped where it is not built; `nox -f .ci/noxfile.py -s docs` does both.
"""

import copy
import re
from functools import cache
from pathlib import Path

import pytest

bs4 = pytest.importorskip("bs4")

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "_build"
if not (SITE / "index.html").is_file():
    pytest.skip("the site is not built", allow_module_level=True)

MADE = ("genindex.html", "search.html", "py-modindex.html")
PAGES = sorted(p for p in SITE.rglob("*.html") if p.name not in MADE)
every_page = pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(SITE)))


@cache
def page(path):
    return bs4.BeautifulSoup(path.read_text(), "html.parser")


def article(path):
    return page(path).find("article")


@cache
def targets(path):
    """Return the pages of the site that the text of a page links to."""
    found = set()
    for link in article(path).find_all("a", href=True):
        href = link["href"].partition("#")[0]
        if href and "://" not in href:
            found.add((path.parent / href).resolve())
    return found


@every_page
def test_every_link_leads_to_a_page_and_nothing_is_loaded_from_elsewhere(path):
    assert all(target.exists() for target in targets(path)), targets(path)
    for tag in page(path).find_all(["script", "link", "img"]):
        source = tag.get("src") or tag.get("href") or ""
        assert not source.startswith(("http:", "https:", "//")), source


@every_page
def test_no_formula_is_left_as_text(path):
    text = copy.copy(article(path))
    for code in text.find_all(["pre", "code", "math", "script"]):
        code.extract()
    assert not re.search(r"\$[^$\n]+\$|\\frac|\\sum|\\log", text.get_text())


def test_every_public_name_has_an_entry():
    for source in (ROOT / "docs/api").glob("*.md"):
        built = page(SITE / "api" / f"{source.stem}.html")
        for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", source.read_text(), re.M):
            assert built.find(id=name) is not None, name


def test_a_reader_reaches_every_page_by_links_in_the_text():
    reached = {(SITE / "index.html").resolve()}
    queue = list(reached)
    for path in queue:
        new = {target for target in targets(path) - reached if target.suffix == ".html"}
        reached |= new
        queue += new
    assert len(PAGES) > 40
    assert {p.stem for p in PAGES if p.resolve() not in reached} <= {"changelog"}
