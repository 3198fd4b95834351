"""Define the KL divergence of a changed model's predictions from those of the model.

    KL(p₀ ‖ p) = Σ_c p₀_c (log p₀_c - log p_c)        p₀ at the model's weights, p at changed weights

At p = p₀ its gradient is 0, and its second derivative in the outputs is that of cross-entropy, diag(p) - p pᵀ. So its
Hessian in the weights is the GGN there, for any architecture.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError
from ..messages import shown
from ..model import hugging_face
from .auto import AUTO
from .base import Loss
from .cross_entropy import CrossEntropy

NAME = "kl"


def trained_with(model: nn.Module) -> str:
    """Return the loss with the divergence's terms: the own loss of a model of transformers, or cross-entropy."""
    return "cross_entropy" if hugging_face.inner(model) is None else AUTO


@dataclass
class Divergence(CrossEntropy):
    """Represent this divergence over the terms of a cross-entropy, whose targets show which rows are ignored."""

    reference: Tensor | None = None  # the unchanged model's outputs; None for the outputs passed

    @classmethod
    def of(cls, loss: Loss) -> "Divergence":
        """Return the divergence over the terms of a loss.

        Raises:
            InputError: the loss is not cross-entropy, so that outputs are not logits of classes.
        """
        if type(loss) is not CrossEntropy:
            raise InputError(f"loss='kl': it is one of probabilities of classes, and the model's loss is {shown(loss)}")
        return cls(None, loss.ignore_index, 0.0, loss.reduction)

    def reduced(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        reference = outputs.detach() if self.reference is None else self.reference
        log_p, of_model = (F.log_softmax(logits.double(), dim=1) for logits in (outputs, reference))
        each = torch.where(of_model == -torch.inf, 0.0, of_model.exp() * (of_model - log_p)).sum(dim=1)
        used = self.used(targets)
        each = each if used is None else torch.where(used.view_as(each), each, 0.0)
        return each.sum() if reduction == "sum" else each
