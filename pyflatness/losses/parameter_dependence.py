"""Find out whether a loss depends on a model's parameters other than through the model's outputs.

The measures are those of the empirical risk E(w) = mean_i ℓ(f(x_i, w), y_i), differentiated through f. A penalty on the
weights in the same callable would count as a constant, and would be missing from every value.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..model.parameters import requiring
from .base import Loss
from .custom import CustomLoss

REFUSAL = (
    "loss: its value depends on parameters in another way than by the model's outputs (it still requires a gradient "
    "when these are detached), as with weight decay in it, activations that the model keeps, or targets that forward= "
    "computes with the model. The measures are those of the empirical risk, whose derivatives go through the outputs: "
    "have forward= return targets.detach(), or pass the loss without it, and add by hand what it contributes (½ λ |θ|² "
    "adds λ to every second derivative, so λ m |w|² to the relative flatness of a layer of m columns)"
)


def depends_on(loss: Loss, run: Callable[[], tuple[Tensor, Tensor]], parameters: Iterable[Tensor]) -> bool:
    """Return whether the loss of detached outputs has a gradient in any of a model's parameters, frozen ones too.

    ``run`` runs the model while all parameters require gradients, so that tensors that it keeps have a graph.
    """
    with requiring(parameters, flag=True) as leaves, torch.enable_grad():
        outputs, targets = run()
        value = loss.value(outputs.detach(), targets)
        if not leaves or not value.requires_grad:
            return False
        return any(g is not None for g in torch.autograd.grad(value, leaves, allow_unused=True))


def depends_on_more(loss: Loss, outputs: Tensor, targets: Tensor, head: Iterable[Tensor]) -> bool:
    """Return whether the loss for a head given as tensors has a gradient in the head other than by its outputs."""
    assert isinstance(loss, CustomLoss)
    own = [*loss.loss.parameters()] if isinstance(loss.loss, nn.Module) else []
    with requiring(own, flag=False), requiring(head, flag=True), torch.enable_grad():
        return loss.value(outputs.detach(), targets).requires_grad
