"""Elementwise adaptive sharpness ("From Loss Flatness to Compressed Representations", Definition E.1, Eq. 40).

    Σ_j θ_j² ∂²E/∂θ_j²        θ all trainable parameters, each once

It is what :mod:`.adaptive_sharpness_mc` has for its limit, ρ → 0. How it is computed: :mod:`pyflatness.diagonal`.
Invariant to layer-wise and neuron-wise rescalings: each parameter's second derivative goes with its inverse square.
"""

from .. import diagonal
from .base import Measure

ADAPTIVE_SHARPNESS = Measure(
    name="adaptive_sharpness",
    formula="Σ_j θ_j² ∂²E/∂θ_j², θ all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Definition E.1",
    compute=lambda task: {"": diagonal.estimate(task, adaptive=True)},
    granularity="network",
    invariant="layer-wise, neuron-wise",
    cost="a sweep of its own; where the model is curved in a parameter, a Hessian product for each of its entries",
)
