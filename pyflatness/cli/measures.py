"""Run ``pyflatness measures``: what can be measured, by which formula, from where; also as docs/measures.md."""

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pkgutil import iter_modules

import click
from rich import box
from rich.table import Table

from .. import measures as package
from ..measures import MEASURES, Measure
from . import choosing
from .output import json_option, show, show_json


@dataclass(frozen=True)
class Column:
    """Describe a column of the table of measures; ``attribute`` of a measure fills it."""

    title: str
    attribute: str

    def of(self, measure: Measure) -> str:
        """Return the cell of a measure."""
        return str(getattr(measure, self.attribute))


COLUMNS = (
    Column("name", "name"),
    Column("formula", "formula"),
    Column("source", "source"),
    Column("a number of each", "granularity"),
    Column("invariant to rescalings", "invariant"),
    Column("cost", "cost"),
)
_WIDTH_OF_SENTENCES = 100  # of lines in a file or pipe, to be read
_PAGE = """# Measures

These are the measures that `pf.measure(model, loss, data, measures=[…])` and `pyflatness score --measures …` know by
name. This page is made from the table in the code: `pyflatness measures --markdown > docs/measures.md`.

- **a number of each**: values of a `layer` are `report[layer, name]`, those of the `network` are `report[name]`.
- **invariant to rescalings** of a ReLU network that leave its function alone: `layer-wise`, a layer's weights by λ and
  the next one's by 1/λ; `neuron-wise`, each row of a layer by its own λ_j and the columns behind it by 1/λ_j.
  `pf.reparameterize` makes such networks, and tests check that every measure is what is said here.
- **ω_i** in formulas is the weight of sample i in the loss's mean: the number of its loss terms, or the sum of their
  class weights. Σ_i ω_i, the total weight, is the *normaliser*. For the reduction `"sum"` the normaliser is 1.
- **S_i** is a *square-root factor* of the loss Hessian in the outputs f_i of sample i: ∂²ℓ_i/∂f_i² = S_i diag(σ_i)
  S_iᵀ. Each column S_i[:, c] is sent backward from the outputs, as a *cotangent*. For a layer with inputs φ_p at
  positions p (pixels, tokens), let δ_p be what arrives at its output. Then **M_i^(c)** = Σ_p δ_p φ_pᵀ is a gradient in
  the layer's weight.
- **GGN**, the generalised Gauss-Newton matrix, is the part of the loss Hessian that these M give. It is the Hessian
  where the model is locally linear in the weight.
- **cost**: a sweep is a forward pass and one backward pass for each column (C − 1 for cross-entropy with C classes),
  for all layers and measures that share it.

`pf.measures.pac_bayes` and `pf.measures.adaptive_sharpness_mc` are the measures of these names with options: draws, the
size of noise, initial weights, the readings of the authors' code. `pf.representation` (the largest singular values
alone) and `pf.measures.mls_adversarial` (steps, radius) have options too. `pf.theory.bounds` lists inequalities with
both their sides.

"""


@click.command(short_help="List the measures, or say which one is for what.")
@click.option("--help-me-choose", is_flag=True, help="Show which measure is for what instead.")
@click.option(
    "--markdown", is_flag=True, help="Print Markdown: the page docs/measures.md, or the table of docs/which-measure.md."
)
@json_option
def measures(help_me_choose: bool, markdown: bool, as_json: bool) -> None:
    """Show the measures: name, formula, source, what they are invariant to, and cost."""
    if as_json:
        show_json([asdict(choice) for choice in choosing.CHOICES] if help_me_choose else _facts())
    elif markdown:
        click.echo(choosing.markdown() if help_me_choose else page(), nl=False)
    else:
        show(choosing.as_table(), width=_WIDTH_OF_SENTENCES) if help_me_choose else show(_table())


def _facts() -> list[dict[str, str]]:
    return [{column.attribute: column.of(measure) for column in COLUMNS} for measure in MEASURES]


def _table() -> Table:
    table = Table("", "", box=box.SIMPLE, show_header=False, leading=1)  # one line of all columns fits no terminal
    name, formula, *others = COLUMNS
    for measure in MEASURES:
        facts = [f"{column.title}: {column.of(measure)}" for column in others]
        table.add_row(name.of(measure), "\n".join([formula.of(measure), *facts]))
    return table


def page() -> str:
    """Return the page docs/measures.md: the table, and what the file of each measure says at its top."""
    lines = [[column.title for column in COLUMNS], ["---"] * len(COLUMNS)]
    for measure in MEASURES:
        name, *others = (column.of(measure).replace("|", "\\|") for column in COLUMNS)
        lines.append([f"`{name}`", *others])
    return _PAGE + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "".join(_sections())


def _sections() -> Iterator[str]:
    for found in iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        source = inspect.getsource(module)
        own = [measure.name for measure in MEASURES if f'name="{measure.name}"' in source]
        if own:
            text = re.sub(r":\w+:`[~.]*", "`", (module.__doc__ or "").strip())
            yield f"\n## {', '.join(own)}\n\n{text}\n"
