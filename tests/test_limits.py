"""Every limit of `limits.py` exists, has the way out that its sentence names, and a sentence."""

import re
from pathlib import Path

import pytest
from limits import LIMITS
from support.helpers import assert_same

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"


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


def test_every_limit_has_a_sentence_on_the_page():
    sentences = re.findall(r"^- .*?^  <!-- (.+?) -->$", PAGE.read_text(), re.M | re.S)
    assert sorted(sentences) == sorted(LIMITS)
