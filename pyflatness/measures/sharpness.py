"""Compute sharpness: the trace of the loss Hessian over all parameters, also in relative changes of them.

    S(θ) = Tr(∂²E/∂θ²) = Σ_j ∂²E/∂θ_j²        weights, biases, affine parameters of normalisation, embeddings, …

is ``sharpness``: C24, Eq. 2; the paper plots its root. Parameters are those that require gradients, one that is tied
counts once, and of a parametrised weight they are the originals. How it is computed: :mod:`pyflatness.sweep.diagonal`.
It is not invariant to rescalings.

    (1/n) Σ_i |∂f_i/∂θ|²        f_i all outputs of a sample, θ all trainable parameters

is ``interpolation_sharpness``, sharpness at interpolation (C24, Eq. 3; also Ma and Ying 2021). It is the trace of the
Hessian of (1/n) Σ_i ½|f_i - y_i|² where f = y, and for a network that is locally linear in each parameter (ReLU) at any
residual. The user's loss and targets do not count, nor what the loss ignores. First derivatives only: what is sent
backward are the unit vectors of the outputs. It is not invariant to rescalings.

    Σ_j w_j² ∂²E/∂w_j² = Σ_i Σ_c σ_ic |w ∘ M_i^(c)|² / Σ_i ω_i    by the GGN            of a layer
    Σ_j θ_j² ∂²E/∂θ_j²,    θ all trainable parameters, biases and normalisation too        of the network

over the entries w_j of a layer's weight is ``adaptive_sharpness``, elementwise (C24, Definition E.1). So the network's
value is not the sum of its layers'; it takes a sweep of its own (:mod:`pyflatness.sweep.diagonal`), made where the
measure is asked for by name or by ``"all"``: ``measures="sweep"`` gives the layers' values alone. Where the network's
cannot be had (too many entries in which the model is not piecewise linear), the report has the layers' and says why. It
is the limit ρ → 0 of :mod:`.adaptive_sharpness_mc` where the model is twice differentiable. Behind layers that are not
piecewise linear a layer's value comes from the diagonal of the Hessian: d products for a layer of one position, d
min(P, m) for P. It is sampled as E⟨D, H D⟩ for D = diag(a) w diag(b) with random signs a, b, drawn for each sample. It
is invariant to layer-wise and neuron-wise rescalings.

    (1/n) Σ_i Σ_j θ_j² |∂f_i/∂θ_j|²        f_i all outputs of a sample, θ_j all trainable parameters

is ``interpolation_adaptive_sharpness``, adaptive sharpness at interpolation (C24, Eq. 41): its leading term, for E =
(1/n) Σ_i ½|f_i - y_i|², where f is close to y (Lemma E.2). It bounds the measure ``input_invariant_mls`` (Proposition
E.4; ``pf.theory.bounds(…, adaptive=True)`` has both sides). The user's loss and targets do not count. First derivatives
only. It is invariant to layer-wise and neuron-wise rescalings.

C24: "From Loss Flatness to Compressed Representations".
"""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ..losses import SquaredError, Terms
from ..losses.base import uniform
from ..report import Estimate
from ..sweep import diagonal
from .base import Measure, Task

SHARPNESS = Measure(
    name="sharpness",
    formula="Tr(∂²E/∂θ²), θ all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Eq. 2",
    of_network=diagonal.estimate,
    cost="a sweep of its own; where the model is not piecewise linear in a parameter, a Hessian product for each of "
    "its entries",
)


@dataclass
class HalfSquaredError(SquaredError):
    """Represent Σ_i ½|f_i - y_i|², whose second derivative in the outputs is 1."""

    reduction: str = "sum"

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """Return terms in which every row counts alike, whatever the targets."""
        return uniform(outputs.numel() // outputs.shape[class_dim], 1.0, 1.0, outputs.device)


def of_outputs(task: Task, *, adaptive: bool = False) -> Estimate:
    """Return (1/n) Σ_i Σ_j a_j² |∂f_i/∂θ_j|² over all trainable parameters; ``adaptive``: a_j = θ_j, else 1."""
    options = replace(task.options, curvature="ggn")
    of_outputs = replace(task, loss=HalfSquaredError(), options=options)
    with task.forward.in_full():
        found = diagonal.estimate(of_outputs, adaptive=adaptive, certify=False)
    return replace(
        found,
        value=found.value / found.samples,
        stderr=None if found.stderr is None else found.stderr / found.samples,
        per_sample=None if found.per_sample is None else found.per_sample / found.samples,
        exact=found.stderr is None,
    )


INTERPOLATION_SHARPNESS = Measure(
    name="interpolation_sharpness",
    formula="(1/n) Σ_i |∂f_i/∂θ|², θ all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Eq. 3",
    of_network=of_outputs,
    cost="a sweep of its own: one backward pass per output",
)


INTERPOLATION_ADAPTIVE_SHARPNESS = Measure(
    name="interpolation_adaptive_sharpness",
    formula="(1/n) Σ_i Σ_j θ_j² |∂f_i/∂θ_j|², θ all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Eq. 41",
    of_network=partial(of_outputs, adaptive=True),
    invariant="layer-wise, neuron-wise",
    cost="a sweep of its own: one backward pass per output",
)


ADAPTIVE_SHARPNESS = Measure(
    name="adaptive_sharpness",
    formula="Σ_j w_j² ∂²E/∂w_j² over a layer's weight; network: over all trainable parameters",
    source="From Loss Flatness to Compressed Representations, Definition E.1",
    of_layers=False,
    quantity="weighted",
    of_network=partial(diagonal.estimate, adaptive=True),
    invariant="layer-wise, neuron-wise",
    cost="layers: one sweep, shared; network: a sweep of its own, and where the model is not piecewise linear in "
    "a parameter a Hessian product for each of its entries",
)
