"""Run ``pyflatness measures``: what can be measured, by which formula, from where, and which measure is for what.

The first is a page of the site too, which docs/conf.py writes, and the second a table of docs/which-measure.md.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pkgutil import iter_modules

import click
from rich import box
from rich.table import Table

from .. import measures as package
from ..measures import MEASURES, Measure
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
_PAGE = """# Measures

These are the measures that `pf.measure(model, loss, data, measures=[…])` and `pyflatness score --measures …` know by
name. This page is made from the table in the code, by `pyflatness measures --markdown`.

- **a number of each**: values of a `layer` are `report[layer, name]`, those of the `network` are `report[name]`.
- **invariant to rescalings** of a ReLU network that leave its function alone: `layer-wise`, a layer's weights by λ and
  the next one's by 1/λ. `neuron-wise`, each row of a layer by its own λ_j and the columns behind it by 1/λ_j.
  `attention rows` and `columns`: q, k and v, or the outputs, of [attention](attention.md) under any matrices of a head.
  `pf.reparameterize` makes such networks, and tests check that every measure is what is said here.
- **ω_i** in formulas is the weight of sample i in the loss's mean: the number of its loss terms, or the sum of their
  class weights. Σ_i ω_i, the total weight, is the *normaliser*. For the reduction `"sum"` the normaliser is 1.
- **S_i** is a *square-root factor* of the loss Hessian in the outputs f_i of sample i: ∂²ℓ_i/∂f_i² = S_i diag(σ_i)
  S_iᵀ. Each column S_i[:, c] is [sent backward](glossary.md) from the outputs. For a layer with inputs φ_p at positions
  p (pixels, tokens), let δ_p be what arrives at its output. Then **M_i^(c)** = Σ_p δ_p φ_pᵀ is a gradient in the
  layer's weight.
- **GGN**, the generalised Gauss-Newton matrix, is the part of the loss Hessian that these M give. It is the Hessian
  where the model is locally linear in the weight.
- **cost**: a sweep is a forward pass and one backward pass for each column (C − 1 for cross-entropy with C classes),
  for all layers and measures that share it.

`pf.measures.pac_bayes` and `pf.measures.adaptive_sharpness_mc` are the measures of these names with options: draws, the
size of noise, initial weights, the readings of the authors' code. `pf.representation` (the largest singular values
alone) and `pf.measures.mls_adversarial` (steps, radius) have options too. `pf.theory.bounds` lists inequalities with
both their sides.

"""


CHOICE = {"want": "you want", "take": "take", "invariant": "invariant to", "price": "price"}  # titles

# Backticks are around what can be asked for by name; other names in them are of options.
CHOICES = (
    (
        "to compare networks trained with one loss on the same data",
        "`relative_flatness` of all layers",
        "layer-wise rescaling",
        "one sweep: a forward pass, and a backward pass for each class but one",
    ),
    (
        "a first look at the lowest price",
        "`relative_flatness` of the head (`pf.relative_flatness`)",
        "layer-wise rescaling",
        "a forward pass",
    ),
    (
        "to compare networks whose neurons may be rescaled too",
        "`relative_flatness_std`, `adaptive_sharpness`, `normalized_sharpness` or `neuron_flatness`",
        "layer-wise and neuron-wise rescaling",
        "one sweep",
    ),
    (
        "the classical sharpness that others report",
        "`trace`, `lambda_max`, `sharpness`",
        "nothing: compare only networks that were not rescaled",
        "one sweep; Lanczos for `lambda_max`",
    ),
    (
        "which neurons are sharp",
        "`neuron_flatness`, `.per_neuron`",
        "layer-wise and neuron-wise rescaling",
        "in the same sweep",
    ),
    (
        "how sensitive the outputs are to the input",
        "`mls`, `normalized_mls`, `input_invariant_mls`",
        "the last: layer-wise and neuron-wise rescaling",
        "one sweep over outputs: a backward pass for each",
    ),
    (
        "how much the representation is compressed",
        "`log_volume`, `local_dimension`",
        "`local_dimension`: layer-wise rescaling",
        "in the same sweep over outputs",
    ),
    (
        "what the bounds of two papers are made of (no guarantee for a gap)",
        "`pf.theory.generalization_bound`, `pac_bayes`",
        "see docs/generalization.md, docs/formulas.md",
        "many forward passes",
    ),
    (
        "the worst case in a ball of weights",
        "`pf.worst_case_sharpness`",
        "with `adaptive=True` layer-wise and neuron-wise rescaling",
        "gradient ascent",
    ),
    ("what quantising or pruning will cost", "`pf.cost_of_change`", "–", "one sweep, and a Hessian product"),
    ("which weights matter, for merging or pruning", "`pf.importance`", "–", "one sweep"),
    ("the whole spectrum", "`pf.spectrum`", "nothing", "Lanczos"),
    (
        "a network too large for all its classes",
        '`relative_flatness` and others with `probes=`, `curvature="ggn"`',
        "as above",
        "`probes` backward passes, with a standard error",
    ),
)


@command()
def measures(*, help_me_choose: bool = False, markdown: bool = False, as_json: Json = False) -> None:
    """Show the measures: name, formula, source, what they are invariant to, and cost.

    Args:
        help_me_choose: show which measure is for what instead.
        markdown: print Markdown: the page of measures, or the table of docs/which-measure.md.
    """
    choices = [[*CHOICE.values()], *CHOICES]
    if as_json:
        facts = [{attribute: _cell(measure, attribute) for attribute in COLUMNS} for measure in MEASURES]
        show_json([dict(zip(CHOICE, choice, strict=True)) for choice in CHOICES] if help_me_choose else facts)
    elif markdown:
        click.echo(_markdown(choices) if help_me_choose else page(), nl=False)
    else:
        show(_choices(), width=_WIDTH_OF_SENTENCES) if help_me_choose else show(_table())


def _cell(measure: Measure, attribute: str) -> str:
    return str(getattr(measure, attribute))


def _table() -> Table:
    table = Table("", "", box=box.SIMPLE, show_header=False, leading=1)  # one line of all columns fits no terminal
    for measure in MEASURES:
        facts = (f"{title}: {_cell(measure, attribute)}" for attribute, title in [*COLUMNS.items()][2:])
        table.add_row(measure.name, "\n".join([measure.formula, *facts]))
    return table


def _choices() -> Table:
    table = Table(*CHOICE.values(), box=box.SIMPLE_HEAD, leading=1)
    for choice in CHOICES:
        table.add_row(*(cell.replace("`", "") for cell in choice))
    return table


def page() -> str:
    """Return the page of measures: the table, and what the file of each measure says at its top."""
    lines = [[*COLUMNS.values()]]
    for measure in MEASURES:
        name, *others = (_cell(measure, attribute).replace("|", "\\|") for attribute in COLUMNS)
        lines.append([f"`{name}`", *others])
    return _PAGE + _markdown(lines) + "".join(_sections())


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table, whose first line has the titles."""
    titles, *others = (f"| {' | '.join(cells)} |\n" for cells in lines)
    return "".join([titles, f"| {' | '.join(['---'] * len(lines[0]))} |\n", *others])


def _sections() -> Iterator[str]:
    for found in iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        source = inspect.getsource(module)
        own = [measure.name for measure in MEASURES if f'name="{measure.name}"' in source]
        if own:
            text = re.sub(r":\w+:`[~.]*", "`", (module.__doc__ or "").strip())
            yield f"\n## {', '.join(own)}\n\n{text}\n"
