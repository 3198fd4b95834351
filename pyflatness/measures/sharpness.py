"""Compute sharpness: the trace of the loss Hessian over all trainable parameters.

    S(θ) = Tr(∂²E/∂θ²) = Σ_j ∂²E/∂θ_j²        weights, biases, affine parameters of normalisation, embeddings, …

"From Loss Flatness to Compressed Representations", Eq. 2; the paper plots its root. Parameters are those that require
gradients, one that is tied counts once, and of a parametrised weight they are the originals. How it is computed:
:mod:`pyflatness.sweep.diagonal`. It is not invariant to rescalings.
"""

from ..sweep import diagonal
from .base import Measure

SHARPNESS = Measure(
    name="sharpness",
    formula="Tr(∂²E/∂θ²), θ all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Eq. 2",
    of_layers=False,
    compute=lambda task: {"": diagonal.estimate(task)},
    granularity="network",
    cost="a sweep of its own; where the model is not piecewise linear in a parameter, a Hessian product for each of "
    "its entries",
)
