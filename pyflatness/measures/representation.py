"""Measure how much the network compresses around its inputs.

The measures are those of "From Loss Flatness to Compressed Representations" (C24).

    J_i = ∂f_i/∂x_i, all outputs of a sample;  s_1 ≥ s_2 ≥ … its singular values;  G_i = J_i J_iᵀ

    mls                  mean_i s_1                      maximum local sensitivity, Definition 3.7
    nmls                 Σ_l of the layers' mls          Definition 3.9 (the text says average, formula and code sum)
    normalized_mls       mean_i |x_i|² s_1²              Definition F.1
    input_invariant_mls  mean_i |J_i diag(x_i)|_F²       Definition E.3
    log_volume           mean_i Σ_c log s_c              logarithm of the volumetric ratio, Definition 3.1
    volume               mean_i Π_c s_c                  Definition 3.3; the network's: Σ_l of the layers', 3.5
    local_dimension      mean_i Tr(G_i)² / Tr(G_i²)      participation ratio, Eq. 15

x is the model's input (the network's value) or a layer's input (the layer's), from where J goes through everything
behind it: past the layer too, where its input also takes another way. Inputs of all calls of a layer are one x. The
model's input is the first floating-point tensor of a batch; tokens have no derivative, and the network no value then
but in nmls and volume. Means are over samples, whatever the loss: it has no part in J. Sums over layers are over the
chosen ones, all linear and convolutional layers unless said otherwise.

Where the rank of J is below the number of outputs (always if these are more than the inputs) the volume is 0, its
logarithm minus infinity, and a note says for how many samples. ``pf.representation(…, top=k)`` takes the k largest
singular values instead. G is summed in float64. Logarithms come from its eigenvalues where these are within 1e-4 of the
largest, else from a QR decomposition of J. Of J = 0 the dimension is 0.

All of them, and the bounds, share one sweep: a forward pass, and a backward pass for each output.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError
from ..model import uses
from ..model.selectors import Selector
from ..options import READING, MeasureHow, Options, check_count, check_names
from ..report import Estimate, Report, coverage
from ..session import public, session
from ..sweep import jacobians
from ..sweep.jacobians import INPUT, Samples
from .base import WHOLE, Estimates, Measure

_SOURCE = "From Loss Flatness to Compressed Representations"
_NO_INPUT = "the model's input has no derivative (no floating-point tensor among a batch's inputs): layers only"

Of = Callable[[Samples, str], Tensor]  # (samples, place) -> the values of samples there, (n,)


def _volume(samples: Samples, place: str) -> Tensor:
    return samples.each(place, "log_volume").exp()


def _dimension(samples: Samples, place: str) -> Tensor:
    trace, square = samples.each(place, "trace"), samples.each(place, "square")
    return torch.where(square == 0, 0.0, trace.square() / square)


def _at_places(of: Of, samples: Samples) -> Estimates:
    """Return the value at each layer's input, and as the network's that at the model's input."""
    found = {name: estimate(samples, of(samples, name), name) for name in samples.layers}
    if samples.has_input:
        found[INPUT] = estimate(samples, of(samples, INPUT), INPUT)
    return found


def _summed(of: Of, samples: Samples) -> Estimates:
    """Return the sum over layers as the network's value, and no others."""
    return {"": estimate(samples, torch.stack([of(samples, name) for name in samples.layers]).sum(dim=0), "")}


def estimate(samples: Samples, each: Tensor, place: str) -> Estimate:
    """Return the mean of values (n,) over samples."""
    counted = each[samples.kept]
    notes = []
    calls = samples.calls.get(place, 1)
    if place and calls > 1:
        notes.append(f"called {calls} times: J is in the inputs of all calls, side by side")
    if place == next(iter(samples.layers), None) and not samples.has_input:
        notes.append(_NO_INPUT)
    lost = int((counted == -torch.inf).sum())
    if lost:
        notes.append(f"log_volume: {lost} of {len(counted)} samples have a J of lower rank, and no volume")
    return samples.estimate(float(counted.mean()), place, notes, each)


MLS = Measure(
    name="mls",
    formula="mean_i s_max(∂f_i/∂x_i)",
    source=f"{_SOURCE}, Definition 3.7",
    of_layers=False,
    of_jacobians=partial(_at_places, lambda samples, place: samples.each(place, "largest")),
)
NMLS = Measure(
    name="nmls",
    formula="Σ_l mean_i s_max(∂f_i/∂x_i^l), x^l the input of layer l",
    source=f"{_SOURCE}, Definition 3.9",
    of_jacobians=partial(_summed, lambda samples, place: samples.each(place, "largest")),
    granularity="network",
)
NORMALIZED_MLS = Measure(
    name="normalized_mls",
    formula="mean_i |x_i|² s_max(∂f_i/∂x_i)²",
    source=f"{_SOURCE}, Definition F.1",
    of_layers=False,
    of_jacobians=partial(_at_places, lambda own, at: own.each(at, "size") * own.each(at, "largest").square()),
    invariant="layer-wise",
)
INPUT_INVARIANT_MLS = Measure(
    name="input_invariant_mls",
    formula="mean_i |∂f_i/∂x_i diag(x_i)|_F²",
    source=f"{_SOURCE}, Definition E.3",
    of_layers=False,
    of_jacobians=partial(_at_places, lambda samples, place: samples.each(place, "scaled")),
    needs=("scaled",),
    invariant="layer-wise, neuron-wise",
)
LOG_VOLUME = Measure(
    name="log_volume",
    formula="mean_i Σ_c log s_c(∂f_i/∂x_i)",
    source=f"{_SOURCE}, Definition 3.1 and Eq. 7",
    of_jacobians=partial(_at_places, lambda samples, place: samples.each(place, "log_volume")),
    needs=("log_volume",),
    network_of=WHOLE,
)
VOLUME = Measure(
    name="volume",
    formula="mean_i Π_c s_c(∂f_i/∂x_i); of the network Σ_l of its layers",
    source=f"{_SOURCE}, Definitions 3.3 and 3.5",
    of_jacobians=lambda samples: {**_at_places(_volume, samples), **_summed(_volume, samples)},
    needs=("log_volume",),
)
LOCAL_DIMENSION = Measure(
    name="local_dimension",
    formula="mean_i Tr(G_i)² / Tr(G_i²), G_i = ∂f_i/∂x_i (∂f_i/∂x_i)ᵀ",
    source=f"{_SOURCE}, Eq. 15",
    of_layers=False,
    of_jacobians=partial(_at_places, _dimension),
    invariant="layer-wise",
)
ROWS = (MLS, NMLS, NORMALIZED_MLS, INPUT_INVARIANT_MLS, LOG_VOLUME, VOLUME, LOCAL_DIMENSION)


@public(*READING, "per_sample", "backend", "nan_policy", "memory", "max_passes")
def representation(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    layers: Selector | Sequence[Selector] | None = None,
    measures: str | Sequence[str] | None = None,
    top: int | None = None,
    **how: Unpack[MeasureHow],
) -> Report:
    """Return how sensitive the outputs are to the model's input and to every layer's, by many measures together.

    Measures of J_i = ∂f_i/∂x_i and its singular values (see docs/formulas.md), of one sweep: a forward pass and one
    backward pass per output. ``pf.measure(…, measures=[…])`` knows them by the same names, without ``top``.

    Args:
        loss: … It has no part in the values.
        layers: whose inputs; None: of all layers that can be measured and ran.
        measures: names; None: all measures of Jacobians.
        top: singular values that volumes are over, the largest (3 in the code of the paper); None: all.

    Returns:
        ``report[layer, measure]`` at a layer's input; ``report[measure]`` at the model's, or of the network.

    Raises:
        InputError: names or options that do not fit; more outputs of a sample than backward passes are allowed.
        NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 2.0]]))
        >>> data = torch.randn(10, 3), torch.randint(2, (10,))
        >>> report = pf.representation(model, torch.nn.CrossEntropyLoss(), data)
        >>> round(report["mls"].value, 6), round(report["volume"].value, 6)
        (3.0, 6.0)
    """
    top = None if top is None else check_count("top", top, 1, "a number of singular values")
    rows = _named(measures)
    options = Options.of(how)
    with session(model, loss, data, options, how) as task:
        task = task.of(layers)
        samples = jacobians.measured(task, {need for row in rows for need in row.needs}, top)
        task.unite()
        covered = [task.selection.modules[name] for name in samples.layers]
        left_out = uses.left_out(task.model, covered)
        why = uses.reasons(task.model, left_out)
    found = {}
    for row in rows:
        assert row.of_jacobians is not None
        found.update({(name, row.name): task.noted(value) for name, value in row.of_jacobians(samples).items()})
    if layers is None:
        found = coverage.marked(found, [row.name for row in rows if row.of_layers], left_out)
    return Report(samples.layers, tuple(row.name for row in rows), found, {}, left_out, why)


def _named(names: str | Sequence[str] | None) -> tuple[Measure, ...]:
    table = {row.name: row for row in ROWS}
    wanted = [*table] if names is None else check_names("measures", names, f" of {', '.join(table)}")
    if not wanted:
        raise InputError("measures: at least one name is wanted, or None for all of the Jacobian")
    for name in wanted:
        if name not in table:
            raise InputError(f"measures: {name!r} is no measure of Jacobians; choose among {', '.join(table)}")
    return tuple(table[name] for name in wanted)
