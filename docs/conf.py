"""Settings of the site: `sphinx-build docs docs/_build`."""

import pathlib
import shutil

import tfgrad_jax

project = "tfgrad_jax"
author = "The tfgrad_jax authors"
release = tfgrad_jax.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build", "jupyter_execute"]
nb_execution_mode = "off"  # the notebooks keep their outputs; the tests execute them
autodoc_typehints = "none"
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

# The notebooks, and the examples that pages link to, stand outside of the site's folder.
_here = pathlib.Path(__file__).parent
for _folder in ("notebooks", "examples"):
    shutil.copytree(_here.parent / _folder, _here / _folder, dirs_exist_ok=True)
