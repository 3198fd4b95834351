"""Compute the trace of the loss Hessian in a layer's outputs.

    (1/n) Σ_i Tr(∂²ℓ_i/∂z_i²) = Σ_i Σ_c σ_ic |δ_i^(c)|² / Σ_i ω_i    by the GGN

over all outputs z_i of the layer in sample i: of each position (pixel, token) and call. The mean over samples is
weighted as the loss weights them. ``per_neuron`` is the diagonal by output channel (d,), each entry summed over
positions and calls, and averaged over samples in the same way.

The GGN is the Hessian where the model is piecewise linear behind the layer. Elsewhere the value takes a Hessian product
for each entry of a sample's outputs, or is sampled: E⟨r, (∂²ℓ_i/∂z_i²) r⟩ for random signs r of each sample's own
(Hutchinson 1990). A network's value is the sum over its measured layers. It is not invariant to rescalings: outputs
that are λ times as large have 1/λ² of it. HAWQ-V2 (Dong et al. 2020, arXiv:1911.03852) chooses the bits of activations
by it.
"""

from ..sweep.activations import OUTPUTS
from .base import Measure

OUTPUT_TRACE = Measure(
    name="output_trace",
    formula="(1/n) Σ_i Tr(∂²ℓ_i/∂z_i²), z the layer's outputs",
    source="Dong et al. 2020 (HAWQ-V2), for activations",
    quantity=OUTPUTS,
    cost="one sweep, shared; behind layers that are not piecewise linear a Hessian product for each output",
)
