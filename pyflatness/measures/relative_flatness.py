"""Compute relative flatness, the largest eigenvalues in the place of its traces, and the curvature along each neuron.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')
         = Σ_i Σ_c σ_ic |R M_i^(c)|² / Σ_i ω_i,   RᵀR = w wᵀ,    by the GGN: square-root factors sent backward

is ``relative_flatness`` (Petzka et al. 2021, Definition 3; normalised, ``…_std``: Theorem 4). A network's value is the
sum over its layers (appendix A). It is invariant to layer-wise rescalings of ReLU networks; with features divided and
columns multiplied by the features' deviation also to neuron-wise ones. At a head see :mod:`.head_sums`.

    κ_col(w) = Σ_{i,j} ⟨w_:i, w_:j⟩ Tr(∂²E/∂w_:i∂w_:j)        over the columns w_:j (d,), w (d, m)
             = Σ_i Σ_c σ_ic |w M_i^(c)ᵀ|² / Σ_i ω_i            by the GGN

is ``relative_flatness_columns``, the twin of κ, which pairs rows. κ stays the same under w -> A w with an invertible A
that is undone behind the layer, κ_col under w -> w B with a B that is undone in front of it (docs/attention.md). It is
the trace of the Hessian in a matrix (d, d) between the layer's product and its bias, at the identity. A network's value
is the sum over its layers.

    κ^φ(w) = Σ_s |w_s|² λ_max(∂²E/∂w_s²)        over the rows w_s of a layer's weight (the filters of a convolution)

is ``relative_flatness_max`` (Definition 13). It bounds the robustness to every feature matrix |A| ≤ 1, E_F ≤ δ²d/2 κ^φ
+ O(δ³) at a minimum (Theorem 14), where relative flatness gives the mean over rotations. It is invariant to layer-wise
rescalings of ReLU networks; normalised also to neuron-wise ones.

    ρ^l(j) = w_l(j)ᵀ ∂²E/∂w_l(j)² w_l(j) = Σ_i Σ_c σ_ic (Σ_{group j} w ∘ M_i^(c))² / Σ_i ω_i    by the GGN

is the curvature along each neuron's own weights, ``neuron_flatness`` (Petzka et al. 2019, appendix B). w_l(j) are a
neuron's outgoing weights: the column of an input unit, or the kernel elements of all filters on an input channel of a
convolution (within its group of channels). For ``neuron_flatness_rows`` they are the row of incoming weights of an
output unit. ``per_neuron`` of a layer's estimate has ρ^l(j), and its value is their sum ρ_σ^l, a network's that of its
layers, ρ^Σ; of ``…_max`` the largest, ρ^l, and the largest of the measured layers, ρ^max. Behind layers that are not
piecewise linear it takes one Hessian product for each neuron. It is invariant to layer-wise and neuron-wise rescalings.
"""

from dataclasses import replace

import torch
from torch import nn

from ..hessian.row_sweep import LayerRows, RowSweep
from ..options import Options
from ..report import Estimate
from .base import LARGEST, Estimates, Measure, Task

RELATIVE_FLATNESS = Measure(
    name="relative_flatness",
    formula="κ = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')",
    source="Petzka et al. 2021, Definition 3",
    quantity="gram_weighted",
    invariant="layer-wise, attention rows",
)
RELATIVE_FLATNESS_STD = Measure(
    name="relative_flatness_std",
    formula="κ with φ_j / σ_j for feature φ_j and w_j σ_j for column w_j",
    source="Petzka et al. 2021, Theorem 4",
    quantity="gram_weighted",
    normalize="std",
    invariant="layer-wise, neuron-wise, attention rows",
    cost="one sweep of its own, and a forward pass",
    reads=2,
)
RELATIVE_FLATNESS_COLUMNS = Measure(
    name="relative_flatness_columns",
    formula="κ_col = Σ_{i,j} ⟨w_:i, w_:j⟩ Tr(∂²E/∂w_:i∂w_:j) over the columns w_:j",
    source="relative flatness with rows and columns exchanged",
    quantity="gram_weighted_columns",
    invariant="layer-wise, attention columns",
)


def relative_flatness_max(task: Task) -> Estimates:
    """Return the value of every layer that ran."""
    sweep = RowSweep(task)
    return {name: _of_rows(sweep, rows, name) for name, rows in sweep.rows().items()}


def _of_rows(sweep: RowSweep, rows: LayerRows, name: str) -> Estimate:
    ritz, notes = rows.ritz, sweep.notes(name)
    if ritz.products:
        bound = float(rows.norms @ ritz.residuals)
        converged = "" if ritz.converged else ": not converged"
        notes = (
            *notes,
            f"eigenvalues of the rows within {bound:.1e} in the sum ({ritz.products} Lanczos products){converged}",
        )
    return Estimate(
        value=float(rows.norms @ ritz.values),
        stderr=None,
        samples=sweep.samples,
        method=rows.method,
        exact=rows.exact,
        backend="reference",
        layer=name,
        notes=notes,
    )


RELATIVE_FLATNESS_MAX = Measure(
    name="relative_flatness_max",
    formula="κ^φ = Σ_s |w_s|² λ_max(∂²E/∂w_s²)",
    source="Petzka et al. 2021, Definition 13",
    compute=relative_flatness_max,
    granularity="layer",
    invariant="layer-wise",
    cost="a sweep, and Lanczos in memory or the rows' Hessians",
    reads=2,
)


def largest(model: nn.Module, options: Options, values: Estimates) -> Estimates:
    """Return each layer's largest neuron, and the largest of all for the network, from their values by neuron."""
    found: Estimates = {}
    for name, estimate in values.items():
        if estimate.per_neuron is not None:
            found[name] = replace(estimate, value=float(estimate.per_neuron.max()), per_sample=None)
    largest_of_all = float(torch.tensor([e.value for e in found.values()], dtype=torch.float64, device="cpu").max())
    found[""] = replace(values[""], value=largest_of_all, per_sample=None)
    return found


_BY_NEURON = "Petzka et al. 2019, appendix B and Table 1"
_NEURON_WISE = "layer-wise, neuron-wise"

NEURON_FLATNESS = Measure(
    name="neuron_flatness",
    formula="ρ_σ^l = Σ_j w(j)ᵀ ∂²E/∂w(j)² w(j) over the columns w(j)",
    source=_BY_NEURON,
    quantity="by_column",
    invariant=_NEURON_WISE,
)
NEURON_FLATNESS_MAX = Measure(
    name="neuron_flatness_max",
    formula="ρ^l = max_j w(j)ᵀ ∂²E/∂w(j)² w(j) over the columns; network: ρ^max = max_l ρ^l",
    source=_BY_NEURON,
    base=NEURON_FLATNESS.name,
    derive=largest,
    invariant=_NEURON_WISE,
    network_of=LARGEST,
)
NEURON_FLATNESS_ROWS = Measure(
    name="neuron_flatness_rows",
    formula="Σ_s w_sᵀ ∂²E/∂w_s² w_s over the rows w_s",
    source=_BY_NEURON,
    quantity="by_row",
    invariant=_NEURON_WISE,
)
NEURON_FLATNESS_ROWS_MAX = Measure(
    name="neuron_flatness_rows_max",
    formula="max_s w_sᵀ ∂²E/∂w_s² w_s over the rows; network: the largest of its layers",
    source=_BY_NEURON,
    base=NEURON_FLATNESS_ROWS.name,
    derive=largest,
    invariant=_NEURON_WISE,
    network_of=LARGEST,
)
