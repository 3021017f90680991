"""Keep tables readable where they have little room.

On a phone, a table is a list of cards, one for each row: `_static/site.css` hides the headings, and
shows the label that each cell carries. The first cell is the title of its card. Columns with the
same value share one label, and long code keeps its words together as long as it fits on a line.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

LINE = 38  # characters of code on a line of a phone
NAME = 16  # more than that do not fit into one of two columns
SHORT = 14  # what fits beside two others


class Cards(SphinxPostTransform):
    """Label the cells of tables that have many columns, or long names in two."""

    default_priority = 900
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        """Do it."""
        for table in self.document.findall(nodes.table):
            head, body = next(table.findall(nodes.thead), None), next(table.findall(nodes.tbody))
            headings = [entry.astext() for entry in head.findall(nodes.entry)] if head else []
            code = list(table.findall(nodes.literal))
            for name in code:
                if len(name.astext()) <= LINE:
                    name["classes"].append("whole")
            if len(headings) > 2 or any(len(name.astext()) > NAME for name in code):
                table["classes"].append("cards")
                for row in body.findall(nodes.row):
                    _label(list(row.findall(nodes.entry)), headings)


def _label(cells: list[nodes.entry], headings: list[str]) -> None:
    """Label the cells of a row, and leave out of the card what is empty or a repetition."""
    cells[0]["classes"].append("name")
    alike: dict[str, list[int]] = {}
    for i, cell in enumerate(cells[1:], 1):
        # A row of many columns compares them. With fewer, one "the same" is not like another.
        key = cell.astext() if len(cells) > 3 else f"{i}: {cell.astext()}"
        if not cell.astext():
            cell["classes"].append("left-out")
        elif isinstance(cell[0], nodes.paragraph):
            alike.setdefault(key, []).append(i)
    for first, *others in alike.values():
        label = ", ".join(headings[i] for i in (first, *others))
        if others and len(others) == len(cells) - 2:
            label = "all"
        for i in others:
            cells[i]["classes"].append("left-out")
        if len(cells) > 2:
            cells[first][0].insert(0, nodes.inline("", label, classes=["label"]))
            if max(len(cells[first].astext()) - len(label), len(label) / 2) <= SHORT:
                cells[first]["classes"].append("short")


_PLACE = re.compile(r"<(t[dh]|h\d)[ >].*?</\1>", re.DOTALL)
_NAME = re.compile(r'(?<=<span class="pre">)[^<]{13,}')
_SEAM = re.compile(r"(?<=[._/(=])(?=\w)|(?<=[a-z])(?=[A-Z])")


def let_names_break(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    """Put `<wbr>` between the words of the long names in tables and headings."""
    if "body" in context:
        context["body"] = _PLACE.sub(
            lambda place: _NAME.sub(lambda name: _SEAM.sub("<wbr>", name[0]), place[0]),
            context["body"],
        )


def setup(app: Any) -> dict[str, Any]:
    """Register both."""
    app.add_post_transform(Cards)
    app.connect("html-page-context", let_names_break)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
