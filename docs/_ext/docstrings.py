"""Show the type lines of a docstring, `f : a -> b`, as they are written there.

Docstrings that only Python wrote, those of `str` and of the fields of a tuple, are left out.
"""

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


def leave_out_pythons(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Replace what says nothing about the package."""
    if name.endswith(".__version__"):
        lines[:] = ["The version of the package, a string.", ""]
    elif lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def setup(app: Any) -> dict[str, Any]:
    """Run before napoleon."""
    app.connect("autodoc-process-docstring", keep_type_lines, priority=100)
    app.connect("autodoc-process-docstring", leave_out_pythons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
