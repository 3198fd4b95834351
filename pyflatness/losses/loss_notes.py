"""Make notes for readers of a value on how a loss and the model's outputs fit together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from ..numerics.normal_vectors import NormalVectors
from . import advice, log_softmax
from .base import Loss
from .cross_entropy import CrossEntropy
from .custom import CustomLoss
from .elementwise import BinaryCrossEntropy

PROBABILITIES = (
    "the model's outputs are probabilities (a softmax is in it), and cross-entropy takes a softmax of them again: it "
    "is meant for logits; leave the softmax out, as model[:-1] of a Sequential does"
)
OF_A_SIGMOID = (
    "all outputs of the first batch are between 0 and 1, as behind a sigmoid, and the loss is meant for logits: if the "
    "model ends in a sigmoid, leave it out, as model[:-1] of a Sequential does"
)
NO_CURVATURE = (
    "the loss has second derivative 0 in the outputs of the first batch, as L1 and hinge losses have wherever it "
    "exists: their kinks have no part in a value"
)
NLL_OF_LOGITS = (
    "NLLLoss wants log-probabilities, and the model's outputs are none: end the model with log_softmax, or pass "
    "CrossEntropyLoss for logits; NLLLoss is linear in the outputs and so has second derivative 0 in them"
)
OF_GGN_ALONE = (
    "NLLLoss is linear in the log-probabilities that the model returns: all curvature is that of the model's "
    "log_softmax, which the GGN leaves out; curvature='hessian' has it, and so has CrossEntropyLoss on logits"
)
"""A note that concerns estimates by the GGN alone: the Hessian is complete."""
_PRODUCTS = "Addmm", "Mm", "Bmm", "UnsafeView", "Convolution"  # autograd's nodes of layers whose outputs are logits
_ENOUGH = 16  # outputs; as many logits are hardly all between 0 and 1 by chance


def refuse_without_curvature(notes: Sequence[str] | None, what: str) -> None:
    """Raise if values by the GGN would be 0 for every weight, because the loss has no curvature in the outputs."""
    reason = next((note for note in notes or () if note in (NO_CURVATURE, NLL_OF_LOGITS, OF_GGN_ALONE)), None)
    if reason is not None:
        raise InputError(f"loss: without curvature in the outputs {what} would be 0 for every weight: {reason}")


def of(loss: Loss, outputs: Tensor, targets: Tensor, parameters: Sequence[Tensor]) -> tuple[str, ...]:
    """Return notes for estimates, from the outputs and targets of some samples."""
    last, outputs, notes = outputs.grad_fn, outputs.detach(), []
    real = [parameter.dtype for parameter in parameters if parameter.is_floating_point()]
    finer = [dtype for dtype in real if torch.promote_types(dtype, outputs.dtype) != outputs.dtype]
    if finer:
        eps = torch.finfo(outputs.dtype).eps
        notes.append(
            f"the outputs are {outputs.dtype} and the parameters {finer[0]}, as under autocast: the value has the "
            f"rounding of the narrower one, {eps:.0e} of it and more; measure without autocast for the parameters' own"
        )
    if isinstance(loss, log_softmax.OfLogits):
        notes.append(log_softmax.NOTE)
    elif isinstance(loss, (CrossEntropy, BinaryCrossEntropy)):
        of_product = last is not None and last.name().startswith(_PRODUCTS)
        notes += [] if of_product else _of_probabilities(loss, outputs)
    if isinstance(loss, CustomLoss) and advice.is_nll(loss.loss):
        notes.append(OF_GGN_ALONE if _are_log_probabilities(outputs) else NLL_OF_LOGITS)
    elif isinstance(loss, CustomLoss) and _is_straight(loss, outputs, targets):
        notes.append(NO_CURVATURE)
    return tuple(notes)


def _of_probabilities(loss: Loss, outputs: Tensor) -> list[str]:
    """Return a note if the outputs (n, C, …) are probabilities; for others the host waits for the device once."""
    least = float(outputs.amin()) if outputs.numel() else -1.0
    if not least >= 0:
        return []
    if isinstance(loss, CrossEntropy) and _add_up_to_one(outputs):
        return [PROBABILITIES]
    # Those of a ReLU have zeros among them.
    within = outputs.numel() >= _ENOUGH and least > 0 and bool(outputs.amax() <= 1)
    return [OF_A_SIGMOID] if within else []


def _add_up_to_one(outputs: Tensor) -> bool:
    """Return whether the outputs (n, C, …) add up to 1 over the classes."""
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        return False
    off = (outputs.double().sum(dim=1) - 1).abs().amax()
    return bool(off <= outputs.shape[1] * torch.finfo(outputs.dtype).eps)


def _are_log_probabilities(outputs: Tensor) -> bool:
    """Return whether the exponentials of the outputs, (n, C, …) or (C,), add up to 1 over the classes."""
    dim = min(1, outputs.ndim - 1)
    off = outputs.double().logsumexp(dim=dim).abs().amax()
    return bool(off <= 8 * outputs.shape[dim] * torch.finfo(outputs.dtype).eps)


def _is_straight(loss: CustomLoss, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether second derivatives in a random direction are exactly 0."""
    with torch.enable_grad():
        leaf = outputs.double().requires_grad_()
        (gradient,) = torch.autograd.grad(loss.value(leaf, targets), leaf, create_graph=True)
        if not gradient.requires_grad:
            return True
        (product,) = torch.autograd.grad(gradient, leaf, NormalVectors().like(leaf), allow_unused=True)
    return product is None or not bool(product.any())
