"""Adaptive sharpness of a layer: the trace of the Hessian in relative changes of the weights (C24 Definition E.1).

    Σ_j w_j² ∂²E/∂w_j² = Σ_i Σ_c σ_ic |w ∘ M_i^(c)|² / Σ_i mass_i    by the GGN

over the entries w_j of a layer's weight; the sum over its measured layers for a network. Behind curved layers from the
diagonal of the Hessian, d products for a layer of one position, d min(P, m) for P; sampled as E⟨D, H D⟩ for
D = diag(a) w diag(b) with random signs a, b, drawn for each sample. Invariant to layer-wise and neuron-wise rescalings.

C24: "From Loss Flatness to Compressed Representations".
"""

from .base import Measure

ADAPTIVE_SHARPNESS = Measure(
    name="adaptive_sharpness",
    formula="Σ_j w_j² ∂²E/∂w_j² over a layer's weight",
    source="From Loss Flatness to Compressed Representations, Definition E.1",
    quantity="weighted",
    invariant="layer-wise, neuron-wise",
)
