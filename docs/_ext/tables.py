"""Let wide tables be read on a phone: each cell carries the heading of its column.

`_static/site.css` hides these labels on wide screens, and on narrow ones shows each row as a card.
"""

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
                for heading, cell in zip(headings, row.findall(nodes.entry), strict=True):
                    if heading and cell.astext() and isinstance(cell[0], nodes.paragraph):
                        cell[0].insert(0, nodes.inline("", heading, classes=["label"]))


def setup(app: Any) -> dict[str, Any]:
    """Register the transform."""
    app.add_post_transform(Cards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
