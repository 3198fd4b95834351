"""Compute elementwise adaptive sharpness: the trace of the Hessian in relative changes of the weights.

It is Definition E.1 of C24.

    Σ_j w_j² ∂²E/∂w_j² = Σ_i Σ_c σ_ic |w ∘ M_i^(c)|² / Σ_i ω_i    by the GGN            of a layer
    Σ_j θ_j² ∂²E/∂θ_j²,    θ all trainable parameters, biases and normalisation too        of the network

over the entries w_j of a layer's weight. So the network's value is not the sum of its layers'; it takes a sweep of its
own (:mod:`pyflatness.sweep.diagonal`), made where the measure is asked for by name or by ``"all"``:
``measures="sweep"`` gives the layers' values alone. Where the network's cannot be had (too many entries in which the
model is not piecewise linear), the report has the layers' and says why. It is the limit ρ → 0 of
:mod:`.adaptive_sharpness_mc` where the model is twice differentiable.

Behind layers that are not piecewise linear a layer's value comes from the diagonal of the Hessian, d products for a
layer of one position, d min(P, m) for P; sampled as E⟨D, H D⟩ for D = diag(a) w diag(b) with random signs a, b, drawn
for each sample. It is invariant to layer-wise and neuron-wise rescalings.

C24: "From Loss Flatness to Compressed Representations".
"""

from ..sweep import diagonal
from .base import Measure

ADAPTIVE_SHARPNESS = Measure(
    name="adaptive_sharpness",
    formula="Σ_j w_j² ∂²E/∂w_j² over a layer's weight; network: over all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Definition E.1",
    of_layers=False,
    quantity="weighted",
    of_network=lambda task: diagonal.estimate(task, adaptive=True),
    invariant="layer-wise, neuron-wise",
    cost="layers: one sweep, shared; network: a sweep of its own, and where the model is not piecewise linear in "
    "a parameter a Hessian product for each of its entries",
)
