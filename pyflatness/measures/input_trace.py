"""Compute the trace of the loss Hessian in a layer's inputs, as they enter this layer.

    (1/n) Σ_i Tr(∂²ℓ_i/∂x_i²) = Σ_i Σ_c σ_ic |Wᵀ δ_i^(c)|² / Σ_i ω_i    by the GGN,    z = W x + b

over all inputs x_i of the layer in sample i, of each position and call. A convolution's input is the unpadded one, and
W its dense matrix. Where the model uses x elsewhere too (a residual path), only what this layer takes of it is moved.
``per_neuron`` is the diagonal by input channel (c,), each entry summed over positions and calls, and averaged over
samples in the same way. Of a linear layer with one position, a sample's relative flatness is |x_i|² times its value.

It is the trace of Wᵀ (∂²ℓ_i/∂z_i²) W, so that it is exact, and sampled, where :mod:`.output_trace` is. Embeddings,
bilinear layers, the weights of normalisations and weights in several kinds of uses have no such input, and are refused.
A network's value is the sum over its measured layers. It is not invariant to rescalings.
"""

from ..sweep.activations import INPUTS
from .base import Measure

INPUT_TRACE = Measure(
    name="input_trace",
    formula="(1/n) Σ_i Tr(∂²ℓ_i/∂x_i²), x the layer's inputs",
    source="Dong et al. 2020 (HAWQ-V2), for activations",
    quantity=INPUTS,
    cost="one sweep, shared; behind layers that are not piecewise linear a Hessian product for each output",
)
