"""Every limit of `limits.py` exists, has the way out that it names, and stands in the README."""

import re
from pathlib import Path

import pytest
from helpers import assert_same
from limits import LIMITS, rendered

README = Path(__file__).parents[1] / "README.md"


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


def test_the_list_of_the_readme_is_made_of_the_limits():
    """`python tests/limits.py` prints it; lines may be broken elsewhere."""
    _, _, section = README.read_text().partition("\n## Limits\n")
    section, _, _ = section.partition("\n## ")
    items = [" ".join(item.split()) for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]
    assert items == [limit.sentence for limit in LIMITS.values()], f"should be:\n{rendered()}"
