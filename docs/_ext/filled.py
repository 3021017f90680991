"""Fill in on the site what a clone has in another file: there, the pages name or link to it.

- `<!-- mistakes: SECTION -->` becomes the mistakes of that section in `tests/errors/misuses.py`,
  each with its message, folded;
- an item that links to a Python file becomes its code, folded;
- a line that is a link to a page outside of `docs` becomes that page.
"""

import re
import textwrap
from typing import Any

from sphinx.util.display import status_iterator

from tests.errors.misuses import MISUSES, Misuse, message, run

LINES = 12  # of a message; more are cut
WIDTH = 84  # in columns: what fits without scrolling
SECTION = """\
::::{{dropdown}} {count} mistakes, and the message for each
{entries}
::::
"""
ENTRY = """\
**{title}**

```py
{code}
```

```text
{said}
```
"""


def _entry(misuse: Misuse) -> str:
    try:
        run(misuse)
    except misuse.error as error:
        said = f"{type(error).__name__}: {message(error)}"
    else:
        raise AssertionError(f"no error: {misuse.title}")
    lines = [textwrap.fill(line, WIDTH, drop_whitespace=False) for line in said.splitlines()]
    if len(lines) > LINES:  # JAX's own, with a traceback
        lines[LINES // 2 :] = ["..."]
    return ENTRY.format(title=misuse.title, code=misuse.code, said="\n".join(lines))


def _mistakes(found: re.Match[str]) -> str:
    misuses = MISUSES[found[1]]
    doing = f"making the mistakes of errors.md, {found[1]}... "
    tried = status_iterator(misuses, doing, "brown", len(misuses), stringify_func=lambda m: m.title)
    return SECTION.format(count=len(misuses), entries="\n".join(map(_entry, tried)))


FILLED = {
    r"^<!-- mistakes: (.+) -->$": _mistakes,
    r"^- \[(`.+?`)\]\((.+\.py)\)(: .*)$": r":::{dropdown} \1\3\n```{literalinclude} \2\n```\n:::",
    r"^\[.+?\]\((\.\./[A-Z]+\.md)\)$": r"```{include} \1\n```",
}


def fill(app: Any, name: str, content: list[str]) -> None:
    """Put it into the page."""
    for pattern, new in FILLED.items():
        content[0] = re.sub(pattern, new, content[0], flags=re.MULTILINE)


def setup(app: Any) -> dict[str, Any]:
    """Run when a page has been read."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
