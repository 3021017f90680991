"""The site as it is built: `sphinx-build docs docs/_build`, then these tests.

Skipped where it is not built; `nox -f .ci/noxfile.py -s docs` does both.
"""

import re
from functools import cache
from pathlib import Path

import pytest

bs4 = pytest.importorskip("bs4")

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "_build"
if not (SITE / "index.html").is_file():
    pytest.skip("the site is not built", allow_module_level=True)

MADE = ("genindex.html", "search.html", "py-modindex.html")
PAGES = sorted(p for p in SITE.rglob("*.html") if p.name not in MADE)


@cache
def page(path):
    return bs4.BeautifulSoup(path.read_text(), "html.parser")


def article(path):
    return page(path).find("article")


def targets(path):
    """Return the pages of the site that the text of a page links to."""
    found = set()
    for link in article(path).find_all("a", href=True):
        href = link["href"].partition("#")[0]
        if href and "://" not in href:
            found.add((path.parent / href).resolve())
    return found


def test_the_pages_are_there():
    names = {str(p.relative_to(SITE).with_suffix("")) for p in PAGES}
    assert {
        "index", "install", "getting_started", "gallery/index", "howto/index", "guide",
        "from_tensorflow", "from_custom_vjp", "errors", "faq", "performance", "interop", "peers",
        "design", "api", "changelog",
    } <= names  # fmt: skip


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(SITE)))
def test_every_link_leads_to_a_page(path):
    for target in targets(path):
        assert target.exists(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(SITE)))
def test_no_formula_is_left_as_text(path):
    text = article(path)
    for code in text.find_all(["pre", "code", "math", "script"]):
        code.extract()
    page.cache_clear()  # the page is not whole any more
    assert not re.search(r"\$[^$\n]+\$|\\frac|\\sum|\\log", text.get_text())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("howto/implicit.md", "θ"),
        ("howto/complex.md", "∂"),
        ("gallery/index.md", "log"),
        ("notebooks/01_custom_gradient.ipynb", "log"),
        ("notebooks/02_layers_with_weights.ipynb", "y"),
    ],
)
def test_a_formula_becomes_one(source, words):
    built = (SITE / source).with_suffix(".html")
    formulas = article(built).find_all("math")
    assert formulas
    assert any(words in formula.get_text() for formula in formulas)
    assert all("\\" not in formula.get_text() for formula in formulas)


def test_every_public_name_has_an_entry():
    listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.M)
    built = page(SITE / "api.html")
    for name in listed:
        assert built.find(id=name) is not None, name


def test_the_type_lines_keep_their_lines():
    (block,) = (
        pre for pre in page(SITE / "api.html").find_all("pre") if "f : a ->" in pre.get_text()
    )
    assert len(block.get_text().strip().splitlines()) == 2


def test_the_page_says_whose_it_is():
    assert "The tfgrad_jax authors" in page(SITE / "index.html").find("footer").get_text()


def test_the_landing_page_has_code_a_picture_and_three_doors():
    landing = article(SITE / "index.html")
    code = landing.find("div", class_="highlight-python").get_text().strip()
    assert 10 <= len(code.splitlines()) <= 14
    assert landing.find("img", class_="picture")
    doors = [card.get_text() for card in landing.find_all(class_="sd-card")]
    assert len(doors) == 3
    for door in ("I am porting from TensorFlow", "I have a gradient in mind", "I know custom_vjp"):
        assert any(door in text for text in doors)


ROLES = {
    "a porter from TensorFlow": "from_tensorflow.html",
    "someone who quantizes or trains spiking networks": "howto/quantization.html",
    "an author of layers with weights": "notebooks/02_layers_with_weights.html",
    "a scientist with a solver": "howto/implicit.html",
    "a writer of kernels": "howto/kernels.html",
    "a user of Hessians": "notebooks/03_forward_mode_and_checks.html",
    "someone whose gradient is wrong": "howto/nan.html",
    "someone who chooses between tools": "peers.html",
    "someone who trains on many devices": "howto/sharding.html",
}


@pytest.mark.parametrize("role", ROLES)
def test_two_clicks_from_the_landing_page(role):
    goal = (SITE / ROLES[role]).resolve()
    first = targets(SITE / "index.html")
    second = set().union(*(targets(p) for p in first if p.suffix == ".html"))
    assert goal in first | second


def test_wide_tables_are_cards_on_a_phone():
    for table in article(SITE / "from_tensorflow.html").find_all("table"):
        columns = len(table.find("tr").find_all("th"))
        assert ("cards" in table["class"]) == (columns >= 3)
        if columns >= 3:
            assert table.find("tbody").find(class_="label")


def test_nothing_is_loaded_from_elsewhere():
    for path in PAGES:
        for tag in page(path).find_all(["script", "link", "img"]):
            source = tag.get("src") or tag.get("href") or ""
            assert not source.startswith(("http:", "https:", "//")), (path, source)
