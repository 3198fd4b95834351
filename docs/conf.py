"""Settings of Sphinx: `make docs`."""

import re
import warnings
from pathlib import Path

import pyflatness
from pyflatness.cli import measures

project = "pyflatness"
author = copyright = "The pyflatness developers"  # noqa: A001
version = release = pyflatness.__version__

extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"),
    *("sphinx.ext.mathjax", "sphinx.ext.viewcode"),
    *("myst_parser", "sphinx_copybutton", "sphinx-mathjax-offline", "sphinx_gallery.gen_gallery"),
]
exclude_patterns = ["papers/*.md", "examples"]
html_theme = "furo"
html_title = f"pyflatness {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]

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

sphinx_gallery_conf = {  # docs/examples/*.py, which are run, become pages in docs/gallery, which git ignores
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "ignore_repr_types": r"tuple|matplotlib",  # what calls that draw return
    "default_thumb_file": str(Path(__file__).with_name("front.png")),  # for an example without a figure
    "run_stale_examples": True,  # the package may have changed where a script has not
    "image_srcset": ["2x"],
    "show_signature": False,
    "write_computation_times": False,
    "copyfile_regex": "",
}

ROOT = Path(__file__).resolve().parent.parent
FROM_ROOT = {"changelog": "CHANGELOG", "contributing": "CONTRIBUTING", "security": "SECURITY"}
"""Pages that are files of the repository's root, with what stands in docs/ behind them."""


def _source(app, docname, source):
    """Lead links to files outside of docs/, and to examples, to their pages; what has none stays as text."""
    text = source[0]
    if docname in FROM_ROOT:
        text = (ROOT / f"{FROM_ROOT[docname]}.md").read_text(encoding="utf-8") + "\n" + text
        text = re.sub(r"(\]\(\s*)docs/", r"\1", text)
    pages = {"README.md": "index"} | {f"{name}.md": page for page, name in FROM_ROOT.items()}

    def led(link):
        words, target = link[1], link[2].strip()
        name = target.removeprefix("../")
        if example := re.fullmatch(r"examples(?:/(\w+)\.py)?", name):
            return f"[{words}](gallery/{example[1] or 'index'}.rst)"
        if name in pages:
            return f"[{words}]({pages[name]}.md)"
        outside = target.startswith("../") or (docname in FROM_ROOT and (ROOT / target).is_file())
        return words if outside else link[0]

    text = re.sub(r"(?<!!)\[([^\]\[]+)\]\(([^()#:]+)\)", led, text)
    source[0] = re.sub(r"\[[\w/-]+\.md\](?=\([\w/-]+\.md\b)", "[]", text)  # a page by its title, not its file


def _summaries(app, docname, source):
    """Put the first line of each name's docstring into the reference's first page, under its page's title."""
    if docname != "reference/index":
        return
    for page in re.findall(r"^\w+$", source[0], re.MULTILINE):
        text = (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
        names = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
        listed = "".join(f"   ~{name}\n" for name in names)
        title = text.splitlines()[0].removeprefix("# ")
        source[0] += (
            f"\n## [{title}]({page}.md)\n\n```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{listed}```\n"
        )


def _measures(app):
    """Write the page of all measures, which git ignores, from their table in the code."""
    (ROOT / "docs" / "measures.md").write_text(measures.page(), encoding="utf-8")


def _docstring(app, what, name, obj, options, lines):
    """Let |x| be a norm, and not the name of a substitution."""
    for place, line in enumerate(lines):
        parts = line.split("``")  # those at odd places are code
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[place] = "``".join(parts)


def _strict():
    """Let a warning be an error, but for that of `plt.show()` where there is no screen."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*is non-interactive")


def setup(app):
    """Connect what pages are read through, and let a warning in an example be an error of it."""
    strict = warnings.catch_warnings()
    app.connect("builder-inited", lambda app: strict.__enter__(), priority=400)  # the examples run at 500
    app.connect("builder-inited", lambda app: _strict(), priority=401)
    app.connect("builder-inited", lambda app: strict.__exit__(None, None, None), priority=600)
    app.connect("builder-inited", _measures, priority=300)
    app.connect("source-read", _source)
    app.connect("source-read", _summaries)
    app.connect("autodoc-process-docstring", _docstring)
