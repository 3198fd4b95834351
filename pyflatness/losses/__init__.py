"""Define losses: each one's curvature in a row of outputs, and the user's reduction.

A row is one loss term: a sample's outputs, or those of one of its positions. The empirical risk is

    E = Σ_i scale_i ℓ_i / Σ_i ω_i   (reduction "mean")        E = Σ_i scale_i ℓ_i   (reduction "sum")

over *all* rows of the data set, whatever the batches; Σ_i ω_i is the normaliser. For its rows a loss gives the scale
and the weight ω, the contribution to relative flatness at a head, ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ |φ_i|² (Petzka et al. 2021,
Definition 3), and the square-root factors S_i with ∂²ℓ_i/∂f_i² = S_i diag(σ_i) S_iᵀ, whose columns a sweep sends
backward.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

from torch import nn
from torch.nn import functional as F

from ..contractions import Labels
from ..errors import InputError, NotYetError
from ..messages import received, shown
from . import advice
from .base import Curvature, Factors, Known, Loss, Mixtures, Reduction, Terms, marked
from .cross_entropy import CrossEntropy
from .custom import CustomLoss
from .elementwise import BinaryCrossEntropy, SquaredError
from .rows import Rows, of_batch, rows, tensor_targets

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Curvature",
    "CustomLoss",
    "Factors",
    "Known",
    "Labels",
    "Loss",
    "Mixtures",
    "Rows",
    "SquaredError",
    "Terms",
    "known",
    "marked",
    "names",
    "of_batch",
    "resolve",
    "rows",
    "tensor_targets",
]


def names() -> tuple[str, ...]:
    """Return the names of losses that :func:`resolve` knows; it knows those of their classes too."""
    return tuple(_OF_FUNCTIONS)


def resolve(loss: Any, reduction: Reduction | None = None) -> Loss:
    """Return the loss of an ``nn`` module, an ``F`` function (or a ``partial`` of one), a name or a callable.

    A callable is a mean over samples unless ``reduction="sum"``.
    """
    if isinstance(loss, str):
        if loss not in _NAMES:
            raise InputError(f"loss={loss!r} is not known; choose {', '.join(names())}, or pass a loss object")
        loss = _NAMES[loss]
    if isinstance(loss, functools.partial) and isinstance(loss.func, Hashable) and loss.func in _FUNCTIONS:
        loss = _with_options(loss)
    elif isinstance(loss, Hashable) and not isinstance(loss, nn.Module) and loss in _FUNCTIONS:
        loss = _DEFAULTS[loss]
    if isinstance(loss, type) or not callable(loss):
        wanted = "an nn loss module, an F function, a name or a callable is wanted"
        raise InputError(f"loss: {wanted}, {received('loss', loss)}")
    how = getattr(loss, "reduction", "mean") if reduction is None else reduction
    if reduction is None and how == "batchmean" and isinstance(loss, nn.KLDivLoss):
        how = "mean"  # over samples, while KLDivLoss's "mean" is one over outputs too
    if not isinstance(how, str) or how not in ("mean", "sum"):
        raise InputError(f"loss: reduction {shown(how)} gives no number to differentiate; pass 'mean' or 'sum'")
    if type(loss) is nn.CrossEntropyLoss:
        return CrossEntropy(loss.weight, loss.ignore_index, loss.label_smoothing, how)
    if type(loss) is nn.MSELoss:
        return SquaredError(how)
    if type(loss) is nn.BCEWithLogitsLoss:
        return BinaryCrossEntropy(loss.weight, loss.pos_weight, how)
    return CustomLoss(loss, how)


def known(loss: Any, lacks: str) -> Known:
    """Return the loss of :func:`resolve` if it is one of torch's, or raise that a callable has no ``lacks``."""
    resolved = resolve(loss)
    if not resolved.known:
        raise NotYetError(
            f"loss={shown(loss)}: {'this loss' if advice.is_nll(loss) else 'a callable'} has no {lacks}; "
            f"{advice.for_known(loss)}"
        )
    return cast(Known, resolved)


def _with_options(loss: functools.partial[Any]) -> nn.Module:
    try:
        return _FUNCTIONS[loss.func](*loss.args, **loss.keywords)
    except TypeError as error:
        raise InputError(f"loss: {shown(loss)} is not F.{loss.func.__name__} with its options ({error})") from None


_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
_DEFAULTS = {function: module() for function, module in _FUNCTIONS.items()}
_OF_FUNCTIONS: dict[str, Any] = {function.__name__: module for function, module in _DEFAULTS.items()}
_NAMES = _OF_FUNCTIONS | {type(module).__name__: module for module in _OF_FUNCTIONS.values()}
