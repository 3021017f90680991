"""Write the pages and pictures of the gallery from `examples/gallery.py`.

Run it after a change there: `python docs/_ext/gallery.py`. What it writes to `docs/gallery/` is
kept in the repository, so that a clone has it; a test compares the pages.
"""

import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.gallery import GALLERY, Entry  # noqa: E402

FOLDER = ROOT / "docs" / "gallery"
# Ink that is readable on white and on black; the background is the page's own.
INK, VALUE, GRADIENT, OTHER = "#767676", "#3d8bd9", "#e0762f", "#3aa66b"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "tfgrad_jax",  # the same code gives the same file
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "figure.constrained_layout.use": True,
}
INDEX = """\
# Gallery

Twenty-one gradients from papers and libraries, each with its code and its source. The pictures show
the value in blue and the gradient in orange and green, over the first argument or what the page
names; `dy` is the gradient of the loss by the value, 1 where no other is given. The code is in
`examples/gallery.py`; `python examples/gallery.py` prints the report of `check_gradient` on each.

{groups}

Your gradient is not here? [Getting started](../getting_started.md) shows how to write one, and the
[how-tos](../howto/index.md) train with some of these.

```{{toctree}}
:hidden:

exact
surrogate
```
"""
GROUPS = {
    "exact": (
        "The derivative, computed better",
        "JAX could differentiate these functions. The declared gradient is the same derivative, "
        "but it is finite, cheap or small in memory where JAX's is not.",
    ),
    "surrogate": (
        "Not the derivative, on purpose",
        "The derivative of these functions is zero or of no use. For these, "
        '`check_gradient(f, x, expect="surrogate")` measures the difference instead of failing.',
    ),
}
GROUP = """\
# {title}

{about} The code is in `examples/gallery.py`, which begins with

```py
import jax
import jax.numpy as jnp
from tfgrad_jax import custom_gradient
```

[The gallery](index.md) shows all pictures.

{sections}
"""
SECTION = """\
({name})=
## {title}

{about}

<img src="{name}.svg" alt="{name} and its declared gradient" class="curve">

```py
{code}
```

Source: {source}.
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    found, shown = {}, []
    for group, (title, about) in GROUPS.items():
        entries = [e for e in GALLERY if e.surrogate is (group == "surrogate")]
        sections = "\n".join(SECTION.format(**_fields(entry)) for entry in entries)
        found[f"{group}.md"] = GROUP.format(title=title, about=about, sections=sections.strip())
        links = "\n\n".join(
            f"[![{e.name} and its gradient]({e.name}.svg) {e.title}]({group}.md#{e.name})"
            for e in entries
        )
        grid = f"::::{{div}} gallery-grid\n{links}\n::::"
        shown.append(f"## [{title}]({group}.md)\n\n{grid}")
    return {"index.md": INDEX.format(groups="\n\n".join(shown)), **found}


def _fields(entry: Entry) -> dict[str, Any]:
    return {key: getattr(entry, key) for key in ("name", "title", "about", "code", "source")}


def draw(entry: Entry) -> Any:
    """Draw the value of an entry and its gradients."""
    from matplotlib.figure import Figure

    x, lines = entry.lines()
    figure = Figure(figsize=(4, 2.4))
    axes = figure.subplots()
    axes.axhline(0, color=INK, lw=0.5)
    colors = iter((GRADIENT, OTHER))
    for label, y in lines.items():
        plain = label in ("value", "upstream")
        axes.plot(x, y, color=VALUE if plain else next(colors), lw=2, label=label)
    axes.legend()
    return figure


def write() -> None:
    """Write everything."""
    from matplotlib import rc_context

    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    with rc_context(STYLE):
        for entry in GALLERY:
            file = FOLDER / f"{entry.name}.svg"
            draw(entry).savefig(file, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    write()
