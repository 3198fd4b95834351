"""Hold the table that says which measure is for what: ``pyflatness measures --help-me-choose``, docs/which-measure.md.

Backticks are around what can be asked for by name; other names in them are of options.
"""

from dataclasses import astuple, dataclass

from rich import box
from rich.table import Table

TITLES = ("you want", "take", "invariant to", "price")


@dataclass(frozen=True)
class Choice:
    """Say what to measure for one purpose."""

    want: str
    take: str
    invariant: str
    price: str


CHOICES = (
    Choice(
        "to compare networks trained with one loss on the same data",
        "`relative_flatness` of all layers",
        "layer-wise rescaling",
        "one sweep: a forward pass, and a backward pass for each class but one",
    ),
    Choice(
        "a first look at the lowest price",
        "`relative_flatness` of the head (`pf.relative_flatness`)",
        "layer-wise rescaling",
        "a forward pass",
    ),
    Choice(
        "to compare networks whose neurons may be rescaled too",
        "`relative_flatness_std`, `adaptive_sharpness`, `normalized_sharpness` or `neuron_flatness`",
        "layer-wise and neuron-wise rescaling",
        "one sweep",
    ),
    Choice(
        "the classical sharpness that others report",
        "`trace`, `lambda_max`, `sharpness`",
        "nothing: compare only networks that were not rescaled",
        "one sweep; Lanczos for `lambda_max`",
    ),
    Choice(
        "which neurons are sharp",
        "`neuron_flatness`, `.per_neuron`",
        "layer-wise and neuron-wise rescaling",
        "in the same sweep",
    ),
    Choice(
        "how sensitive the outputs are to the input",
        "`mls`, `normalized_mls`, `input_invariant_mls`",
        "the last: layer-wise and neuron-wise rescaling",
        "one sweep over outputs: a backward pass for each",
    ),
    Choice(
        "how much the representation is compressed",
        "`log_volume`, `local_dimension`",
        "`local_dimension`: layer-wise rescaling",
        "in the same sweep over outputs",
    ),
    Choice(
        "a bound on the generalisation gap",
        "`pf.theory.generalization_bound`, `pac_bayes`",
        "see docs/generalization.md, docs/measures.md",
        "many forward passes",
    ),
    Choice(
        "the worst case in a ball of weights",
        "`pf.worst_case_sharpness`",
        "with `adaptive=True` layer-wise and neuron-wise rescaling",
        "gradient ascent",
    ),
    Choice("what quantising or pruning will cost", "`pf.cost_of_change`", "–", "one sweep, and a Hessian product"),
    Choice("the whole spectrum", "`pf.spectrum`", "nothing", "Lanczos"),
    Choice(
        "a network too large for all its classes",
        '`relative_flatness` and others with `probes=`, `curvature="ggn"`',
        "as above",
        "`probes` backward passes, with a standard error",
    ),
)


def markdown() -> str:
    """Return the table as Markdown."""
    lines = (TITLES, ["---"] * len(TITLES), *map(astuple, CHOICES))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def as_table() -> Table:
    """Return the table for a terminal."""
    table = Table(*TITLES, box=box.SIMPLE_HEAD, leading=1)
    for choice in CHOICES:
        table.add_row(*(cell.replace("`", "") for cell in astuple(choice)))
    return table
