"""Every limit of `limits.py` exists, has the way out that it names, and stands on its page."""

import itertools
import re
from pathlib import Path

import pytest
from limits import GROUPS, LIMITS, rendered
from support.helpers import assert_same

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_is_there(name):
    limit = LIMITS[name]
    if not limit.applies():
        pytest.skip("not with this JAX")
    with pytest.raises(limit.error, match=limit.message):
        limit.shows()


@pytest.mark.parametrize("name", LIMITS)
def test_the_way_out_works(name):
    limit = LIMITS[name]
    assert_same(limit.instead(), limit.expected)


def test_every_limit_has_a_reason():
    for limit in LIMITS.values():
        assert limit.sentence.endswith(".") and limit.reason.endswith(".")


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_the_list_of_the_page_is_made_of_the_limits(page):
    """`python tests/limits.py` prints it; lines may be broken elsewhere."""
    heading, _, _ = rendered(page).partition("\n")
    _, _, section = (ROOT / page).read_text().partition("imits\n\n")
    section = section[section.index(heading[:20]) :]
    section = re.split(r"^## |^Rarer ", section, maxsplit=1, flags=re.MULTILINE)[0]
    assert section.split() == rendered(page).split(), f"should be:\n{rendered(page)}"


def test_every_limit_is_in_one_group():
    assert sorted(itertools.chain(*GROUPS.values())) == sorted(LIMITS)
