"""Run ``pyflatness measures``: what can be measured, by which formula, from where, and which measure is for what.

The first is a page of the site too, which docs/conf.py writes, and the second a table of docs/which-measure.md.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules

import click
from rich import box
from rich.table import Table

from .. import measures as package
from ..measures import MEASURES
from .options import Json, command
from .output import show, show_json

COLUMNS = {  # of the table, by the attributes of a measure that fill them
    "name": "name",
    "formula": "formula",
    "source": "source",
    "granularity": "a number of each",
    "invariant": "invariant to rescalings",
    "cost": "cost",
}
_WIDTH_OF_SENTENCES = 100  # of lines in a file or pipe, to be read
CHOICE = ("want", "take", "invariant", "price")  # the columns of the table of choices
# Backticks are around what can be asked for by name; other names in them are of options.
_CHOICES = Path(__file__).with_name("choices.md").read_text(encoding="utf-8")
_TITLES, _, *CHOICES = (line.strip("| ").split(" | ") for line in _CHOICES.splitlines())


@command()
def measures(*, help_me_choose: bool = False, markdown: bool = False, as_json: Json = False) -> None:
    """Show the measures: name, formula, source, what they are invariant to, and cost.

    Args:
        help_me_choose: show which measure is for what instead.
        markdown: print Markdown: the page of measures, or the table of docs/which-measure.md.
    """
    if as_json:
        facts = [{attribute: str(getattr(measure, attribute)) for attribute in COLUMNS} for measure in MEASURES]
        show_json([dict(zip(CHOICE, choice, strict=True)) for choice in CHOICES] if help_me_choose else facts)
    elif markdown:
        click.echo(_CHOICES if help_me_choose else page(), nl=False)
    else:
        show(_choices(), width=_WIDTH_OF_SENTENCES) if help_me_choose else show(_table())


def _table() -> Table:
    table = Table("", "", box=box.SIMPLE, show_header=False, leading=1)  # one line of all columns fits no terminal
    for measure in MEASURES:
        facts = (f"{title}: {getattr(measure, attribute)!s}" for attribute, title in [*COLUMNS.items()][2:])
        table.add_row(measure.name, "\n".join([measure.formula, *facts]))
    return table


def _choices() -> Table:
    table = Table(*_TITLES, box=box.SIMPLE_HEAD, leading=1)
    for choice in CHOICES:
        table.add_row(*(cell.replace("`", "") for cell in choice))
    return table


def page() -> str:
    """Return the page of measures: the table, and what the file of each measure says at its top."""
    lines = [[*COLUMNS.values()]]
    for measure in MEASURES:
        name, *others = (str(getattr(measure, attribute)).replace("|", "\\|") for attribute in COLUMNS)
        lines.append([f"`{name}`", *others])
    titles, *others = (f"| {' | '.join(cells)} |\n" for cells in lines)
    top = Path(__file__).with_name("measures.md").read_text(encoding="utf-8")
    return "".join([f"{top}\n", titles, f"|{' --- |' * len(COLUMNS)}\n", *others, *_sections()])


def _sections() -> Iterator[str]:
    for found in iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        source = inspect.getsource(module)
        own = [measure.name for measure in MEASURES if f'name="{measure.name}"' in source]
        if own:
            text = re.sub(r":\w+:`[~.]*", "`", (module.__doc__ or "").strip())
            yield f"\n## {', '.join(own)}\n\n{text}\n"
