"""The site as it is built: `sphinx-build docs docs/_build`, then these tests.

Skipped where it is not built; `nox -f .ci/noxfile.py -s docs` does both.
"""

import copy
import json
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


@pytest.mark.parametrize(
    ("source", "words"),
    [("howto/implicit", "θ"), ("gallery/exact", "log"), ("notebooks/01_custom_gradient", "log")],
)
def test_a_formula_becomes_one(source, words):
    formulas = article(SITE / f"{source}.html").find_all("math")
    assert any(words in formula.get_text() for formula in formulas)
    assert all("\\" not in formula.get_text() for formula in formulas)


def test_every_public_name_has_an_entry():
    for source in (ROOT / "docs/api").glob("*.md"):
        built = page(SITE / "api" / f"{source.stem}.html")
        for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", source.read_text(), re.M):
            assert built.find(id=name) is not None, name


def test_every_function_has_one_signature_without_private_names():
    signatures = [s for p in (SITE / "api").glob("*.html") for s in page(p).select("dt.sig")]
    named = [s["id"] for s in signatures if s.get("id")]
    assert len(named) == len(set(named)) == len(signatures) >= 7
    assert not any(re.search(r"\b_[A-Z]", s.get_text()) for s in signatures)


def test_outputs_have_no_copy_button():
    """`sphinx_copybutton` adds the buttons in the browser, to what its selector finds."""
    script = (SITE / "_static" / "copybutton.js").read_text()
    (selector,) = re.findall(r"COPYBUTTON_SELECTOR = '(.+?)'", script)
    landing = article(SITE / "index.html")
    chosen = landing.select(selector)
    assert chosen and landing.select(".highlight-output pre")
    assert not any(pre.find_parent(class_="highlight-output") for pre in chosen)


FOUND = {
    "bfloat16": "howto/mixed_precision",
    "mixed precision": "howto/mixed_precision",
    "unhashable": "errors",
    "linear upstream gradients transposed": "errors",
    "must return a pair": "errors",
}


@pytest.mark.parametrize("words", FOUND)
def test_the_search_finds(words):
    """Sphinx's search shows the pages that hold all words, whose endings it ignores."""
    index = (SITE / "searchindex.js").read_text()
    index = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    for word in words.split():
        hits = set()
        for term, found in [*index["terms"].items(), *index["titleterms"].items()]:
            if len(word) > 2 and (term.startswith(word[:6]) or word.startswith(term)):
                hits |= {found} if isinstance(found, int) else set(found)
        assert len(word) < 3 or index["docnames"].index(FOUND[words]) in hits, word


def test_a_reader_reaches_every_page_by_links_in_the_text():
    reached = {(SITE / "index.html").resolve()}
    queue = list(reached)
    for path in queue:
        new = {target for target in targets(path) - reached if target.suffix == ".html"}
        reached |= new
        queue += new
    assert len(PAGES) > 40
    assert {p.stem for p in PAGES if p.resolve() not in reached} <= {"changelog"}


def test_pictures_follow_the_theme_and_wide_tables_fit_a_phone():
    pictures = [*(SITE / "_images").glob("*.svg")]
    assert len(pictures) >= 42  # two for each gradient of the gallery, and two of the landing page
    for path in pictures:
        assert not re.search(r"#000000|#ffffff", path.read_text()), path.name
    for path in (SITE / "from_tensorflow.html", SITE / "why.html"):
        for table in article(path).find_all("table"):
            columns = len(table.find("tr").find_all("th"))
            assert ("cards" in table["class"]) == (columns >= 3)
            for row in table.find("tbody").find_all("tr") if columns >= 3 else ():
                assert "name" in row.find("td")["class"]  # shown on a phone, whatever its heading


def test_the_pages_have_an_icon():
    (icon,) = page(SITE / "index.html").find_all("link", rel="icon")
    assert (SITE / icon["href"].partition("?")[0]).is_file()
