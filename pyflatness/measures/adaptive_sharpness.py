"""Elementwise adaptive sharpness: the trace of the Hessian in relative changes of the weights (C24 Definition E.1).

    Σ_j w_j² ∂²E/∂w_j² = Σ_i Σ_c σ_ic |w ∘ M_i^(c)|² / Σ_i mass_i    by the GGN

over the entries w_j of a layer's weight; the sum over its measured layers for a network. Of the network with all its
trainable parameters θ, biases and normalisation too, Σ_j θ_j² ∂²E/∂θ_j² (:mod:`pyflatness.diagonal`): the limit ρ → 0
of :mod:`.adaptive_sharpness_mc`. Behind curved layers from the
diagonal of the Hessian, d products for a layer of one position, d min(P, m) for P; sampled as E⟨D, H D⟩ for
D = diag(a) w diag(b) with random signs a, b, drawn for each sample. Invariant to layer-wise and neuron-wise rescalings.

C24: "From Loss Flatness to Compressed Representations".
"""

from .. import diagonal
from .base import Measure

ADAPTIVE_SHARPNESS = Measure(
    name="adaptive_sharpness",
    formula="Σ_j w_j² ∂²E/∂w_j² over a layer's weight",
    source="From Loss Flatness to Compressed Representations, Definition E.1",
    quantity="weighted",
    invariant="layer-wise, neuron-wise",
)
ADAPTIVE_SHARPNESS_NETWORK = Measure(
    name="adaptive_sharpness_network",
    formula="Σ_j θ_j² ∂²E/∂θ_j², θ all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Definition E.1",
    compute=lambda task: {"": diagonal.estimate(task, adaptive=True)},
    granularity="network",
    invariant="layer-wise, neuron-wise",
    cost="a sweep of its own; where the model is curved in a parameter, a Hessian product for each of its entries",
)
