"""Compute adaptive sharpness at interpolation ("From Loss Flatness to Compressed Representations", Eq. 41).

    (1/n) Σ_i Σ_j θ_j² |∂f_i/∂θ_j|²        f_i all outputs of a sample, θ_j all trainable parameters

It is the leading term of adaptive sharpness, Σ_j θ_j² ∂²E/∂θ_j² for E = (1/n) Σ_i ½|f_i - y_i|², where f is close to y
(Lemma E.2), and bounds the measure ``input_invariant_mls`` (Proposition E.4; ``pf.theory.bounds(…, adaptive=True)`` has
both sides). The user's loss and targets do not count. First derivatives only. It is invariant to layer-wise and
neuron-wise rescalings.
"""

from .base import Measure
from .interpolation_sharpness import estimate

INTERPOLATION_ADAPTIVE_SHARPNESS = Measure(
    name="interpolation_adaptive_sharpness",
    formula="(1/n) Σ_i Σ_j θ_j² |∂f_i/∂θ_j|², θ all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Eq. 41",
    of_layers=False,
    compute=lambda task: {"": estimate(task, adaptive=True)},
    granularity="network",
    invariant="layer-wise, neuron-wise",
    cost="a sweep of its own: one backward pass per output",
)
