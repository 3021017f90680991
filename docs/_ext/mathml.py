"""Write formulas as MathML: they need no script, no font and no network to be read."""

from typing import Any

import latex2mathml.converter
from docutils import nodes


def inline(self: Any, node: Any) -> None:
    """Write a formula within a line."""
    self.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def block(self: Any, node: Any) -> None:
    """Write a formula that stands alone; a wide one scrolls by itself."""
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    self.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
