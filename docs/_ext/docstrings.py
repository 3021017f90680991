"""Show the type lines of a docstring, `f : a -> b`, as they are written there."""

from typing import Any


def keep_type_lines(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Make a literal block of each paragraph whose every line is such a type."""
    paragraphs = "\n".join(lines).split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        if all(" : " in line and " -> " in line for line in paragraph.splitlines() or [""]):
            paragraphs[i] = "::\n\n" + "\n".join("    " + line for line in paragraph.splitlines())
    lines[:] = "\n\n".join(paragraphs).splitlines()


def setup(app: Any) -> dict[str, Any]:
    """Run before napoleon."""
    app.connect("autodoc-process-docstring", keep_type_lines, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
