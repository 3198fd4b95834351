"""Find out which measures stay the same when the weights change and the function does not.

A measure is a property of the function only if it has the same value at all weights of that function. In networks with
ReLU two changes of the weights leave the function alone: all rows of a layer are multiplied by one factor, or each row
by a factor of its own, and the columns behind are divided by it (Petzka et al. 2019, Theorems 2 and 3, Table 1). A
third one concerns the heads of attention: the rows of q and k are multiplied by A and A⁻ᵀ, those of v by B and the
columns of the output projection by B⁻¹ (docs/attention.md). Values of q, k and v, whose rows change, are compared apart
from those of the output projection, whose columns change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from typing_extensions import Unpack

from ..api import measure
from ..errors import InputError
from ..measures import MEASURES
from ..messages import check_module, shown
from ..model.kinds import is_plain
from ..model.layers import matrix
from ..model.selectors import Selector
from ..options import EVERY, How, MeasureHow, Options, check_numbers
from ..reparameterization import attention
from ..reparameterization.reparameterize import reparameterize
from ..report import Estimate, Result, views
from ..session import public

WAYS = ("layer-wise", "neuron-wise")
OF_ATTENTION = {"attention rows": "qkv", "attention columns": "o"}  # and the matrices that each compares
_EXACT, _ROUNDED = 1e-6, 1e-3  # tolerance of exact values in double precision, and of all others


@dataclass(frozen=True)
class Invariance:
    """Hold how much a measure changed under one reparameterisation of the weights.

    Attributes:
        measure: its name.
        way: ``"layer-wise"`` or ``"neuron-wise"``; in models with attention ``"attention rows"`` compares q, k and v
            alone, and ``"attention columns"`` the output projections.
        change: the largest relative change of the value of a layer, a neuron or the network. Changes of neurons are
            relative to the layer's largest neuron.
        kept: whether the change is no more than rounding.
        claimed: whether the table that ``pyflatness measures`` shows says that the measure is invariant.
    """

    measure: str
    way: str
    change: float
    kept: bool
    claimed: bool


@dataclass(frozen=True, repr=False)
class Invariances(Result):
    """Hold which measures stayed the same. ``str()`` shows a table, ``found[measure, way]`` is one row.

    A data frame has a row for each measure and way.

    Attributes:
        rows: one for each measure and way.
        layers: the layers and attention modules whose weights were multiplied.
        skipped: layers whose weights cannot be multiplied, and measures without a value, each with the reason.
        notes: which matrices multiplied the weights of attention.
    """

    rows: tuple[Invariance, ...]
    layers: tuple[str, ...]
    skipped: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __getitem__(self, key: tuple[str, str]) -> Invariance:
        for row in self.rows:
            if (row.measure, row.way) == key:
                return row
        raise InputError(f"invariances: no {key!r}; there are {[(row.measure, row.way) for row in self.rows]}")

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        ways = [*dict.fromkeys(row.way for row in self.rows)]
        found = Table("measure", *ways, "said to be invariant", box=box.SIMPLE_HEAD)
        for name in dict.fromkeys(row.measure for row in self.rows):
            own = [self[name, way] for way in ways]
            cells = (f"{'kept' if row.kept else 'moved'}, {row.change:.1g}" for row in own)
            found.add_row(name, *cells, ", ".join(row.way for row in own if row.claimed) or "no")
        return "\n".join(views.text(found, 140))


@public(*EVERY)
def invariances(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    measures: str | Sequence[str] | None = None,
    layers: Selector | Sequence[Selector] | None = None,
    factors: tuple[float, float] = (5.0, 25.0),
    **how: Unpack[MeasureHow],
) -> Invariances:
    """Return which measures stay the same when the weights change and the function does not.

    Every layer that allows it gets new weights by :func:`pyflatness.reparameterize`: its rows are multiplied by random
    factors, and the columns behind it are divided by them. Attention is multiplied by random matrices of the largest
    group that leaves the function alone; trials find this group, and ``notes`` name it. The measures are taken before
    and after.

    Args:
        model: an ``nn.Module`` in eval mode; linear layers and convolutions with ReLU, LeakyReLU, pooling, reshapes,
            factors of other branches and eval BatchNorm between; attention as of :func:`pyflatness.reparameterize`.
        data: … They are read several times.
        measures: a name or several; None: relative flatness and the trace; ``"sweep"``: all that one sweep gives;
            ``"all"``: every measure that applies.
        layers: selectors of the layers to measure; None: all that can be measured. All that allow it get new weights.
        factors: the interval that factors, and singular values of matrices, are drawn from, uniformly.
        seed: of the factors, and of estimates that are random.

    Returns:
        For each measure and way the largest relative change, and whether it is rounding: at most 1e-6 for exact values
        in double precision, else 1e-3.

    Raises:
        InputError: nothing whose weights can be multiplied, factors that are not two positive numbers, or what
            :func:`pyflatness.measure` refuses.

    Example:
        >>> import torch, pyflatness as pf
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
        >>> data = torch.randn(20, 4).double(), torch.arange(20) % 3
        >>> print(pf.invariances(model, nn.CrossEntropyLoss(), data, measures=["trace", "scaled_trace"], layers="2"))
         measure        layer-wise     neuron-wise    said to be invariant
         ───────────────────────────────────────────────────────────────────
         trace          moved, ...     moved, ...     no
         scaled_trace   kept, ...      moved, ...     layer-wise
    """
    model, seed = check_module("model", model), Options.of(how).seed
    low, *high = check_numbers("factors", factors, "two positive numbers (low, high)")
    if len(high) != 1 or low > high[0]:
        raise InputError(f"factors={shown(factors)}: two positive numbers (low, high) are wanted")
    running: How = {"forward": how.get("forward"), "eval": how.get("eval", False)}
    random = np.random.default_rng(seed % 2**64)
    multiplied, skipped = _multiplied(model, data, random, factors, running)
    matrices, notes = _attention_matrices(model, data, random, factors, running)
    if not multiplied and not matrices:
        raise InputError(f"model: there is no layer whose weights can be multiplied; {shown(skipped)}")
    before = measure(model, loss, data, layers=layers, measures=measures, **how)
    tolerance = _EXACT if next(model.parameters()).dtype == torch.float64 else _ROUNDED
    found: dict[str, list[Invariance]] = {name: [] for name in before.measures}
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # each with the places whose values a way compares
    if multiplied:
        changes += [({name: drawn[way] for name, drawn in multiplied.items()}, {way: None}) for way in WAYS]
    if matrices:
        known = [one for name, one in attention.attentions(model).items() if name in matrices]
        changes.append((matrices, {way: _layers(known, held) for way, held in OF_ATTENTION.items()}))
    for change, ways in changes:
        other = reparameterize(model, change, data, **running)
        after = measure(other, loss, data, layers=layers, measures=measures, **how).by_measure()
        for way, places in ways.items():
            for name, own in before.by_measure().items():
                compared = {place: e for place, e in own.items() if places is None or place.split("[")[0] in places}
                if compared:
                    found[name].append(_compared(name, way, compared, after.get(name, {}), tolerance))
    rows = tuple(row for own in found.values() for row in own)
    return Invariances(rows, (*multiplied, *matrices), skipped | dict(before.skipped), notes)


def _layers(known: Sequence[attention.Attention], matrices: str) -> set[str]:
    """Return the names of the layers that hold some of the matrices of attention, such as ``"qkv"``."""
    rows = [getattr(one, matrix) for one in known for matrix in matrices]
    return {one.module if one.weight == "weight" else f"{one.module}.{one.weight}" for one in rows}


def _attention_matrices(
    model: nn.Module, data: Any, random: np.random.Generator, factors: tuple[float, float], running: How
) -> tuple[dict[str, dict[str, Tensor]], tuple[str, ...]]:
    """Return random matrices for each attention module, from the largest group that keeps the function, and notes."""
    found: dict[str, dict[str, Tensor]] = {}
    notes = []
    for name, one in attention.attentions(model).items():

        def keeps(matrices: Mapping[str, Tensor], name: str = name) -> bool:
            try:
                reparameterize(model, {name: matrices}, data, **running)
            except InputError:
                return False
            return True

        group, matrices = attention.largest_group(one, random, factors, keeps)
        if matrices:
            found[name] = matrices
            notes.append(f"{name}: A of q and k is {attention.GROUPS.get(group, 'none')}")
    return found, tuple(notes)


def _multiplied(
    model: nn.Module, data: Any, drawn: np.random.Generator, factors: tuple[float, float], running: How
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return by layer the factors of each way of multiplying it, and by other layers why they have none."""
    found: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not is_plain(module):
            continue
        try:
            reparameterize(model, {name: 1.0}, data, **running)
        except InputError as error:
            skipped[name] = str(error)
        else:
            rows = len(matrix(module)[0])
            found[name] = dict(zip(WAYS, (drawn.uniform(*factors), drawn.uniform(*factors, rows)), strict=True))
    return found, skipped


def _compared(
    name: str, way: str, before: Mapping[str, Estimate], after: Mapping[str, Estimate], tolerance: float
) -> Invariance:
    """Return how much a measure changed, from its values before and after."""
    pairs = [(own, after[place]) for place, own in before.items() if place in after]
    change = max((_change(*pair) for pair in pairs), default=math.inf)
    exact = all(estimate.exact for pair in pairs for estimate in pair)
    kept = len(pairs) == len(before) and change <= (tolerance if exact else _ROUNDED)
    claimed = any(row.name == name and way in row.invariant for row in MEASURES)
    return Invariance(name, way, change, kept, claimed)


def _change(one: Estimate, other: Estimate) -> float:
    """Return the relative change of a value, or that of its neurons if this is larger."""
    found = [0.0 if one.value == other.value else abs(other.value - one.value) / abs(one.value or other.value)]
    if one.per_neuron is not None and other.per_neuron is not None:
        found.append(((one.per_neuron - other.per_neuron).abs().max() / one.per_neuron.abs().max()).item())
    return max(math.inf if math.isnan(change) else change for change in found)
