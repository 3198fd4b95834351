"""Compute sharpness at interpolation ("From Loss Flatness to Compressed Representations", Eq. 3).

It is also found in Ma and Ying (2021).

    S(θ) = (1/n) Σ_i |∂f_i/∂θ|²        f_i all outputs of a sample, θ all trainable parameters

It is the trace of the Hessian of (1/n) Σ_i ½|f_i - y_i|² where f = y, and for a network that is locally linear in each
parameter (ReLU) at any residual. The user's loss and targets do not count, nor what the loss ignores. First derivatives
only: the cotangents are the unit vectors of the outputs. It is not invariant to rescalings.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from ..losses import SquaredError, Terms
from ..losses.base import uniform
from ..report import Estimate
from ..sweep import diagonal
from .base import Measure, Task


@dataclass
class HalfSquaredError(SquaredError):
    """Represent Σ_i ½|f_i - y_i|², whose second derivative in the outputs is 1."""

    reduction: str = "sum"

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        """Return terms in which every row counts alike, whatever the targets."""
        return uniform(outputs.numel() // outputs.shape[class_dim], 1.0, 1.0, outputs.device)


def estimate(task: Task, *, adaptive: bool = False) -> Estimate:
    """Return (1/n) Σ_i Σ_j a_j² |∂f_i/∂θ_j|² over all trainable parameters; ``adaptive``: a_j = θ_j, else 1."""
    options = replace(task.options, curvature="ggn")
    found = diagonal.estimate(replace(task, loss=HalfSquaredError(), options=options), adaptive=adaptive, certify=False)
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
    of_layers=False,
    compute=lambda task: {"": estimate(task)},
    granularity="network",
    cost="a sweep of its own: one backward pass per output",
)
