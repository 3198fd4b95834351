"""Compute the curvature of the loss along each neuron's own weights (Petzka et al. 2019, appendix B).

    ρ^l(j) = w_l(j)ᵀ ∂²E/∂w_l(j)² w_l(j) = Σ_i Σ_c σ_ic (Σ_{group j} w ∘ M_i^(c))² / Σ_i ω_i    by the GGN

w_l(j) are a neuron's outgoing weights: the column of an input unit, or the kernel elements of all filters on an input
channel of a convolution (within its group of channels); for ``neuron_flatness_rows`` the row of incoming weights of an
output unit. ``per_neuron`` of a layer's estimate has ρ^l(j), and its value is their sum ρ_σ^l, a network's that of its
layers, ρ^Σ; of ``…_max`` the largest, ρ^l, and the largest of the measured layers, ρ^max. Behind layers that are not
piecewise linear it takes one Hessian product for each neuron. It is invariant to layer-wise and neuron-wise rescalings.
"""

from dataclasses import replace

import torch
from torch import nn

from ..options import Options
from .base import Measure, Values


def largest(model: nn.Module, options: Options, values: Values) -> Values:
    """Return each layer's largest neuron, and the largest of all for the network, from their values by neuron."""
    found: Values = {}
    for name, estimate in values.items():
        if estimate.per_neuron is not None:
            found[name] = replace(estimate, value=float(estimate.per_neuron.max()), per_sample=None)
    largest_of_all = float(torch.tensor([e.value for e in found.values()], dtype=torch.float64, device="cpu").max())
    found[""] = replace(values[""], value=largest_of_all, per_sample=None)
    return found


_SOURCE = "Petzka et al. 2019, appendix B and Table 1"
_INVARIANT = "layer-wise, neuron-wise"

NEURON_FLATNESS = Measure(
    name="neuron_flatness",
    formula="ρ_σ^l = Σ_j w(j)ᵀ ∂²E/∂w(j)² w(j) over the columns w(j)",
    source=_SOURCE,
    quantity="by_column",
    invariant=_INVARIANT,
)
NEURON_FLATNESS_MAX = Measure(
    name="neuron_flatness_max",
    formula="ρ^l = max_j w(j)ᵀ ∂²E/∂w(j)² w(j) over the columns; network: ρ^max = max_l ρ^l",
    source=_SOURCE,
    base=NEURON_FLATNESS.name,
    derive=largest,
    invariant=_INVARIANT,
    cost="that of neuron_flatness, shared",
)
NEURON_FLATNESS_ROWS = Measure(
    name="neuron_flatness_rows",
    formula="Σ_s w_sᵀ ∂²E/∂w_s² w_s over the rows w_s",
    source=_SOURCE,
    quantity="by_row",
    invariant=_INVARIANT,
)
NEURON_FLATNESS_ROWS_MAX = Measure(
    name="neuron_flatness_rows_max",
    formula="max_s w_sᵀ ∂²E/∂w_s² w_s over the rows; network: the largest of its layers",
    source=_SOURCE,
    base=NEURON_FLATNESS_ROWS.name,
    derive=largest,
    invariant=_INVARIANT,
    cost="that of neuron_flatness_rows, shared",
)
