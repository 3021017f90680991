"""Settings of the site: `sphinx-build docs docs/_build`.

The build puts the mistakes of `tests/errors/misuses.py` on the page of errors, and the code of
`examples/ports` on that of the ports (`_ext/filled.py`). `docs/_ext/gallery.py` writes the gallery.
"""

import pathlib
import sys

import tfgrad_jax

_here = pathlib.Path(__file__).parent
sys.path[:0] = [str(_here / "_ext"), str(_here.parent)]

project = "tfgrad_jax"
author = "The tfgrad_jax authors"
copyright = author
release = version = tfgrad_jax.__version__
html_title = f"{project} {release}"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "docstrings",
    "filled",
    "mathml",
    "tables",
]
exclude_patterns = ["_build", "_ext", "jupyter_execute"]
suppress_warnings = ["mystnb.unknown_mime_type", "toc.empty_glob"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks keep their outputs; the tests execute them
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # one signature for each function: the docstring says the types
autodoc_preserve_defaults = True
maximum_signature_line_length = 90  # one parameter a line in what is longer
default_role = "code"  # `x` in a docstring
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
pygments_style = "a11y-light"  # contrast of 4.5 or more, as in monokai
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = ":not(.highlight-output):not(.highlight-text):not(.output) > .highlight > pre"
