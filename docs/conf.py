"""Settings of Sphinx: `make docs`."""

import re
from pathlib import Path

import pyflatness

project = "pyflatness"
author = copyright = "The pyflatness developers"  # noqa: A001
version = release = pyflatness.__version__

extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"),
    *("myst_parser", "sphinx_copybutton", "sphinx-mathjax-offline"),
]
exclude_patterns = ["papers/*.md"]
html_theme = "furo"
html_title = f"pyflatness {release}"
html_static_path: list[str] = []

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # "…" in code that shows a form

autodoc_typehints = "none"  # they are in the signature
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|pandas|matplotlib|collections)\..*|Record|.*\.(Row|Density|Quadratic|Ray|Slurm)|reset")
]
python_use_unqualified_type_names = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


ROOT = Path(__file__).resolve().parent.parent
FROM_ROOT = {"index": "README", "changelog": "CHANGELOG", "contributing": "CONTRIBUTING", "security": "SECURITY"}
"""Pages that are files of the repository's root, with what stands in docs/ behind them."""


def _source(app, docname, source):
    """Lead links to files outside of docs/ to their pages; what has none stays as text."""
    text = source[0]
    if docname in FROM_ROOT:
        text = (ROOT / f"{FROM_ROOT[docname]}.md").read_text(encoding="utf-8") + "\n" + text
        text = re.sub(r"(\]\(\s*)docs/", r"\1", text)
    pages = {f"{name}.md": page for page, name in FROM_ROOT.items()}

    def led(link):
        words, target = link[1], link[2].strip()
        name = target.removeprefix("../")
        if name in pages:
            return f"[{words}]({pages[name]}.md)"
        outside = target.startswith("../") or (docname in FROM_ROOT and (ROOT / target).is_file())
        return words if outside else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]\[]+)\]\(([^()#:]+)\)", led, text)


def _docstring(app, what, name, obj, options, lines):
    """Let |x| be a norm, and not the name of a substitution."""
    for place, line in enumerate(lines):
        parts = line.split("``")  # those at odd places are code
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[place] = "``".join(parts)


def setup(app):
    """Connect what pages are read through."""
    app.connect("source-read", _source)
    app.connect("autodoc-process-docstring", _docstring)
