"""Advise what to pass instead of a loss that cannot be measured as it is."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import FlatnessError, InputError
from ..messages import is_out_of_memory, second_derivatives, shown

_KNOWN = (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss)
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss)
_ELEMENTWISE_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy)
# Exceptions that torch raises for a call that does not fit; exceptions of other classes are passed on.
_OF_A_CALL = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, AssertionError)


def name(loss: Any) -> str:
    """Return a short name of a loss."""
    loss = _inner(loss)
    of_torch = isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.")
    return f"nn.{type(loss).__name__}" if of_torch else getattr(loss, "__name__", type(loss).__name__)


def is_nll(loss: Any) -> bool:
    """Return whether a loss is torch's negative log-likelihood, which takes log-probabilities."""
    loss = _inner(loss)
    return isinstance(loss, nn.NLLLoss) or loss is F.nll_loss


def is_elementwise(loss: Any) -> bool:
    """Return whether a loss is one of torch's that compare outputs with targets of the same shape entry by entry.

    Torch broadcasts other shapes with a warning, and computes another function, or refuses them.
    """
    loss = _inner(loss)
    return isinstance(loss, _ELEMENTWISE) or (callable(loss) and loss in _ELEMENTWISE_FUNCTIONS)


def for_known(loss: Any) -> str:
    """Return advice on what to pass instead of a loss that is not :class:`.Known`."""
    if is_nll(loss):
        return (
            "leave the LogSoftmax out of the model, so that it returns logits, and pass nn.CrossEntropyLoss with the "
            "same weight=, ignore_index= and reduction=, which is the same loss"
        )
    return "pass nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss with its options"


def for_callable(loss: Any) -> str:
    """Return advice on what to pass instead of a loss that is no mean or sum over samples, or not in float64."""
    if is_nll(loss):
        return (
            "class weights and ignored targets make the mean of nn.NLLLoss one over their total weight: leave the "
            "LogSoftmax out of the model and pass nn.CrossEntropyLoss with the same weight= and ignore_index=, the "
            "same loss on logits, or nn.NLLLoss(…, reduction='sum').double()"
        )
    loss = _inner(loss)
    for known in _KNOWN:
        if isinstance(loss, known):
            return (
                f"{type(loss).__name__} is a subclass of nn.{known.__name__}, so it may compute anything and is taken "
                f"as a callable: pass nn.{known.__name__} with its options if it computes that, or a callable that is "
                "a mean over samples"
            )
    return (
        "class weights and ignored targets make the mean of a cross-entropy one over their total weight: pass "
        "nn.CrossEntropyLoss(weight=…, ignore_index=…) instead of a callable around it"
    )


@contextlib.contextmanager
def on_call(loss: Any, outputs: Tensor, targets: Tensor) -> Iterator[None]:
    """Turn an error of a loss in this context into one that says how the loss was called."""
    try:
        yield
    except FlatnessError:
        raise
    except _OF_A_CALL as error:
        if is_out_of_memory(error):
            raise
        if any(text in str(error) for text in ("scalar type", "same dtype")):
            raise InputError(
                f"loss: it is called on outputs in float64 and does not take them ({error}); have its own tensors in "
                f"float64 (loss.double() for a module), or follow the outputs' dtype; {for_callable(loss)}"
            ) from error
        raise InputError(
            f"loss: {name(loss)} is called as loss(outputs, targets), with outputs {_shape_and_dtype(outputs)} and "
            f"targets {_shape_and_dtype(targets)} (losses are computed in float64), and raised {type(error).__name__}: "
            f"{error}; {_way_out(loss, outputs, targets)}"
        ) from error


def on_second_derivative(loss: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context for differentiating a loss twice; its error says that torch has no second derivative."""
    return second_derivatives(
        f"loss: torch has no second derivative of {name(loss)}",
        "pass the same loss written with operations that have one, a callable (outputs, targets) -> scalar",
    )


def _inner(loss: Any) -> Any:
    return loss.func if isinstance(loss, functools.partial) else loss


def _way_out(loss: Any, outputs: Any, targets: Any) -> str:
    if is_elementwise(loss) and isinstance(targets, Tensor) and not targets.is_floating_point():
        return "pass targets.float()"
    if isinstance(outputs, Tensor):
        return "pass a callable that takes the model's outputs first and the targets second"
    return (
        "the model returns several outputs, and a callable gets them all: pass one that takes them, or forward=, a "
        "function (model, batch) -> (outputs, targets) that returns the outputs that are meant"
    )


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}" if isinstance(tensor, Tensor) else shown(tensor)
