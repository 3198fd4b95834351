"""Define the measures, one file per family (formula, source and code together), and the table of their names.

Public are functions of single measures that have options of their own; :func:`pyflatness.measure` takes all measures
by their names.
"""

from collections.abc import Sequence

from ..errors import InputError
from ..messages import near
from ..options import check_names
from ..sweep.activations import ACTIVATIONS
from . import bounds, fisher_rao, normalized_sharpness, relative_flatness, representation, scaled, sharpness, trace
from .adaptive_sharpness_mc import ADAPTIVE_SHARPNESS_MC, adaptive_sharpness_mc
from .base import Measure as Measure
from .critical import critical_sharpness
from .mls_adversarial import MLS_ADVERSARIAL, NORMALIZED_MLS_ADVERSARIAL, mls_adversarial
from .pac_bayes import PAC_BAYES, PAC_BAYES_MAGNITUDE, pac_bayes
from .relative_flatness import RELATIVE_FLATNESS as RELATIVE_FLATNESS
from .trace import TRACE as TRACE
from .worst_case import keskar_sharpness

MEASURES = (
    RELATIVE_FLATNESS,
    relative_flatness.RELATIVE_FLATNESS_STD,
    scaled.RELATIVE_FLATNESS_PER_FEATURE,
    relative_flatness.RELATIVE_FLATNESS_COLUMNS,
    relative_flatness.RELATIVE_FLATNESS_MAX,
    TRACE,
    scaled.SCALED_TRACE,
    scaled.LARGEST_SCALED_TRACE,
    trace.LAMBDA_MAX,
    scaled.SCALED_LAMBDA_MAX,
    scaled.LARGEST_SCALED_LAMBDA_MAX,
    sharpness.SHARPNESS,
    sharpness.INTERPOLATION_SHARPNESS,
    sharpness.INTERPOLATION_ADAPTIVE_SHARPNESS,
    sharpness.ADAPTIVE_SHARPNESS,
    relative_flatness.NEURON_FLATNESS,
    relative_flatness.NEURON_FLATNESS_MAX,
    relative_flatness.NEURON_FLATNESS_ROWS,
    relative_flatness.NEURON_FLATNESS_ROWS_MAX,
    normalized_sharpness.NORMALIZED_SHARPNESS,
    scaled.MATRIX_NORMALIZED_SHARPNESS,
    scaled.MATRIX_NORMALIZED_SHARPNESS_FROBENIUS,
    trace.OUTPUT_TRACE,
    trace.INPUT_TRACE,
    ADAPTIVE_SHARPNESS_MC,
    fisher_rao.FISHER_RAO,
    PAC_BAYES,
    PAC_BAYES_MAGNITUDE,
    scaled.WEIGHT_NORM,
    *representation.ROWS,
    MLS_ADVERSARIAL,
    NORMALIZED_MLS_ADVERSARIAL,
    *bounds.ROWS,
)


BY_DEFAULT = (RELATIVE_FLATNESS, TRACE)
_SETS = ("sweep", "all")
_ALL_LISTED = " `pyflatness measures` lists all names; 'sweep' and 'all' stand for several"


def are_named(names: str | Sequence[str] | None) -> bool:
    """Return whether measures are asked for by name, so that it is an error if one of them has no value."""
    return names is not None and not (isinstance(names, str) and names in _SETS)


def named(names: str | Sequence[str] | None) -> tuple[Measure, ...]:
    """Return measures by name; None: the two of a report by default; ``"sweep"``: those of one sweep; ``"all"``."""
    if names is None:
        return BY_DEFAULT
    if isinstance(names, str) and names in _SETS:
        return MEASURES if names == "all" else tuple(row for row in MEASURES if _of_one_sweep(row))
    table = {measure.name: measure for measure in MEASURES}
    wanted = check_names("measures", names)
    if not wanted:
        raise InputError("measures: at least one name is wanted, or 'sweep' for those of one sweep, or 'all'")
    for name in wanted:
        if name not in table:
            likely = near(name, [*table, *_SETS])
            raise InputError(f"measures: {name!r} does not exist; did you mean {likely}?{_ALL_LISTED}")
    return tuple(table[name] for name in wanted)


def _of_one_sweep(row: Measure) -> bool:
    """Return whether a measure takes no more than the sweep for relative flatness, or the weights alone.

    Normalised sharpness takes more: weight gradients are written out for it, and most networks with layers that are not
    piecewise linear have no value of it. So do measures of activations, with Hessian products of their own there.
    """
    if row.quantity in ACTIVATIONS:
        return False
    if row.base is not None:
        return any(_of_one_sweep(other) for other in MEASURES if other.name == row.base)
    return row.reads == 0 or (row.quantity is not None and row.normalize is None and row.of_summands is None)


def with_bases(measures: Sequence[Measure]) -> tuple[Measure, ...]:
    """Return these measures, and those that some of them are derived from."""
    bases = [measure.base for measure in measures if measure.base is not None]
    return tuple(dict.fromkeys([*measures, *(row for row in MEASURES if row.name in bases)]))


__all__ = ["adaptive_sharpness_mc", "critical_sharpness", "keskar_sharpness", "mls_adversarial", "pac_bayes"]
