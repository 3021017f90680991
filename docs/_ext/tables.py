"""Keep tables readable where they have little room.

On a phone, each cell of a wide table carries the heading of its column: `_static/site.css` hides
these labels on wide screens, and on narrow ones shows each row as a card, whose title is the first
cell. Long names in tables and headings may break between their words.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform


class Cards(SphinxPostTransform):
    """Label the cells of every table with three or more columns."""

    default_priority = 900
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        """Do it."""
        for table in self.document.findall(nodes.table):
            head, body = next(table.findall(nodes.thead), None), next(table.findall(nodes.tbody))
            headings = [entry.astext() for entry in head.findall(nodes.entry)] if head else []
            if len(headings) < 3:
                continue
            table["classes"].append("cards")
            for row in body.findall(nodes.row):
                next(row.findall(nodes.entry))["classes"].append("name")
                for heading, cell in zip(headings, row.findall(nodes.entry), strict=True):
                    if heading and cell.astext() and isinstance(cell[0], nodes.paragraph):
                        if len(cell.astext()) <= 22 and "name" not in cell["classes"]:
                            cell["classes"].append("short")
                        cell[0].insert(0, nodes.inline("", heading, classes=["label"]))


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
