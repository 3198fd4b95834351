"""Compute relative flatness (Petzka et al. 2021, Definition 3; normalised: Theorem 4).

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')
         = Σ_i Σ_c σ_ic |R M_i^(c)|² / Σ_i ω_i,   RᵀR = w wᵀ,    by the GGN: square-root factors sent backward

A network's value is the sum over its layers (appendix A). It is invariant to layer-wise rescalings of ReLU networks;
with features divided and columns multiplied by the features' deviation also to neuron-wise ones. At a head see
:mod:`.at_head`.
"""

from .base import Measure

RELATIVE_FLATNESS = Measure(
    name="relative_flatness",
    formula="κ = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')",
    source="Petzka et al. 2021, Definition 3",
    quantity="gram_weighted",
    invariant="layer-wise",
)
RELATIVE_FLATNESS_STD = Measure(
    name="relative_flatness_std",
    formula="κ with φ_j / σ_j for feature φ_j and w_j σ_j for column w_j",
    source="Petzka et al. 2021, Theorem 4",
    quantity="gram_weighted",
    normalize="std",
    invariant="layer-wise, neuron-wise",
    cost="one sweep of its own, and a forward pass",
    reads=2,
)
