"""Every misuse of `misuses.py` raises what it should, says what helps, and leaves JAX usable."""

import functools
import re

import jax
import pytest
from misuses import MISUSES, ROOT, Misuse, message, run
from support.helpers import sine

ALL = [(section, misuse) for section, misuses in MISUSES.items() for misuse in misuses]


@functools.cache
def said(misuse: Misuse, jitted: bool = False) -> str:
    """Return what a misuse says; assert of what kind it is, and that JAX is usable after it."""
    with pytest.raises(misuse.error) as caught:
        run(misuse, jitted)
    assert type(caught.value) is misuse.error
    assert jax.grad(sine)(0.0) == 7
    return f"{misuse.error.__name__}: {message(caught.value)}"


@pytest.mark.parametrize("misuse", [pytest.param(m, id=m.title) for _, m in ALL])
def test_it_says_what_helps(misuse):
    text = said(misuse)
    for words in misuse.says:
        assert words in text, text
    if misuse.of:
        assert_names(text, misuse)
    if misuse.jitted:
        # JAX transposes while it lowers, and has no lines of the rule then.
        assert said(misuse, jitted=True) in (text, re.sub(r", at model\.py:\d+", "", text))


def assert_names(text, misuse):
    """Assert that it names the function, and each by the line of its `def` or decorator."""
    found = re.findall(r"`([^` ]+)` \(model\.py:(\d+)\)", text)
    assert misuse.of in [name for name, _ in found], text
    for name, line in found:
        name = name.rpartition(".")[2]
        start = "lambda" if name == "<lambda>" else f"def {name}("
        lines = misuse.code.splitlines()[int(line) - 1 :]
        own = next(i for i, line in enumerate(lines) if start in line)
        assert all(line.lstrip().startswith("@") for line in lines[:own])


# --- the page of errors ---------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "errors.md").read_text()


def terms(page):
    """Return what is quoted in the terms of its definition lists."""
    found = re.findall(r"^(`.+`)\n: ", page, re.MULTILINE)
    return [words for line in found for words in re.findall(r"`([^`]+)`", line)]


def stands_for(term, said):
    """Return whether it quotes this: any number is as good, and `...` is any text."""
    pattern = re.escape(term.replace("...", "\0")).replace("\0", ".*")
    return re.search(re.sub(r"\d+", r"\\d+", pattern), said.replace("`", ""), re.DOTALL)


def test_the_page_shows_every_section():
    assert re.findall(r"^<!-- mistakes: (.+) -->$", PAGE, re.MULTILINE) == list(MISUSES)


@pytest.mark.parametrize("section", MISUSES)
def test_the_words_of_the_page_are_said(section):
    before, _, _ = PAGE.partition(f"<!-- mistakes: {section} -->\n")
    unsaid = terms(before.rpartition("<!-- mistakes:")[2])
    for misuse in MISUSES[section]:
        if not unsaid:
            return
        unsaid = [term for term in unsaid if not stands_for(term, said(misuse))]
    assert not unsaid
