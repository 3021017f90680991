"""Make the pages of the gallery and the pictures of the site, from the code that they show.

Everything goes to `docs/gallery/`, which is not kept in the repository.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import rc_context
from matplotlib.figure import Figure
from sphinx.util.display import progress_message, status_iterator

from examples.gallery import GALLERY, Entry, binarize

FOLDER = pathlib.Path(__file__).parent.parent / "gallery"
# Ink that is readable on white and on black; the background is the page's own.
INK, VALUE, GRADIENT, OTHER = "#767676", "#3d8bd9", "#e0762f", "#3aa66b"
STYLE = {
    "svg.hashsalt": "tfgrad_jax",  # the same code gives the same file
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "legend.frameon": False,
    "legend.fontsize": "small",
    "figure.constrained_layout.use": True,
}


# --- the gallery ---------------------------------------------------------------------------------

PAGE = """\
# Gallery

Twenty-one gradients from papers and libraries, each with its code, its source and the report of
`check_gradient`. Each picture is over the first argument, or what its page names; `dy` is the
upstream, 1 where no other is given. The code is in `examples/gallery.py`, which begins with

```py
import jax
import jax.numpy as jnp
from tfgrad_jax import custom_gradient
```

## [{exact_title}](exact.md)

::::{{div}} gallery-grid
{exact}
::::

## [{surrogate_title}](surrogate.md)

::::{{div}} gallery-grid
{surrogate}
::::

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

{about} The code is in `examples/gallery.py`; [the gallery](index.md) shows all pictures.

{sections}
"""

SECTION = """\
({name})=
## {title}

{about}

```{{image}} {name}.svg
:alt: {name} (blue) and its declared gradient (orange), over its first argument
:class: curve
```

```py
{code}
```

```text
{report}
```

Source: {source}.
"""


def write_gallery() -> None:
    """Write a page for each group, with a section and a picture for each entry."""
    sections: dict[str, str] = {}
    doing = "drawing and checking the gallery... "
    for entry in status_iterator(
        GALLERY, doing, "brown", len(GALLERY), stringify_func=lambda entry: entry.name
    ):
        draw(entry, (5.2, 2.6), thumbnail=False).savefig(FOLDER / f"{entry.name}.svg", **SAVE)
        draw(entry, (2.4, 1.8), thumbnail=True).savefig(FOLDER / f"{entry.name}-small.svg", **SAVE)
        sections[entry.name] = section(entry)
    shown = {}
    for group, (title, about) in GROUPS.items():
        entries = [e for e in GALLERY if e.surrogate is (group == "surrogate")]
        joined = "\n".join(sections[entry.name] for entry in entries)
        text = GROUP.format(title=title, about=about, sections=joined)
        (FOLDER / f"{group}.md").write_text(text)
        shown[group] = "\n\n".join(
            f"[![{e.name} and its gradient]({e.name}-small.svg) {e.title}]({group}.md#{e.name})"
            for e in entries
        )
        shown[f"{group}_title"] = title
    (FOLDER / "index.md").write_text(PAGE.format(**shown))


def section(entry: Entry) -> str:
    """Return the section of an entry."""
    return SECTION.format(
        name=entry.name,
        title=entry.title,
        about=entry.about,
        code=entry.code,
        report=entry.check(),
        source=entry.source,
    )


SAVE: dict[str, Any] = {"transparent": True, "metadata": {"Date": None}}


def draw(entry: Entry, size: tuple[float, float], thumbnail: bool) -> Figure:
    """Draw the value of an entry and its gradient."""
    x, lines = entry.lines()
    figure = Figure(figsize=size)
    axes = figure.subplots()
    axes.axhline(0, color=INK, lw=0.5)
    colors = iter((GRADIENT, OTHER))
    for label, y in lines.items():
        plain = label in ("value", "upstream")
        axes.plot(x, y, color=VALUE if plain else next(colors), lw=2, label=label)
    if thumbnail:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        short = [label.replace("gradient, upstream ", "dy = ") for label in lines]
        figure.legend(
            axes.lines[1:],  # below the axis, where three labels have room
            short,
            loc="outside lower center",
            ncols=len(short),
            fontsize=10.5,
            handlelength=0.8,
            handletextpad=0.4,
            columnspacing=0.8,
        )
    else:
        axes.legend()
    return figure


# --- the landing page ----------------------------------------------------------------------------


def write_landing() -> None:
    """Train binary units with and without a declared gradient, and draw what they learned."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, 400)
    side = rng.integers(0, 2, 400)
    points = np.stack([np.cos(angle), np.sin(angle)], 1) * np.where(side, -1, 1)[:, None]
    points += np.where(side, 1, 0)[:, None] * [1, 0.5] + 0.15 * rng.standard_normal((400, 2))
    points, side = jnp.asarray(points - [0.5, 0.25], jnp.float32), jnp.asarray(side, jnp.float32)

    units = {"jnp.sign": jnp.sign, "binarize": binarize}
    trained = [(name, _trained(unit, points, side)) for name, unit in units.items()]
    for name, size, panels in (
        ("landing", (9, 2.9), [[0, 1, 2]]),
        ("landing-narrow", (4.2, 4.6), [[0, 0], [1, 2]]),  # for a phone
    ):
        figure = Figure(figsize=size)
        _draw_landing(figure.subplot_mosaic(panels), trained, points, side)
        figure.savefig(FOLDER / f"{name}.svg", **SAVE)


def _draw_landing(panels: Any, trained: Any, points: jax.Array, side: jax.Array) -> None:
    x = jnp.linspace(-2, 2, 801)
    function = panels[0]
    function.plot(x, binarize(x), color=VALUE, lw=2, label="binarize(x)")
    function.plot(x, jax.vmap(jax.grad(binarize))(x), color=GRADIENT, lw=2, label="its gradient")
    function.legend(loc="lower right")
    function.set(title="the function", yticks=[-1, 0, 1])
    for axes, (name, predict) in zip((panels[1], panels[2]), trained, strict=True):
        ticks = jnp.linspace(-2, 2, 161), jnp.linspace(-1.6, 1.6, 129)
        grid = jnp.stack(jnp.meshgrid(*ticks), -1)
        accuracy = float(jnp.mean((predict(points) > 0) == (side > 0)))
        colors = {"levels": [-0.5, 0.5, 1.5], "colors": [VALUE, GRADIENT], "alpha": 0.25}
        axes.contourf(*ticks, predict(grid) > 0, **colors)
        for value, color in ((0, VALUE), (1, GRADIENT)):
            axes.plot(*points[side == value].T, ".", ms=3, color=color)
        axes.set(title=f"with {name}: {accuracy:.0%}", xticks=[], yticks=[])


def _trained(unit: Any, points: jax.Array, side: jax.Array) -> Any:
    """Return the logit of a network with two layers of such units, after training."""
    sizes = [(2, 16), (16, 16), (16, 1)]
    keys = jax.random.split(jax.random.key(1), len(sizes))
    params = [
        (jax.random.normal(k, s) / s[0] ** 0.5, jnp.zeros(s[1]))
        for k, s in zip(keys, sizes, strict=True)
    ]

    def logit(params: Any, x: jax.Array) -> jax.Array:
        for w, b in params[:-1]:
            x = unit(x @ w + b)
        w, b = params[-1]
        return (x @ w + b)[..., 0]

    def loss(params: Any) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logit(params, points), side).mean()

    adam = optax.adam(0.02)

    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        updates, state = adam.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), None, 1000)
    return lambda x: logit(params, x)


def write(app: Any) -> None:
    """Make everything."""
    FOLDER.mkdir(exist_ok=True)
    with rc_context(STYLE):
        with progress_message("training two networks for the landing page"):
            write_landing()
        write_gallery()


def setup(app: Any) -> dict[str, Any]:
    """Run before Sphinx reads the pages."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
