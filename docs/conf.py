"""Settings of Sphinx: `make docs`."""

import re

import pyflatness

project = "pyflatness"
author = copyright = "The pyflatness developers"  # noqa: A001
version = release = pyflatness.__version__

extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"),
    *("myst_parser", "sphinx_copybutton", "sphinx_mathjax_offline"),
]
exclude_patterns = ["papers/*.md"]
html_theme = "furo"
html_title = f"pyflatness {release}"
html_static_path: list[str] = []

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.strikethrough"]

autodoc_typehints = "none"  # they are in the signature
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _source(app, docname, source):
    """Lead links to files outside of docs/ to where the page is built: the front page has the README's text."""
    if docname == "index":
        source[0] = re.sub(r"\]\(\s*docs/", "](", source[0])


def setup(app):
    """Connect what pages are read through."""
    app.connect("source-read", _source)
