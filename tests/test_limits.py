"""Every limit of `limits.py` exists, has the way out that it names, and stands on its page."""

from pathlib import Path

import pytest
from limits import LIMITS, rendered
from support.helpers import assert_same

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_is_there(name):
    limit = LIMITS[name]
    if not limit.applies():
        pytest.skip("not with this JAX")
    with pytest.raises(limit.error, match=limit.message):
        assert_same(limit.run(False), limit.expected)


@pytest.mark.parametrize("name", LIMITS)
def test_the_way_out_works(name):
    limit = LIMITS[name]
    assert_same(limit.run(True), limit.expected)


def test_the_page_lists_the_limits():
    """`python tests/limits.py` prints the list; lines may be broken elsewhere."""
    page = (ROOT / "docs" / "limits.md").read_text()
    section = page[page.index("## ") :].partition("\n## Versions")[0]
    assert section.split() == rendered().split(), f"should be:\n{rendered()}"
