"""The site as it is built: `sphinx-build docs docs/_build`, then these tests.

Skipped where it is not built; `nox -f .ci/noxfile.py -s docs` does both.
"""

import copy
import json
import math
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


def test_pictures_follow_the_theme():
    pictures = [*(SITE / "_images").glob("*.svg")]
    assert len(pictures) >= 21  # one for each gradient of the gallery
    for path in pictures:
        assert not re.search(r"#000000|#ffffff", path.read_text()), path.name


@every_page
def test_wide_tables_become_cards_on_a_phone(path):
    for table in article(path).select("table.docutils:has(thead)"):
        columns = len(table.find("tr").find_all("th"))
        assert columns < 3 or "cards" in table["class"]
        for row in table.find("tbody").find_all("tr") if "cards" in table["class"] else ():
            assert "name" in row.find("td")["class"]  # shown on a phone, whatever its heading
            for cell in row.find_all("td")[1:] if columns >= 3 else ():
                said = cell.get_text(strip=True) and "left-out" not in cell.get("class", ())
                assert bool(cell.select(".label")) == bool(said)


def test_a_card_says_once_what_is_the_same_for_several_columns():
    found = (row for path in PAGES for row in article(path).select("table.cards tr:has(td)"))
    rows = {
        row.find("td").get_text(): [x.get_text() for x in row.select(".label")] for row in found
    }
    assert rows["call it"] == ["all"]
    assert rows["grad by w"] == [", ".join(PEERS), "tfgrad_jax"]


PEERS = [
    "jax.custom_gradient",
    "jax.custom_vjp",
    "jax.custom_jvp",
    "equinox.filter_custom_vjp",
    "flax.nnx.custom_vjp",
]


@cache
def style_rules():
    """Return what the theme and `site.css` declare: window widths in em, selectors, values."""
    found, around = [], []
    for name in ("styles/furo.css", "site.css"):
        text = re.sub(r"/\*.*?\*/", "", (SITE / "_static" / name).read_text(), flags=re.S)
        for before, brace in re.findall(r"([^{}]*)([{}])", text):
            if brace == "{":
                around.append(before.strip())
            elif not (selectors := around.pop()).startswith("@"):
                media = " ".join(around)
                low, high = (re.search(rf"{m}-width: ?([\d.]+)em", media) for m in ("min", "max"))
                widths = float(low[1]) if low else 0, float(high[1]) if high else math.inf
                pairs = (pair.partition(":") for pair in before.split(";"))
                values = {name.strip(): value.strip() for name, _, value in pairs}
                found.append((widths, re.split(r",\s*", selectors), values))
    return found


def style(selector, name, pixels):
    """Return what the last rule of a selector says in a window of so many pixels."""
    found = [
        values[name]
        for (low, high), selectors, values in style_rules()
        if low <= pixels / 16 <= high and selector in selectors and name in values
    ]
    return found[-1] if found else None


windows = pytest.mark.parametrize("pixels", [390, 760, 1009, 1024, 1100, 1184, 1300, 1440, 1600])


@windows
def test_no_page_is_cut_off_at_the_right(pixels):
    """Either the columns have room beside each other, or that of the text gives way."""
    width = style(".content", "width", pixels)
    if pixels / 16 > 63 and width != "100%":
        sidebar = float(style(".sidebar-drawer", "min-width", pixels).removesuffix("em"))
        wanted = sidebar + float(width.removesuffix("em"))
        gives_way = all(style(s, "min-width", pixels) == "0" for s in (".main", ".content"))
        assert wanted <= pixels / 16 - 6 or gives_way


@windows
def test_code_is_not_much_smaller_than_text(pixels):
    size = style(".highlight pre", "font-size", pixels)
    assert size.endswith("rem") and 0.77 <= float(size.removesuffix("rem")) <= 0.9


def test_the_pages_have_an_icon():
    (icon,) = page(SITE / "index.html").find_all("link", rel="icon")
    assert (SITE / icon["href"].partition("?")[0]).is_file()
