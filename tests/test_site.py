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

ROOT = Path(__file__).parent.parent
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


def test_the_pages_are_there():
    names = {str(p.relative_to(SITE).with_suffix("")) for p in PAGES}
    assert {
        "index", "install", "getting_started", "gallery/index", "howto/index", "guide",
        "distributed", "from_tensorflow", "from_custom_vjp", "errors", "faq", "limits",
        "performance", "interop", "peers", "design", "api/index", "changelog",
    } <= names  # fmt: skip


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


@every_page
def test_a_page_says_what_it_is_for_and_where_to_go_on(path):
    if path.stem not in ("changelog", "design"):
        assert article(path).find("h1").find_next(["p", "h2", "pre", "table"]).name == "p"
        assert targets(path) - {path.resolve()}


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
    "unhashable": "faq",
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


def test_the_reference_has_no_docstring_of_python_itself():
    text = article(SITE / "api/decorators.html").get_text()
    assert "Alias for field" not in text
    assert "Create a new string" not in text


def test_the_type_lines_keep_their_lines():
    (block,) = (
        pre
        for pre in page(SITE / "api/decorators.html").find_all("pre")
        if "f : a ->" in pre.get_text()
    )
    assert len(block.get_text().strip().splitlines()) == 2


def test_the_landing_page_has_code_a_picture_and_three_doors():
    landing = article(SITE / "index.html")
    code = landing.find("div", class_="highlight-python").get_text().strip()
    assert 10 <= len(code.splitlines()) <= 14
    for width in ("wide", "narrow"):  # `site.css` shows one of the two
        assert landing.find("img", class_=f"picture {width}")
    doors = [card.get_text() for card in landing.find_all(class_="sd-card")]
    assert len(doors) == 3
    for door in ("I am porting from TensorFlow", "I have a gradient in mind", "I know custom_vjp"):
        assert any(door in text for text in doors)


@cache
def clicks():
    """Return how many links, in the text of pages, lead from the landing page to each page."""
    found = {(SITE / "index.html").resolve(): 0}
    queue = list(found)
    for path in queue:
        for target in sorted(targets(path) - set(found)):
            if target.suffix == ".html":
                found[target] = found[path] + 1
                queue.append(target)
    return found


NEAR = [
    "from_tensorflow", "from_custom_vjp", "getting_started", "gallery/index", "api/index",
    "interop", "peers", "performance", "limits", "design", "install", "distributed", "errors",
    "howto/clip", "howto/quantization", "howto/spiking", "howto/kernels", "howto/external",
    "howto/keras", "howto/sharding", "howto/nan", "howto/explain", "howto/implicit",
    "howto/ode", "notebooks/01_custom_gradient", "notebooks/02_layers_with_weights",
    "notebooks/03_forward_mode_and_checks",
]  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_two_clicks_from_the_landing_page(name):
    assert clicks().get((SITE / f"{name}.html").resolve(), 9) <= 2


def test_every_page_is_linked_from_the_text_of_another():
    assert {p.stem for p in PAGES if p.resolve() not in clicks()} <= {"changelog"}


def test_pictures_follow_the_theme_and_wide_tables_fit_a_phone():
    pictures = [*(SITE / "_images").glob("*.svg")]
    assert len(pictures) >= 42  # two for each gradient of the gallery, and two of the landing page
    for path in pictures:
        assert not re.search(r"#000000|#ffffff", path.read_text()), path.name
    for table in article(SITE / "from_tensorflow.html").find_all("table"):
        columns = len(table.find("tr").find_all("th"))
        assert ("cards" in table["class"]) == (columns >= 3)
